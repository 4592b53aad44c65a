"""DVC commands that a sweep needs: status, repro and commit."""

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
        """Return stage -> changes, for those of `targets` (stages or groups of stages) that DVC would run again."""
        status: dict[str, Any] = json.loads(self._dvc("status", "--json", *targets) or "{}")
        return {name.rpartition(":")[2]: changes for name, changes in status.items()}

    def repro(self, targets: Iterable[str]) -> None:
        """Run stages and the stages that they depend on."""
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
                raise DuplexError(
                    f"`{holder[2].strip() or 'dvc'}` (process {holder[1]}) is using the files of this pipeline; "
                    "wait until it ends, or stop it, and run the same command again"
                )
            errors = [line for line in (process.stderr or "").splitlines() if line.startswith("ERROR:")]
            reason = errors[-1].removeprefix("ERROR:").strip() if errors else f"exit code {process.returncode}"
            raise DuplexError(f"`dvc {words[0]}` failed: {reason}; fix this and run the same command again")
        return process.stdout if quiet else ""
