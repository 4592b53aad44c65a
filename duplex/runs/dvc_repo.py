"""What a sweep asks of DVC, and what it hands to it. Where there is no DVC project, nobody asks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from duplex.errors import DuplexError

FILE = "dvc.yaml"


@dataclass(frozen=True)
class Project:
    """A folder with a dvc.yaml."""

    folder: Path

    @classmethod
    def at(cls, folder: Path) -> Project | None:
        """The project in a folder, if DVC is installed and keeps it."""
        where = folder.resolve()
        kept = any((parent / ".dvc").is_dir() for parent in (where, *where.parents))
        return cls(folder) if kept and (folder / FILE).is_file() and find_spec("dvc") else None

    def changed(self, targets: Collection[str]) -> dict[str, Any]:
        """The stages among `targets`, or in the groups that they name, that DVC would run; why, as it says it."""
        found: dict[str, Any] = json.loads(self._dvc("status", "--json", *targets) or "{}")
        return {name.rpartition(":")[2]: why for name, why in found.items()}

    def make(self, targets: Iterable[str]) -> None:
        self._dvc("repro", *targets, quiet=False)

    def commit(self, targets: Iterable[str]) -> None:
        """Take the outputs of stages as they are: they were made of what is there."""
        self._dvc("commit", "--force", "--quiet", *targets)

    def _dvc(self, *words: str, quiet: bool = True) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "dvc", *words],
            cwd=self.folder,
            stdout=subprocess.PIPE if quiet else sys.stderr,
            stderr=subprocess.PIPE if quiet else None,
            text=True,
            check=False,
        )
        if done.returncode:
            said = [line for line in (done.stderr or "").splitlines() if line.startswith("ERROR:")]
            why = said[-1].removeprefix("ERROR:").strip() if said else f"it ended with code {done.returncode}"
            raise DuplexError(f"`dvc {words[0]}` failed: {why}; mend that and run the same command again")
        return done.stdout if quiet else ""
