"""`duplex predict`: name the compositions in images."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from duplex.cli import app
from duplex.cli.options import Force, load_params
from duplex.errors import UsageError, require
from duplex.system.entry import escape_unprintable

if TYPE_CHECKING:
    from duplex.recognition.answers import Answer, UnreadableImage
    from duplex.recognition.recognizer import Recognizer

FORMATS = ("table", "jsonl", "csv")
COLUMNS = ("image", "rank", "state", "object", "score", "probability", "error")
SOME_UNREADABLE = 3  # exit code
World = Annotated[
    str | None,
    typer.Option(
        "--world", help="Candidates: closed or open world; default: closed, or open if calibrated for that alone."
    ),
]
Add = Annotated[list[str] | None, typer.Option(help="An additional candidate, such as 'rusty kettle'; repeatable.")]
Compositions = Annotated[
    Path | None, typer.Option(help="CSV file of additional candidates, with the columns state,object.")
]
NewShare = Annotated[
    float | None,
    typer.Option(
        help="Expected share of images whose pair has no training image; default: as in the model, mostly 0.1."
    ),
]
Device = Annotated[str, typer.Option(help="Device of the encoder: auto, cpu or cuda.")]


@app.command()
def predict(
    paths: Annotated[
        list[str], typer.Argument(help="Image files, folders or glob patterns; - reads paths from stdin.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Folder of a run or an export, or hf-hub:OWNER/NAME; default: the run with the best AUC.",
        ),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", min=1, help="Number of compositions to print per image, the most probable first.")
    ] = 3,
    world: World = None,
    new_share: NewShare = None,
    add: Add = None,
    compositions: Compositions = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format", help="Output format: table, jsonl or csv; default: by the suffix of --out, else table."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of stdout.")] = None,
    force: Force = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of images encoded at once.")] = 64,
    num_workers: Annotated[
        int | None, typer.Option(min=0, help="Number of processes that decode images; default: by CPU cores.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Name the state and object in each image. Without --model, use the run with the best validation AUC.

    Files that are not images get a line with the reason; the exit code is then 3.
    """
    from duplex.recognition.image_paths import list_images
    from duplex.system.files import refuse_existing

    form = _checked_format(form, out)
    if out is not None:
        if out.is_dir() or not out.parent.is_dir():
            raise UsageError(f"{out} cannot be written; expected a file in a folder that exists")
        refuse_existing(out, force=force)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a path may hold bytes that are not text
    files = list_images(paths, sys.stdin, partial(typer.echo, err=True))
    recognizer = load_model(model, world, device, add or [], compositions, new_share)
    answers = recognizer.stream(
        files,
        top,
        world,  # type: ignore[arg-type]
        batch_size,
        "auto" if num_workers is None else num_workers,
    )
    names = (str(path).encode("utf-8", "backslashreplace").decode() for path in files)
    with _open_output(out) as target:
        unreadable = _write(zip(names, answers, strict=True), target, form, top)
    if unreadable:
        typer.echo(f"{unreadable} of {len(files)} files are not readable images", err=True)
        raise typer.Exit(SOME_UNREADABLE)


def load_model(
    model: str | None,
    world: str | None,
    device: str,
    add: list[str],
    compositions: Path | None,
    new_share: float | None = None,
    *,
    hint: str = "name a model with --model",
) -> Recognizer:
    """Load a model for prediction, by default the best run of the project, and add candidates that the user names.

    model, world, device: as in `duplex predict --help`. new_share: expected share of images of unseen pairs.
    add: candidates such as "rusty kettle". compositions: CSV file of more. hint: how to name a model, for an error.
    """
    from duplex.labels import WORLDS
    from duplex.recognition.added_words import read_compositions
    from duplex.recognition.recognizer import Recognizer

    if world is not None:
        require(world, WORLDS, "world")
    if model is None:
        from duplex.stages.trained_runs import best_run

        run = best_run(world, hint=hint, params=load_params() if Path("params.yaml").is_file() else None)
        model = str(run.files.root)
        typer.echo(f"model: {run}", err=True)
    words = load_params().evaluation.word_vectors if Path("params.yaml").is_file() else None
    recognizer = Recognizer.load(model, device=device, word_vectors=words, new_share=new_share)
    added = [*(read_compositions(compositions) if compositions else ()), *add]
    if added:
        recognizer = recognizer.with_compositions(added)
    recognizer.candidates(world)  # type: ignore[arg-type]
    for line in _added_lines(recognizer):
        typer.echo(line, err=True)
    return recognizer


def _added_lines(recognizer: Recognizer) -> Iterator[str]:
    """Yield a line of text per candidate that the user added: whether its state and its object were trained."""
    from duplex.recognition.added_words import trained_words

    for state, name in recognizer.added:
        trained = trained_words((state, name), recognizer.labels)
        words = [
            f"{kind} {word!r} is {'trained' if is_trained else 'new, described by text alone'}"
            for kind, word, is_trained in (("state", state, trained.state), ("object", name, trained.object))
        ]
        yield f"added candidate {state} {name}: {', '.join(words)}"


@contextmanager
def _open_output(out: Path | None) -> Iterator[TextIO]:
    """Context manager: give stdout, or a temporary file that replaces the file `out` at the end."""
    from duplex.system.files import replace_file

    if out is None:
        yield sys.stdout
        return
    with replace_file(out) as scratch, scratch.open("w", encoding="utf-8", newline="") as file:
        yield file


def _checked_format(form: str | None, out: Path | None) -> str:
    """Return the format of the answers: the given one, or by the suffix of the file `out`, or else a table.

    Raises `UsageError` for an unknown format, and for one that the suffix .csv or .jsonl contradicts.
    """
    by_suffix = {".csv": "csv", ".jsonl": "jsonl"}.get("" if out is None else out.suffix.lower())
    form = require(form, FORMATS, "format") if form is not None else by_suffix or "table"
    if by_suffix not in (None, form):
        raise UsageError(f"--format is {form} and --out {out} ends in .{by_suffix}; change one, or leave --format out")
    return form


def _write(rows: Iterable[tuple[str, Answer | UnreadableImage]], target: TextIO, form: str, top: int) -> int:
    """Write the answer for each image as soon as it is ready; return the number of files that are not images."""
    unreadable, lines = 0, csv.writer(target, lineterminator="\n")
    if form == "csv":
        lines.writerow(COLUMNS)
    for image, answer in rows:
        record = answer.to_dict(top)
        unreadable += "error" in record
        if form == "jsonl":
            target.write(json.dumps({"image": image, **record}, ensure_ascii=False) + "\n")
        elif form == "table":
            target.write(f"{escape_unprintable(image)}  {_summary(record)}\n")
        elif "error" in record:
            lines.writerow([image, "", "", "", "", "", record["error"]])
        else:
            for rank, guess in enumerate(record["top"], 1):
                lines.writerow([image, rank, *(guess[key] for key in COLUMNS[2:6]), ""])
        target.flush()
    return unreadable


def _summary(record: dict[str, Any]) -> str:
    if "error" in record:
        return f"! {record['error']}"
    parts = [] if record["in_distribution"] else ["none of these?"]
    for guess in record["top"]:
        new = [name for name, trained in guess.get("trained_words", {}).items() if not trained]
        note = f" (new {' and '.join(new)})" if new else "" if guess["seen"] else " (new)"
        parts.append(f"{guess['state']} {guess['object']} {100 * guess['probability']:.1f} %{note}")
    return "  ".join(parts)
