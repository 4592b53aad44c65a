"""Run the commands of a table of results: python -m benchmarks.tables [NAME]

docs/results/commands.yaml has the commands of each file docs/results/NAME.csv. Without NAME, list them all.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from ruamel.yaml import YAML

from benchmarks.measure import emit

COMMANDS = Path(__file__).parents[1] / "docs" / "results" / "commands.yaml"


def main() -> None:
    commands: dict[str, str | None] = YAML(typ="safe").load(COMMANDS)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", choices=list(commands), metavar="NAME")
    wanted = parser.parse_args()
    if wanted.name is None:
        emit(commands)
    elif command := commands[wanted.name]:
        raise SystemExit(subprocess.run(["bash", "-euc", command], check=False).returncode)
    else:
        raise SystemExit(f"{wanted.name} has no command")


if __name__ == "__main__":
    main()
