"""`duplex export`: write a run as a folder for other machines, with ONNX files, or upload it to the hub."""

from __future__ import annotations

import re
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from duplex.cli import app
from duplex.cli.options import Force
from duplex.errors import UsageError

if TYPE_CHECKING:
    from duplex.recognition.trained import TrainedModel

LICENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="A trained run's folder, such as artifacts/shapes/duplex/0.")],
    out: Annotated[Path | None, typer.Argument(help="The folder to write; optional with --push.")] = None,
    world: Annotated[
        str | None,
        typer.Option(
            "--world",
            help="World of the candidates: closed or open; default: closed, or open if the run has only that.",
        ),
    ] = None,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Add trained.onnx, a model in ONNX format that scores image features.")
    ] = False,
    onnx_encoder: Annotated[
        bool,
        typer.Option(
            "--onnx-encoder", help="Add encoder.onnx, the image tower, and see.py, which recognises images with it."
        ),
    ] = False,
    push: Annotated[str | None, typer.Option(help="Upload to the Hugging Face hub as OWNER/NAME.")] = None,
    licence: Annotated[str, typer.Option("--licence", help="Licence of the model: mit, cc-by-4.0, …")] = "other",
    name: Annotated[str | None, typer.Option(help="Title of the model card; default: OWNER/NAME or the run.")] = None,
    force: Force = False,
) -> None:
    """Export a trained run to a folder: prototypes, labels, a model card, and recognize.py, which needs numpy only."""
    from duplex.cli.predict import load_model
    from duplex.recognition import export_folder
    from duplex.recognition.fitted_files import FIT
    from duplex.stages.trained_runs import model_card_facts

    if out is None and push is None:
        raise UsageError("no destination; give a folder, duplex export RUN OUT, or --push OWNER/NAME")
    if out is not None and (out / FIT).is_file():
        raise UsageError(
            f"{out} holds a model; an export in its place would lack its metrics and what `duplex update` reads; "
            "choose another folder"
        )
    if not LICENCE.fullmatch(licence):  # it becomes a line of the card's YAML
        raise UsageError(f"--licence is {licence!r}; expected a licence that the hub knows, such as cc-by-4.0")
    recognizer = load_model(run, world, "cpu", [], None)
    chosen = recognizer.worlds[0] if world is None else world
    facts = model_card_facts(Path(run), name=name, licence=licence, repository=push)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "export" if out is None else out
        add_onnx = partial(_add_onnx, recognizer.trained, scores=onnx or onnx_encoder, tower=onnx_encoder)
        export_folder.export(recognizer.trained, chosen, folder, facts, add_onnx, force=force)  # type: ignore[arg-type]
        if out is not None:
            typer.echo(f"exported {run} to {out}", err=True)
        if push is not None:
            typer.echo(f"uploaded to {export_folder.upload(folder, push)}", err=True)


def _add_onnx(trained: TrainedModel, folder: Path, scores: bool, tower: bool) -> None:
    if trained.finetuned is not None and not tower:
        names = "recognize.py and trained.onnx read" if scores else "recognize.py reads"
        typer.echo(f"{names} features of the fine-tuned image tower; --onnx-encoder exports this tower", err=True)
    if not scores:
        return
    from safetensors.torch import load_file

    from duplex.recognition.onnx_files import write_scores, write_tower
    from duplex.recognition.sources import TENSORS

    write_scores(folder, load_file(folder / TENSORS), trained.backbone.dim)
    if tower:
        write_tower(folder, trained)
