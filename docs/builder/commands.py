"""The page of commands, made from the command line's own help texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from duplex.cli import app


def commands_page() -> str:
    """One section per command: what it does, its arguments and its options."""
    parts = [
        "# Commands\n\nGenerated from `duplex COMMAND --help`. Errors are one line, and the exit code is 1,"
        " or 2 for wrong usage.\n"
    ]
    for name, command in sorted(_leaves(get_command(app), "duplex")):
        parts.append(f"## {name}\n\n{_clean(command.help or '')}\n")
        arguments = [item for item in command.params if item.param_type_name == "argument"]
        options = [item for item in command.params if item.param_type_name == "option"]
        if arguments:
            parts.append("| argument | meaning |\n|---|---|\n" + "\n".join(map(_row, arguments)) + "\n")
        if options:
            parts.append("| option | meaning |\n|---|---|\n" + "\n".join(map(_row, options)) + "\n")
    return "\n".join(parts)


def _leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield every command below a group by its full name, and the group itself where it can be called alone."""
    inner = getattr(command, "commands", None)
    if inner is None or (command.invoke_without_command and name != "duplex"):
        yield name, command
    for word, child in (inner or {}).items():
        if not child.hidden:
            yield from _leaves(child, f"{name} {word}")


def _row(item: Any) -> str:
    is_argument = item.param_type_name == "argument"
    name = (item.metavar or item.name.upper()) if is_argument else ", ".join([*item.opts, *item.secondary_opts])
    note = _clean(getattr(item, "help", None) or "")
    default = item.default
    if default not in (None, False, True, (), [], "") and not callable(default) and not is_argument:
        note += f" Default: {default}."
    return f"| `{name}` | {note.replace('|', chr(92) + '|')} |"


def _clean(text: str) -> str:
    return text.replace("\b", "").replace("<", "&lt;").strip()
