"""One file from the web, resumed where a transfer broke off."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pooch
import requests

from duplex.data.progress import transfer
from duplex.errors import DuplexError
from duplex.system.files import unwritable, write_text
from duplex.system.lock import sole_writer

CHUNK = 1 << 16  # of a transfer that breaks off, less than this is fetched twice
WAIT = (15, 60)  # seconds to connect, seconds of silence
TRIES = 5  # in a row without a byte


class DeadLink(DuplexError):
    """The link does not lead to the file."""


@dataclass(frozen=True)
class Begun:
    """What a partial file is a part of, so that it is never continued with another file's bytes."""

    url: str
    version: str  # the server's ETag or date, empty if it gives none
    total: int | None

    def fits(self, version: str, total: int | None) -> bool:
        """Whether an answer speaks of the same file; not every server repeats its version."""
        return self.total == total and ("" in (version, self.version) or version == self.version)


def fetch(url: str, path: Path) -> Path:
    """Download `url` to `path` unless it is there; a part left by an earlier call is continued, not repeated."""
    if path.exists():
        return path
    pooch.get_logger().setLevel(logging.WARNING)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DuplexError(f"{path.parent} cannot be made: {error.strerror}; choose another folder with --to") from error
    with sole_writer(path, "download"):
        pooch.retrieve(url, known_hash=None, fname=path.name, path=path.parent, downloader=_Resuming(path))
    return path


class _Resuming:
    """A downloader for pooch that keeps `<file>.partial` until it is whole."""

    def __init__(self, path: Path) -> None:
        self.partial = path.with_name(path.name + ".partial")
        self.record = path.with_name(path.name + ".partial.json")

    def __call__(self, url: str, output_file: Any, _pooch: Any, check_only: bool = False) -> None:
        idle, have = 0, self._have()
        with transfer() as bar:
            task = bar.add_task(self.partial.stem, total=None)
            while not self._attempt(url, lambda done, total: bar.update(task, completed=done, total=total)):
                idle = idle + 1 if self._have() <= have else 0
                have = self._have()
                time.sleep(0.2 * idle)
                if idle >= TRIES:
                    raise DuplexError(
                        f"the connection to {url} keeps breaking; {have:,} bytes are kept in {self.partial}, "
                        "and the same command continues from there"
                    )
        os.replace(self.partial, output_file)
        self.record.unlink(missing_ok=True)

    def _attempt(self, url: str, step: Any) -> bool:
        """One request. True when the file is whole, False when the transfer broke off."""
        begun, have = self._begun(url), self._have()
        headers = {"Accept-Encoding": "identity"}
        if begun and have:
            headers["Range"] = f"bytes={have}-"
            if begun.version:
                headers["If-Range"] = begun.version
        try:
            with requests.get(url, headers=headers, stream=True, timeout=WAIT) as response:
                if response.status_code == 416 and have:  # nothing after what is there: whole, or another file
                    if begun and begun.total == have:
                        return True
                    self._forget()
                    return False
                response.raise_for_status()
                return self._receive(url, response, begun, step)
        except (requests.HTTPError, requests.exceptions.InvalidURL, requests.exceptions.MissingSchema) as error:
            raise DeadLink(f"{url} does not answer with the file ({error})") from error
        except requests.ConnectionError as error:
            if not self._have():
                raise DeadLink(f"{url} cannot be reached ({type(error).__name__})") from error
            return False
        except requests.RequestException:
            return False

    def _receive(self, url: str, response: requests.Response, begun: Begun | None, step: Any) -> bool:
        start, total = _extent(response)
        if start and not (begun and begun.fits(_version(response), total) and start == self._have()):
            self._forget()
            return False
        if not start:
            self._note(Begun(url, _version(response), total))
        done = start
        try:
            with self.partial.open("ab" if start else "wb") as file:
                for chunk in response.iter_content(CHUNK):
                    file.write(chunk)
                    done += len(chunk)
                    step(done, total)
        except OSError as error:
            if isinstance(error, requests.RequestException):
                raise
            raise unwritable(self.partial, error) from error
        if total is not None and done > total:
            self._forget()
        return done == total if total is not None else True

    def _have(self) -> int:
        return self.partial.stat().st_size if self.partial.exists() else 0

    def _begun(self, url: str) -> Begun | None:
        try:
            begun = Begun(**json.loads(self.record.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return begun if begun.url == url else None

    def _note(self, begun: Begun) -> None:
        write_text(self.record, json.dumps(asdict(begun)))

    def _forget(self) -> None:
        self.partial.unlink(missing_ok=True)
        self.record.unlink(missing_ok=True)


def _version(response: requests.Response) -> str:
    """A strong ETag or a date: what `If-Range` may carry."""
    tag = response.headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else response.headers.get("Last-Modified", "")


def _extent(response: requests.Response) -> tuple[int, int | None]:
    """Where the body starts in the file, and how long the whole file is."""
    if response.status_code == 206:
        span, _, whole = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        start = span.partition("-")[0]
        return (int(start) if start.isdigit() else -1), (int(whole) if whole.isdigit() else None)
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isdigit() else None
