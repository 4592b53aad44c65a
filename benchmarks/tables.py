"""Run the commands of a table of results: python -m benchmarks.tables [NAME] [--json]

docs/results/commands.yaml has the commands of each file docs/results/NAME.csv. Without NAME, list them all.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from ruamel.yaml import YAML

from benchmarks.measure import emit, options

COMMANDS = Path(__file__).parents[1] / "docs" / "results" / "commands.yaml"


def main() -> None:
    commands: dict[str, str | None] = YAML(typ="safe").load(COMMANDS)
    parser = options(__doc__)
    parser.add_argument("name", nargs="?", choices=list(commands), metavar="NAME")
    wanted = parser.parse_args()
    chosen = {wanted.name: commands[wanted.name]} if wanted.name else commands
    if wanted.json:
        emit(chosen)
    elif wanted.name and (command := commands[wanted.name]):
        raise SystemExit(subprocess.run(["bash", "-euc", command], check=False).returncode)
    else:
        print("\n".join(f"{name}: {command or 'no command'}" for name, command in chosen.items()))


if __name__ == "__main__":
    main()
