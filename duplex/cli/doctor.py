"""`duplex doctor`: what is here, and what to do about what is not."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False) -> None:
    """Versions, device, fast number formats, weights, data, caches and disk; for each problem, what mends it.

    Exits with 1 where there is one.
    """
    import json

    from duplex.stages.doctor import examine

    found = examine()
    if as_json:
        record = [{"topic": one.topic, "says": one.says, "mend": one.mend} for one in found]
        typer.echo(json.dumps(record, indent=2, ensure_ascii=False))
    else:
        for one in found:
            typer.echo(f"{'!' if one.mend else ' '} {one.topic:<12}{one.says}")
            if one.mend:
                typer.echo(f"{'':14}-> {one.mend}")
    if any(one.mend for one in found):
        raise typer.Exit(1)
