"""Published weights: where they lie on this disk, and how they come there. What cannot be had is said in seconds."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from huggingface_hub import constants, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

from duplex.encoders.openclip import HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME, open_clip
from duplex.errors import DuplexError

DOWNLOADS = Path("~/.cache/clip")  # where open_clip puts what does not come from the hub
PATIENCE = (5, 10)  # seconds to connect, seconds for an answer
BELOW: type[Exception] = HfHubHTTPError.__mro__[1]  # of the library that speaks to the hub
TRANSFER: tuple[type[Exception], ...] = (BELOW, OSError, ValueError, RuntimeError, EntryNotFoundError)
WEIGHTS = (HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME)  # what a repository calls them, the better one first


def place_on_disk(published: dict[str, Any]) -> Path | None:
    """The file of published weights (an entry of open_clip's table), or None where it would have to be fetched."""
    url = str(published.get("url", ""))
    if url and (found := DOWNLOADS.expanduser() / url.rsplit("/", 1)[-1]).is_file():
        return found
    owner, names = _repository(published)
    return hub_file_on_disk(owner, names) if owner else None


def hub_file_on_disk(owner: str, names: Sequence[str]) -> Path | None:
    """The first of some files of a repository that is on disk."""
    for name in names:
        found = try_to_load_from_cache(owner, name)
        if isinstance(found, str) and Path(found).is_file():
            return Path(found)
    return None


def address(published: dict[str, Any]) -> str:
    """Where published weights would be fetched from."""
    owner, names = _repository(published)
    return hf_hub_url(owner, names[0]) if owner else str(published.get("url", ""))


def fetch(published: dict[str, Any], what: str) -> Path:
    """The file of published weights, fetched if it is not there; `what` they are, for a person."""
    if found := place_on_disk(published):
        return found
    owner, names = _repository(published)
    return fetch_from_hub(owner, names, what) if owner else _fetch_url(published, what)


def fetch_from_hub(owner: str, names: Sequence[str], what: str) -> Path:
    """The first of some files that a repository has."""
    if found := hub_file_on_disk(owner, names):
        return found
    _reach(hf_hub_url(owner, names[0]), what)
    for name in names:
        try:
            return Path(hf_hub_download(owner, name))
        except EntryNotFoundError:
            continue
        except TRANSFER as error:
            raise unreachable(what, error) from error
    raise DuplexError(f"the weights of {what} are not on disk, and {owner} holds no {' or '.join(names)}")


def unreachable(what: str, error: BaseException) -> DuplexError:
    offline = " (HF_HUB_OFFLINE is set)" if _offline() else ""
    reason = " ".join(str(error).split()) or type(error).__name__
    return DuplexError(
        f"the weights of {what} are not on disk and could not be fetched{offline}: {reason}; "
        "fetch them where there is a network, or name a folder that holds them as local-dir:FOLDER"
    )


def _fetch_url(published: dict[str, Any], what: str) -> Path:
    """Through open_clip, which knows some of the hashes; into the place where it looks, whole or not at all."""
    folder = DOWNLOADS.expanduser()
    _reach(published["url"], what)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            found = Path(open_clip.download_pretrained(published, prefer_hf_hub=False, cache_dir=scratch))
            return found.replace(folder / found.name)
    except TRANSFER as error:
        raise unreachable(what, error) from error


def _repository(published: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """`timm/vit_large/` -> its owner and the names of its weights; no owner where the hub does not have them."""
    owner, _, file = published.get("hf_hub", "").rpartition("/")
    return owner, (file,) if file else WEIGHTS


def _reach(url: str, what: str) -> None:
    """One question with a short patience: the hub's own client asks twelve times, for a minute."""
    if _offline():
        raise unreachable(what, OSError("no network is used"))
    try:
        _ask(url)
    except (requests.RequestException, ValueError) as error:
        raise unreachable(what, OSError(f"{urlsplit(url).hostname} does not answer")) from error


def answers(url: str) -> bool:
    """Whether something could be fetched from there."""
    try:
        if not _offline():
            _ask(url)
    except (requests.RequestException, ValueError):
        return False
    return not _offline()


def _ask(url: str) -> None:
    requests.head(url, timeout=PATIENCE, allow_redirects=False)


def _offline() -> bool:
    return bool(constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE"))
