"""Extension of griffe that shows parameter notes as a table.

Docstrings of the package describe parameters in lines `name: text` after the summary. This turns each run of such lines
into the section `Args:` that mkdocstrings knows, and leaves lines whose name is no parameter as they are.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

NOTE = re.compile(r"^(\w+): (?=\S)")


def with_section(text: str, names: set[str], heading: str = "Args:") -> str:
    """A docstring whose lines `name: text` of known names stand, indented, under a heading.

    >>> print(with_section("Add.\\n\\na: one number.\\n    Not zero.\\nb: another.", {"a", "b"}))
    Add.
    <BLANKLINE>
    Args:
        a: one number.
            Not zero.
        b: another.
    """
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        note = NOTE.match(line)
        if note and note[1] in names:
            if not inside:
                lines += [heading] if not lines or not lines[-1] else ["", heading]
            inside = True
        elif inside and line and not line.startswith(" "):
            inside = False
            lines += [""] if lines[-1] else []
        lines.append(f"    {line}" if inside and line else line)
    return "\n".join(lines)


class ParameterNotes(griffe.Extension):
    """Rewrite the docstrings of functions and classes while griffe reads them."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Show a function's notes on its parameters as a table."""
        if func.docstring:
            func.docstring.value = with_section(func.docstring.value, {item.name for item in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Show a class's notes on its fields as a table."""
        if cls.docstring:
            cls.docstring.value = with_section(cls.docstring.value, set(cls.members), "Attributes:")
