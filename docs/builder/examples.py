"""The examples of public names: docs/reference/examples.txt, shown on the pages of the API."""

from __future__ import annotations

import re
from pathlib import Path

EXAMPLE = re.compile(r"^== (\w+)\n(.*?)(?=^== |\Z)", re.M | re.S)


def read_examples(root: Path) -> dict[str, str]:
    """The example of each public name, without the marks of doctest."""
    text = (root / "docs/reference/examples.txt").read_text(encoding="utf-8")
    return {name: re.sub(r"  # doctest:.*", "", example.strip()) for name, example in EXAMPLE.findall(text)}
