"""`duplex fit` and `duplex update`: fit a model to a folder of labelled images; add images to it without training."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from duplex.cli import app
from duplex.cli.options import Force

MINUTES = 30.0


@app.command()
def fit(
    source: Annotated[
        Path, typer.Argument(help="Labelled images: a folder state/object/*.jpg, or a CSV or Parquet table.")
    ],
    images: Annotated[
        Path | None, typer.Option(help="For a table: the folder that its image paths are relative to.")
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(help="Frozen encoder; default: chosen by GPU, weights on disk and number of images.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="Weights of the encoder: a published tag or a file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Model folder to write; default: SOURCE-model.")] = None,
    minutes: Annotated[
        float, typer.Option(help="Time limit of training, in minutes; encoding is not counted.")
    ] = MINUTES,
    force: Force = False,
) -> None:
    """Fit a model to labelled images and export it; no project is needed.

    Checks and encodes the images, then trains more and more of the model as long as validation AUC improves. OUT.cache
    stores features and unfinished training: the same command resumes an interrupted fit, and no image is encoded again
    after labels are corrected. The printed metrics are measured before the final fit, which uses all images.
    """
    from duplex.fitting.fit_folder import fit_folder

    name = source.resolve().name if source.is_dir() else source.resolve().stem
    place = out or Path(f"{name}-model")
    say = partial(typer.echo, err=True)
    model = fit_folder(
        source.resolve(),
        place,
        images=None if images is None else images.resolve(),
        encoder=encoder,
        weights=weights,
        minutes=minutes,
        say=say,
        force=force,
    )
    say(f"{model} holds the model; `duplex predict IMAGE --model {model}` uses it")


@app.command()
def update(
    model: Annotated[Path, typer.Argument(help="Model folder that `duplex fit` wrote.")],
    source: Annotated[
        Path, typer.Argument(help="Images to add: a folder state/object/*.jpg, or a CSV or Parquet table.")
    ],
    images: Annotated[
        Path | None, typer.Option(help="For a table: the folder that its image paths are relative to.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Model folder to write; default: MODEL-updated.")] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Replace MODEL instead of writing another folder.")
    ] = False,
    force: Force = False,
) -> None:
    """Add labelled images, also of new states and objects, to a model without training.

    Visual prototypes are computed again, in closed form; learned prompts and fine-tuned blocks stay as they are.
    """
    from duplex.errors import UsageError
    from duplex.fitting.update import update_model
    from duplex.system.files import with_own_name

    model = with_own_name(model)
    if in_place and out is not None:
        raise UsageError("--in-place and --out are both given; leave one out")
    place = model if in_place else out or model.with_name(f"{model.resolve().name}-updated")
    say = partial(typer.echo, err=True)
    folder = None if images is None else images.resolve()
    update_model(model, source.resolve(), place, images=folder, say=say, force=force)
    say(f"{place} holds the updated model")
