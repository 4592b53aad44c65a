"""Run the scripts in pipeline/: check their arguments against a usage line, and print errors as one line."""

from __future__ import annotations

import sys
from collections.abc import Callable

from duplex.system.error_report import run_command

LARGEST_SEED = 2**63 - 1  # the largest that every random generator accepts


def run_script(usage: str, work: Callable[..., object]) -> None:
    """Call `work` with the script's command-line arguments if they match `usage`.

    In `usage`, lower-case words stand for themselves, capitals for any value, and `|` separates alternatives:
    `row NAME | table`. Other arguments end the program with exit code 2 and the usage line.
    """
    words = sys.argv[1:]
    patterns = [alternative.split() for alternative in usage.split("|")]
    if not any(len(words) == len(pattern) and all(map(_word_matches, words, pattern)) for pattern in patterns):
        print(f"usage: {sys.argv[0]} {usage}".rstrip(), file=sys.stderr)
        sys.exit(2)
    run_command(lambda: work(*words))


def _word_matches(word: str, name: str) -> bool:
    if name == "SEED":
        return word.isascii() and word.isdigit() and len(word) < 20 and int(word) <= LARGEST_SEED
    return bool(word) if name.isupper() else word == name
