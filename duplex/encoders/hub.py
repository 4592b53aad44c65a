"""Find the files of published weights on disk, or download them; without a network, raise an error within seconds."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import constants, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError

from duplex.encoders.openclip import HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME, open_clip
from duplex.errors import DuplexError

DOWNLOADS = Path("~/.cache/clip")  # open_clip's folder for weights that are not on the hub
FORM = "local-dir:FOLDER"  # name of an open_clip encoder whose weights are in a folder
TIMEOUT = (5, 10)  # seconds to connect, seconds for a response
WEIGHTS = (HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME)  # names in a repository, the preferred one first


def weights_on_disk(published: dict[str, Any]) -> Path | None:
    """The path of published weights if they are on this disk, else None.

    Args:
        published: an entry of open_clip's table of published weights.
    """
    url = str(published.get("url", ""))
    if url and (file := DOWNLOADS.expanduser() / url.rsplit("/", 1)[-1]).is_file():
        return file
    owner, names = _repository(published)
    return hub_file_on_disk(owner, names) if owner else None


def hub_file_on_disk(owner: str, names: Sequence[str]) -> Path | None:
    """The path of the first of the files `names` of a Hugging Face repository that is on disk, or None."""
    for name in names:
        cached = try_to_load_from_cache(owner, name)
        if isinstance(cached, str) and Path(cached).is_file():
            return Path(cached)
    return None


def download_address(published: dict[str, Any]) -> str:
    """The URL from which published weights would be downloaded.

    Args:
        published: an entry of open_clip's table of published weights.
    """
    owner, names = _repository(published)
    return hf_hub_url(owner, names[0]) if owner else str(published.get("url", ""))


def fetch_weights(published: dict[str, Any], what: str) -> Path:
    """The path of published weights, downloading them if necessary.

    Args:
        published: an entry of open_clip's table of published weights. what: name of the weights in error messages.
    """
    if file := weights_on_disk(published):
        return file
    owner, names = _repository(published)
    return fetch_from_hub(owner, names, what) if owner else _fetch_url(published, what)


def fetch_from_hub(owner: str, names: Sequence[str], what: str, form: str = FORM) -> Path:
    """The path of the first of the files `names` in a Hugging Face repository, downloading it if necessary.

    Args:
        owner: the repository, OWNER/NAME. what: name of the weights in error messages. form: as in `download_error`.
    """
    if file := hub_file_on_disk(owner, names):
        return file
    _check_reachable(hf_hub_url(owner, names[0]), what, form)
    for name in names:
        try:
            return Path(hf_hub_download(owner, name))
        except EntryNotFoundError:
            continue
        except Exception as error:  # of the hub's client, its HTTP library, the network or the disk
            raise download_error(what, error, form) from error
    raise DuplexError(f"the weights of {what} are not on disk, and {owner} holds no {' or '.join(names)}")


def download_error(what: str, error: BaseException, form: str = FORM) -> DuplexError:
    """The error to raise if weights cannot be downloaded.

    Args:
        what: name of the weights in the message. form: how an encoder's name says which folder holds its weights.
    """
    offline = " (HF_HUB_OFFLINE is set)" if _offline() else ""
    reason = " ".join(str(error).split()) or type(error).__name__
    return DuplexError(
        f"the weights of {what} are not on disk and could not be downloaded{offline}: {reason}; "
        f"download them where there is a network, or name a folder that holds them as {form}"
    )


def _fetch_url(published: dict[str, Any], what: str) -> Path:
    """Download weights from a URL with open_clip, which checks some hashes; never leave an incomplete file."""
    folder = DOWNLOADS.expanduser()
    _check_reachable(published["url"], what)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            file = Path(open_clip.download_pretrained(published, prefer_hf_hub=False, cache_dir=scratch))
            return file.replace(folder / file.name)
    except Exception as error:  # as for the hub
        raise download_error(what, error) from error


def _repository(published: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    owner, _, file = published.get("hf_hub", "").rpartition("/")
    return owner, (file,) if file else WEIGHTS


def _check_reachable(url: str, what: str, form: str = FORM) -> None:
    """Raise DuplexError unless a URL's server responds to one request; the hub's own client retries for a minute."""
    if _offline():
        raise download_error(what, OSError("no network is used"), form)
    import requests

    try:
        requests.head(url, timeout=TIMEOUT, allow_redirects=False)
    except (requests.RequestException, ValueError) as error:
        raise download_error(what, OSError(f"{urlsplit(url).hostname} does not answer"), form) from error


def is_reachable(url: str) -> bool:
    try:
        _check_reachable(url, url)
    except DuplexError:
        return False
    return True


def _offline() -> bool:
    return bool(constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE"))
