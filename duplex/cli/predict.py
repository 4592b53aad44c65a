"""`duplex predict`: what is in some pictures."""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from duplex.errors import UsageError, require

if TYPE_CHECKING:
    from duplex.recognition.answers import Answer, Unreadable
    from duplex.recognition.recognizer import Recognizer

FORMATS = ("table", "jsonl", "csv")
COLUMNS = ("image", "rank", "state", "object", "score", "probability", "error")
BEGINNINGS = (b'{"image": "', ",".join(COLUMNS).encode())  # of the two formats that can be told from other files
SOME_BAD = 3  # exit code: some files gave no picture
Model = Annotated[
    str | None, typer.Option("--model", "-m", help="A run's folder, an exported one, or hf-hub:OWNER/NAME.")
]
World = Annotated[str | None, typer.Option("--world", help="closed or open; by default the model's own.")]


def register(app: typer.Typer) -> None:
    app.command("predict")(predict)


def predict(
    paths: Annotated[list[str], typer.Argument(help="Files, folders, patterns; - reads paths from stdin.")],
    model: Model = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Compositions for each picture.")] = 3,
    world: World = None,
    bias: Annotated[float | None, typer.Option(help="Added to unseen pairs; default: what validation chose.")] = None,
    add: Annotated[list[str] | None, typer.Option(help="A further composition, such as 'rusty kettle'.")] = None,
    words: Annotated[Path | None, typer.Option(help="A CSV file of further compositions: state,object.")] = None,
    form: Annotated[str, typer.Option("--format", help="table, jsonl or csv.")] = "table",
    out: Annotated[Path | None, typer.Option(help="Write there instead of to stdout.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures at once.")] = 64,
    num_workers: Annotated[int | None, typer.Option(min=0, help="Decoding processes; default: by the cores.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Say which state and object each picture shows. Without --model, the run with the best validation AUC answers.

    Files that give no picture get a line with the reason, and exit code 3 tells of them at the end.
    """
    from duplex.recognition.gathering import gather

    require(form, FORMATS, "format")
    if out is not None:
        _refuse_others(out)
    if bias is not None and not math.isfinite(bias):
        raise UsageError(f"--bias is {bias}; give a number")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a name need not be text
    files = gather(paths, sys.stdin)
    recognizer = load_model(model, world, device, add or [], words)
    answers = recognizer.stream(
        files,
        top,
        world,  # type: ignore[arg-type]
        "calibrated" if bias is None else bias,
        batch_size,
        "auto" if num_workers is None else num_workers,
    )
    with _opened(out) as target:
        bad = WRITERS[form](zip(map(_spoken, files), answers, strict=True), target, top)
    if bad:
        typer.echo(f"{bad} of {len(files)} files gave no picture", err=True)
        raise typer.Exit(SOME_BAD)


def _spoken(path: Path) -> str:
    """A file's name as text; bytes of it that are none are written as such."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def load_model(
    model: str | None,
    world: str | None,
    device: str,
    add: list[str],
    words: Path | None,
    *,
    exact: bool = True,
    hint: str = "name a model with --model",
) -> Recognizer:
    """The model that is asked for, ready for the world that is asked for."""
    from duplex.labels import WORLDS
    from duplex.recognition.added_words import read_pairs
    from duplex.recognition.recognizer import Recognizer
    from duplex.stages.trained_runs import best_run

    if world is not None:
        require(world, WORLDS, "world")
    if model is None:
        run = best_run(world, hint=hint)
        model = str(run.files.root)
        typer.echo(f"model: {run}", err=True)
    found = Recognizer.load(model, device=device, words=_glove(), exact=exact)
    pairs = read_pairs(words, add, found.labels)
    found = found.with_words(pairs) if pairs else found
    found.panel(world)  # type: ignore[arg-type]
    return found


def _glove() -> Path | None:
    """The word vectors that this project's runs were trained with."""
    from duplex.config.params import load_params

    return load_params().evaluation.word_vectors if Path("params.yaml").is_file() else None


@contextmanager
def _opened(out: Path | None) -> Iterator[TextIO]:
    """A file that is there whole or not at all."""
    from duplex.system.files import replaced

    if out is None:
        yield sys.stdout
        return
    with replaced(out) as scratch, scratch.open("w", encoding="utf-8", newline="") as file:
        yield file


def _refuse_others(out: Path) -> None:
    """What is replaced are answers of before, which say so in their first bytes; never a picture or a checkpoint."""
    if out.is_dir() or not out.parent.is_dir():
        raise UsageError(f"{out} cannot be written; name a file in a folder that exists")
    if os.path.lexists(out):
        with suppress(OSError):
            if out.is_file() and not out.is_symlink() and _first(out).startswith(BEGINNINGS):
                return
        raise UsageError(
            f"{out} is there already and holds no answers in CSV or jsonl; move it or choose another --out"
        )


def _first(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(100)


Rows = Iterable[tuple[str, "Answer | Unreadable"]]


def _jsonl(rows: Rows, target: TextIO, top: int) -> int:
    import json

    return _written(
        rows, target, lambda image, said: json.dumps({"image": image, **said.to_dict(top)}, ensure_ascii=False)
    )


def _table(rows: Rows, target: TextIO, top: int) -> int:
    def line(image: str, said: Answer | Unreadable) -> str:
        found = getattr(said, "top", None)
        if found is None:
            return f"{image}  ! {said.reason}"  # type: ignore[union-attr]
        return f"{image}  " + "  ".join(
            f"{guess.name} {100 * guess.probability:.1f} %{_doubt(guess)}" for guess in found
        )

    return _written(rows, target, line)


def _doubt(guess: Any) -> str:
    """Which words of a composition that was added were not known."""
    known = guess.known
    new = [] if known is None else [name for name in ("state", "object") if not getattr(known, name)]
    return f" (new {' and '.join(new)})" if new else ""


def _csv(rows: Rows, target: TextIO, top: int) -> int:
    import csv

    writer, bad = csv.writer(target, lineterminator="\n"), 0
    writer.writerow(COLUMNS)
    for image, said in rows:
        record = said.to_dict()
        bad += "error" in record
        if "error" in record:
            writer.writerow([image, "", "", "", "", "", record["error"]])
        for rank, guess in enumerate(record.get("top", ()), 1):
            writer.writerow([image, rank, *(guess[key] for key in ("state", "object", "score", "probability")), ""])
        target.flush()
    return bad


def _written(rows: Rows, target: TextIO, line: Any) -> int:
    """Each line as soon as it is known; how many were of files that gave no picture."""
    bad = 0
    for image, said in rows:
        bad += not hasattr(said, "top")
        target.write(line(image, said) + "\n")
        target.flush()
    return bad


WRITERS = {"table": _table, "jsonl": _jsonl, "csv": _csv}
