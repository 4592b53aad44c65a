"""The examples of public names: docs/reference/examples.txt, shown on the API page."""

from __future__ import annotations

import re
from pathlib import Path

EXAMPLE = re.compile(r"^== (\w+)\n(.*?)(?=^== |\Z)", re.M | re.S)
DIRECTIVE = re.compile(r"^::: duplex\.(\w+)$", re.M)


def read_examples(root: Path) -> dict[str, str]:
    """The example of each public name."""
    text = (root / "docs/reference/examples.txt").read_text(encoding="utf-8")
    return {name: example.strip() for name, example in EXAMPLE.findall(text)}


def with_examples(markdown: str, examples: dict[str, str]) -> str:
    """An API page with the example of a name behind it."""

    def shown(match: re.Match[str]) -> str:
        example = re.sub(r"  # doctest:.*", "", examples.get(match[1], ""))
        return f"{match[0]}\n\n```pycon\n{example}\n```\n" if example else match[0]

    return DIRECTIVE.sub(shown, markdown)
