"""What a script is called with, read against the form it is documented in."""

from __future__ import annotations

import sys

LAST_SEED = 2**63 - 1  # the last one that every random generator takes


def arguments(form: str) -> list[str]:
    """The words after the script's name. Small words of the form stand for themselves, capitals for any value, `|` is
    between alternatives: `row NAME | table`. Anything else ends the program with a line on its use."""
    words = sys.argv[1:]
    if not any(_fits(words, alternative.split()) for alternative in form.split("|")):
        print(f"usage: {sys.argv[0]} {form}".rstrip(), file=sys.stderr)
        sys.exit(2)
    return words


def _fits(words: list[str], form: list[str]) -> bool:
    return len(words) == len(form) and all(map(_stands_for, words, form))


def _stands_for(word: str, name: str) -> bool:
    if name == "SEED":
        return word.isascii() and word.isdigit() and len(word) < 20 and int(word) <= LAST_SEED
    return bool(word) if name.isupper() else word == name
