"""DVC commands that `duplex sweep` (training of many runs) needs: status, repro and commit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from duplex.errors import DuplexError
from duplex.system.files import is_running

DAMAGED_LOCK = re.compile(r"dvc\.lock' (is invalid|validation failed)")  # in DVC's messages
LONGEST_REASON = 300


@dataclass(frozen=True)
class DvcRepo:
    """A folder with a dvc.yaml, in which DVC commands are run."""

    folder: Path

    @classmethod
    def at(cls, folder: Path) -> DvcRepo | None:
        """Return the DVC pipeline in a folder; None without a dvc.yaml, outside of a DVC repository, or without DVC."""
        place = folder.resolve()
        in_repository = any((parent / ".dvc").is_dir() for parent in (place, *place.parents))
        return cls(folder) if in_repository and (folder / "dvc.yaml").is_file() and find_spec("dvc") else None

    def changed(self, targets: Collection[str]) -> dict[str, Any]:
        """Return stage -> what has changed (DVC's JSON), for the stages among `targets` that DVC would run again."""
        status: dict[str, Any] = json.loads(self._dvc("status", "--json", *targets) or "{}")
        return {name.rpartition(":")[2]: changes for name, changes in status.items()}

    def require_free(self, path: Path) -> None:
        """Raise `DuplexError` if a running DVC command reads or writes files below `path`.

        DVC lists such files in its file `rwlock`: {"read": {path: [holder, ...]}, "write": {path: holder}}.
        """
        place = self.folder.resolve()
        root = next(parent for parent in (place, *place.parents) if (parent / ".dvc").is_dir())
        try:
            locks = json.loads((root / ".dvc" / "tmp" / "rwlock").read_text(encoding="utf-8"))
            listed = [*locks.get("read", {}).items(), *locks.get("write", {}).items()]
            for file, holders in listed:
                for holder in holders if isinstance(holders, list) else [holders]:
                    if Path(file).is_relative_to(path.resolve()) and is_running(int(holder["pid"])):
                        raise _in_use(str(holder["cmd"]), int(holder["pid"]))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return  # no lock, or one of another version of DVC, which refuses to commit the sweep's runs

    def repro(self, targets: Iterable[str]) -> None:
        """Run stages with `dvc repro`, after the stages that they depend on; stages that are up to date are skipped."""
        self._dvc("repro", *targets, quiet=False)

    def commit(self, targets: Iterable[str]) -> None:
        """Record the current outputs of stages in dvc.lock, without running the stages."""
        self._dvc("commit", "--force", *targets)  # `--quiet` would hide errors too

    def _dvc(self, *words: str, quiet: bool = True) -> str:
        process = subprocess.run(
            [sys.executable, "-m", "dvc", *words],
            cwd=self.folder,
            stdout=subprocess.PIPE if quiet else sys.stderr,
            stderr=subprocess.PIPE if quiet else None,
            text=True,
            check=False,
        )
        if process.returncode:
            if holder := re.search(r"\(PID (\d+)\): *(.*)", process.stderr or ""):
                raise _in_use(holder[2].strip() or "dvc", int(holder[1]))
            remedy = "fix this and run the same command again"
            if DAMAGED_LOCK.search(process.stderr or ""):
                remedy = "`git checkout dvc.lock` restores the committed file"
            raise DuplexError(f"`dvc {words[0]}` failed: {_reason(process.stderr, process.returncode)}; {remedy}")
        return process.stdout if quiet else ""


def _reason(errors: str | None, code: int) -> str:
    """Return why a DVC command failed: the last line of `errors` that begins with `ERROR:`, else all of `errors`.

    errors: what it wrote to stderr. code: its exit code, which is the reason if it wrote nothing."""
    lines = [line for line in (errors or "").splitlines() if line.strip()]
    marked = [line.removeprefix("ERROR:") for line in lines if line.startswith("ERROR:")]
    text = " ".join((marked[-1] if marked else " ".join(lines)).split())
    return text[-LONGEST_REASON:] or f"exit code {code}"


def _in_use(command: str, process: int) -> DuplexError:
    return DuplexError(
        f"`{command}` (process {process}) is using the files of this pipeline; wait until it ends, or stop it, and run "
        "the same command again"
    )
