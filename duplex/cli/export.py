"""`duplex export`: a run as a folder for other machines, as ONNX, or on the hub."""

from __future__ import annotations

import re
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from duplex.errors import UsageError

if TYPE_CHECKING:
    from duplex.recognition.trained import Trained

LICENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")


def register(app: typer.Typer) -> None:
    app.command("export")(export)


def export(
    run: Annotated[str, typer.Argument(help="A trained run's folder, such as artifacts/shapes/duplex/0.")],
    out: Annotated[Path | None, typer.Argument(help="The folder to write; may be left out with --push.")] = None,
    world: Annotated[str | None, typer.Option("--world", help="closed or open; by default the run's own.")] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Add the trained part as trained.onnx.")] = False,
    onnx_encoder: Annotated[
        bool, typer.Option("--onnx-encoder", help="Add the image tower as encoder.onnx too, and see.py.")
    ] = False,
    push: Annotated[str | None, typer.Option(help="Upload it to the Hugging Face hub as OWNER/NAME.")] = None,
    licence: Annotated[str, typer.Option("--licence", help="Of the model card, such as mit or cc-by-4.0.")] = "other",
    name: Annotated[str | None, typer.Option(help="Title of the model card.")] = None,
) -> None:
    """Write all that recognition needs into one folder: prototypes, labels, a model card, and recognize.py."""
    from duplex.cli.predict import load_model
    from duplex.recognition import export as writing
    from duplex.stages.trained_runs import facts_of

    if out is None and push is None:
        raise UsageError("say where it goes: duplex export RUN OUT, or --push OWNER/NAME")
    if not LICENCE.fullmatch(licence):  # a line of the card's head
        raise UsageError(f"--licence {licence!r} is no name of one; write it as the hub does, such as cc-by-4.0")
    recognizer = load_model(run, world, "cpu", [], None)
    chosen = recognizer.worlds[0] if world is None else world
    facts = facts_of(Path(run), name=name, licence=licence, repository=push)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "export" if out is None else out
        onnx_files = partial(_add_onnx, recognizer.trained, scores=onnx or onnx_encoder, tower=onnx_encoder)
        writing.export(recognizer.trained, chosen, folder, facts, onnx_files)  # type: ignore[arg-type]
        if out is not None:
            typer.echo(f"{out} holds {run}", err=True)
        if push is not None:
            typer.echo(f"uploaded to {writing.push(folder, push)}", err=True)


def _add_onnx(trained: Trained, folder: Path, scores: bool, tower: bool) -> None:
    if trained.tail is not None and not tower:
        lines = "recognize.py and trained.onnx read" if scores else "recognize.py reads"
        typer.echo(f"{lines} features that the trained tail makes; --onnx-encoder writes a tower that has it", err=True)
    if not scores:
        return
    from safetensors.torch import load_file

    from duplex.recognition.onnx_files import write_tower, write_trained
    from duplex.recognition.sources import TENSORS

    write_trained(folder, load_file(folder / TENSORS), trained.backbone.dim)
    if tower:
        write_tower(folder, trained.backbone.tower("image"), trained.backbone.record, trained.tail, trained.depth)
