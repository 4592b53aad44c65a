"""Commands that show results, start and check projects, and make and use models."""

from __future__ import annotations

import io
import re
import shlex
import socket
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from duplex.cli import (
    AsJson,
    Dataset,
    Force,
    ImageFolder,
    Resize,
    Weights,
    app,
    dataset_option,
    encoder_option,
    load_params,
    log,
    method_option,
    print_json,
    seed_option,
)
from duplex.cli.answers import FORMATS, checked_format, open_output, with_share_logged, write_answers
from duplex.errors import DuplexError, UsageError, install_command, require
from duplex.evaluation.metrics import aligned
from duplex.labels import WORLDS
from duplex.recognition.limits import Limits
from duplex.system.entry import escape_unprintable
from duplex.system.files import named_path, refuse_existing, replace_file

if TYPE_CHECKING:
    import torch

    from duplex.recognition.answers import NeighbourIndex, Pair
    from duplex.recognition.recognizer import Recognizer
    from duplex.recognition.trained import TrainedModel
    from duplex.report.images import Hit

LABELLED = "Labelled images: folder with state/object/*.jpg"


@app.command()
def report(
    dataset: Annotated[str | None, dataset_option("Write only this data set's page.")] = None,
) -> None:
    """Write the report of all runs, or one data set's page, and print its path.

    Does not write artifacts/metrics.json, which git tracks; `dvc repro report` does.
    """
    from duplex.project.report import report_stage, write_own_page
    from duplex.project.run import ProjectData

    params = load_params()
    page = write_own_page(ProjectData(params, dataset)) if dataset else report_stage(params, write_metrics=False)
    typer.echo(page)


@app.command()
def retrieve(
    pair: Annotated[str, Argument(help="A state and an object, such as 'striped heart'.")],
    dataset: Dataset,
    method: Annotated[str | None, method_option("--method", "-m", help="Method; default: the report's.")] = None,
    seed: Annotated[int | None, seed_option("Seed; default: the first of run.seeds.")] = None,
    top: Annotated[int, Option(min=1, help="Number of images in each of the two lists.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Print the test images nearest to a pair's text and visual prototypes."""
    from duplex.project import runs
    from duplex.report.images import prototype_hits

    context = runs.load_run_or_default(load_params(), dataset, method, seed).retrieval_context()
    hits_by_prototype = prototype_hits(context, runs.find_pair(context.labels, pair), top)
    if as_json:
        print_json({kind: list(map(_record, hits)) for kind, hits in hits_by_prototype.items()})
        return
    columns = []
    for kind, hits in hits_by_prototype.items():
        lines = [f"{hit.cosine:.3f} {'+' if hit.right else '-'} {hit.label}  {hit.image}" for hit in hits]
        columns.append([f"{kind} prototype", *lines])
    typer.echo(aligned(list(zip(*columns, strict=True))))


def _record(hit: Hit) -> dict[str, object]:
    cosine = round(hit.cosine, 6)
    return {"image": hit.image, "label": hit.label, "cosine": cosine, "right": hit.right}


@app.command()
def init(folder: Annotated[Path, Argument(help="Folder of the new project, empty or new.")]) -> None:
    """Start a project: params.yaml, dvc.yaml, stage scripts, README; set up git and DVC."""
    from duplex.project.doctor import init as init_project

    for line in init_project(folder):
        log(line)
    log(f"next: cd {shlex.quote(str(folder))} && dvc repro && duplex metrics")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check versions, device, disk, weights, data and caches, and print remedies.

    Changes and downloads nothing. Exits with 1 if there is a problem.
    """
    from duplex.project.doctor import examine

    findings = examine()
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        width = 2 + max(len(finding.topic) for finding in findings)
        for finding in findings:
            typer.echo(f"{'!' if finding.remedy else ' '} {finding.topic:<{width}}{finding.message}")
            if finding.remedy:
                typer.echo(f"{'':{width + 2}}-> {finding.remedy}")
    if any(finding.remedy for finding in findings):
        raise typer.Exit(1)


@app.command()
def fit(
    source: Annotated[Path, Argument(help=f"{LABELLED}, table, or hf-datasets:OWNER/NAME.")],
    images: ImageFolder = None,
    encoder: Annotated[
        list[str] | None,
        encoder_option(
            help="Frozen encoder; default: by device and number of images. Given several times, as 'NAME @ WEIGHTS': "
            "validation chooses one or all at once."
        ),
    ] = None,
    weights: Weights = None,
    resize: Resize = None,
    out: Annotated[Path | None, Option(help="Folder to write; default: SOURCE-model.")] = None,
    minutes: Annotated[
        float | None,
        Option(help="Time limit for training, used to its end; encoding is not counted; default: no limit."),
    ] = None,
    log_as: Annotated[str, Option("--log", help="Log to dvclive, tensorboard, wandb or mlflow.")] = "none",
    force: Force = False,
) -> None:
    """Fit a model to labelled images and export it; no project is needed.

    Checks and encodes the images, then chooses by validation how much of the model to train. Without
    --minutes, the choice does not depend on the machine's speed; an estimate of the time is printed
    first. OUT.cache stores unfinished training, so the same command resumes an interrupted fit.
    Features are kept in a feature cache, so correcting labels does not trigger re-encoding. The
    printed metrics precede the final fit, which uses all images.
    """
    from duplex.recognition.fit import fit_folder

    name = source.resolve().name if source.is_dir() else source.resolve().stem
    place = out or Path(f"{name}-model")
    choice: dict[str, Any] = {"encoder": encoder or None, "weights": weights, "resize": resize, "minutes": minutes}
    model = fit_folder(source, place, images=images, say=log, log=log_as, force=force, **choice)
    log(f"{model} holds the model; `duplex predict IMAGE --model {model}` uses it")


@app.command()
def update(
    model: Annotated[Path, Argument(help="Model folder that `duplex fit` wrote.")],
    source: Annotated[Path, Argument(help=f"{LABELLED}, or CSV or Parquet table.")],
    images: ImageFolder = None,
    out: Annotated[Path | None, Option(help="Folder to write; default: MODEL-updated.")] = None,
    in_place: Annotated[bool, Option("--in-place", help="Replace MODEL.")] = False,
    force: Force = False,
) -> None:
    """Add labelled images to a model without training it; they may show new words.

    Visual prototypes are recomputed in closed form; prompts and fine-tuned blocks stay.
    """
    from duplex.recognition.update import update_model

    model = named_path(model)
    if in_place and out is not None:
        problem = f"--in-place replaces {model}, but --out {out} names another folder"
        raise UsageError(f"{problem}; leave one out")
    place = model if in_place else out or model.with_name(f"{model.resolve().name}-updated")
    folder = None if images is None else images.resolve()
    update_model(model, source.resolve(), place, images=folder, say=log, force=force)
    log(f"{place} holds the updated model")


SOME_UNREADABLE = 3  # exit code
MODEL_HELP = "Folder of a run, fitted model or export, or hf-hub:OWNER/NAME"
World = Annotated[str | None, Option(help="World (closed or open) of candidates; default: closed if the model has it.")]
Add = Annotated[list[str] | None, Option(help="A pair to add, such as 'rusty kettle'; repeatable.")]
Compositions = Annotated[Path | None, Option(help="CSV file of pairs to add: columns state, object.")]
NEW_SHARE = "Expected share (0-1) of images of unseen pairs, or auto"
NewShare = Annotated[str | None, Option(help=f"{NEW_SHARE}; default: auto for 50 images or more, else the model's.")]
Device = Annotated[str, Option(help="Device to run the encoder on: auto, cpu or cuda.")]


@app.command()
def predict(
    paths: Annotated[list[str], Argument(help="Image files, folders, glob patterns, or '-' for stdin.")],
    model: Annotated[str | None, Option("--model", "-m", help=f"{MODEL_HELP}; default: the best run.")] = None,
    top: Annotated[int, Option(min=1, help="Number of pairs per image, best first.")] = 3,
    world: World = None,
    new_share: NewShare = None,
    add: Add = None,
    compositions: Compositions = None,
    form: Annotated[str | None, Option("--format", help=f"{', '.join(FORMATS)}; default: by --out.")] = None,
    out: Annotated[Path | None, Option(help="Write to this file instead of stdout.")] = None,
    force: Force = False,
    batch_size: Annotated[int, Option(min=1, help="Number of images encoded at once.")] = 64,
    num_workers: Annotated[int | None, Option(min=0, help="Decoding processes; default: cores - 1.")] = None,
    device: Device = "auto",
) -> None:
    """Name the state and object in each image.

    Without --model, the run with the best validation AUC answers. A file that is not a readable
    image gets a line with the reason, and the exit code is 3.
    """
    from duplex.recognition.recognizer import list_images

    form = checked_format(form, out)
    if out is not None:
        if out.is_dir():
            example = out / "answers.csv"
            raise UsageError(f"--out {out} is a folder; give a file, such as --out {example}")
        if not out.parent.is_dir():
            problem = f"--out {out}: the folder {out.parent} does not exist"
            raise UsageError(f"{problem}; create it, or choose another --out")
        refuse_existing(out, force=force)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a path may hold bytes that are not text
    files = list_images(paths, sys.stdin, log)
    recognizer = load_model(model, world=world, device=device, add=add, compositions=compositions, new_share=new_share)
    workers = "auto" if num_workers is None else num_workers
    answers = recognizer.stream(files, top, world, batch_size, workers)  # type: ignore[arg-type]
    if recognizer.estimates_share(len(files)):
        answers = with_share_logged(answers)
    names = (str(path).encode("utf-8", "backslashreplace").decode() for path in files)
    with open_output(out) as target:
        unreadable = write_answers(zip(names, answers, strict=True), target, form, top)
    if unreadable:
        log(f"{unreadable} of {len(files)} files are not readable images")
        raise typer.Exit(SOME_UNREADABLE)


def load_model(
    model: str | None,
    *,
    world: str | None = None,
    device: str = "auto",
    add: list[str] | None = None,
    compositions: Path | None = None,
    new_share: str | None = None,
    hint: str = "give a model with --model",
) -> Recognizer:
    """Load `model` (None: the best run); add the pairs in `add` and in the CSV `compositions`."""
    from duplex.recognition.added import read_compositions
    from duplex.recognition.recognizer import Recognizer

    if world is not None:
        require(world, WORLDS, "world")
    params = load_params() if Path("params.yaml").is_file() else None
    if model is None:
        from duplex.project.runs import best_run

        model = str(best_run(world, hint=hint, params=params).root)
        log(f"model: {model}")
    words = None if params is None else params.evaluation.word_vectors
    recognizer = Recognizer.load(model, device=device, word_vectors=words, new_share=_share(new_share))
    added: list[str | Pair] = []
    if compositions:
        added += read_compositions(compositions)
    added += add or []
    if added:
        recognizer = recognizer.with_compositions(added)
    recognizer.candidates(world)  # type: ignore[arg-type]
    _log_added(recognizer)
    return recognizer


def _share(text: str | None) -> float | Literal["auto"] | None:
    if text is None or text == "auto":
        return text  # type: ignore[return-value]
    try:
        return float(text)
    except ValueError:
        problem = f"--new-share is {text!r}"
        raise UsageError(f"{problem}; expected a number between 0 and 1, such as 0.1, or auto") from None


def _log_added(recognizer: Recognizer) -> None:
    from duplex.recognition.added import are_words_trained

    for state, name in recognizer.added:
        seen = are_words_trained((state, name), recognizer.labels)
        text = {True: "is trained", False: "is new, described by text alone"}
        words = f"state {state!r} {text[seen.state]}, object {name!r} {text[seen.object]}"
        log(f"added candidate {state} {name}: {words}")


@app.command("next")
def next_(
    model: Annotated[str, Argument(help=f"{MODEL_HELP}.")],
    folder: Annotated[Path, Argument(help="Folder of unlabelled images.")],
    count: Annotated[int, Option(min=1, help="Number of images to list.")] = 50,
    out: Annotated[Path | None, Option(help="CSV to write; default: FOLDER-next.csv.")] = None,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """List the unlabelled images whose labels would help a model most.

    Writes a CSV file to label. Leaves out files that a model of `duplex fit` was fitted to.
    Features are cached.
    """
    from duplex.project.suspects import rank_unlabelled
    from duplex.recognition.export import FIT, fitted_digests, read_fit

    folder = folder.resolve()
    target = out or Path(f"{folder.name}-next.csv")
    refuse_existing(target, force=force)
    fitted = fitted_digests(read_fit(Path(model))) if (Path(model) / FIT).is_file() else {}
    table = rank_unlabelled(load_model(model, device=device), folder, fitted)[:count]
    with replace_file(target) as scratch:
        table.to_csv(scratch, index=False, lineterminator="\n")
    for row in table.to_dict("records"):
        note = "" if row["in_distribution"] else "  none of these?"
        line = f"{row['rank']:>5}  {row['answer']:<28} {row['margin']:.3f}  {row['image']}{note}"
        typer.echo(escape_unprintable(line))
    then = "add them to the training images"
    if fitted:
        then = f"run `duplex update {model} {target} --images {folder}`"
    log(f"wrote {target}; fill in state and object, delete the lines without labels, then {then}")


LICENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")


@app.command()
def export(
    run: Annotated[str, Argument(help="A run's folder, such as artifacts/shapes/duplex/0.")],
    out: Annotated[Path | None, Argument(help="The folder to write; optional with --push.")] = None,
    world: World = None,
    onnx: Annotated[bool, Option("--onnx", help="Add trained.onnx, which scores features.")] = False,
    onnx_encoder: Annotated[bool, Option("--onnx-encoder", help="Add encoder.onnx and see.py, which runs it.")] = False,
    page: Annotated[Path | None, Option(help="onnxruntime-web's folder 'dist', to add page/, a static site.")] = None,
    push: Annotated[str | None, Option(help="Upload to Hugging Face as OWNER/NAME.")] = None,
    licence: Annotated[str, Option("--licence", help="Licence, such as mit or cc-by-4.0.")] = "other",
    name: Annotated[str | None, Option(help="Title of the model card.")] = None,
    force: Force = False,
) -> None:
    """Export a run as a folder that needs only numpy and safetensors.

    It holds prototypes, labels, a card and recognize.py.
    """
    from duplex.recognition import export as export_folder
    from duplex.recognition.export import FIT, model_card_facts

    if out is None and push is None:
        problem = "no folder to export to"
        raise UsageError(f"{problem}; run `duplex export {run} FOLDER`, or add --push OWNER/NAME")
    if out is not None and (out / FIT).is_file():
        lost = "its metrics and the files that `duplex update` needs"
        problem = f"{out} holds a fitted model; an export would delete {lost}"
        raise UsageError(f"{problem}; choose another folder")
    if not LICENCE.fullmatch(licence):  # it becomes a line of the card's YAML
        expected = "a Hugging Face licence identifier, such as cc-by-4.0"
        raise UsageError(f"--licence is {licence!r}; expected {expected}")
    recognizer = load_model(run, world=world, device="cpu")
    chosen = recognizer.worlds[0] if world is None else world
    trained = recognizer.trained
    facts = model_card_facts(Path(trained.where), name=name, licence=licence, repository=push)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "export" if out is None else out
        scores = onnx or onnx_encoder
        add_files = partial(_add_onnx, trained, scores=scores, tower=onnx_encoder, page=page)
        export_folder.export(trained, chosen, folder, facts, add_files, force=force)  # type: ignore[arg-type]
        if out is not None:
            log(f"exported {run} to {out}")
        if push is not None:
            log(f"uploaded to {export_folder.upload(folder, push)}")


def _add_onnx(
    trained: TrainedModel, folder: Path, tensors: dict[str, Any], scores: bool, tower: bool, page: Path | None
) -> None:
    from duplex.recognition.onnx_files import write_page, write_scores, write_tower

    if trained.finetuned is not None and not tower:
        names = "recognize.py and trained.onnx read" if scores else "recognize.py reads"
        advice = "to export this tower, too, add --onnx-encoder"
        log(f"{names} features of the fine-tuned image tower; {advice}")
    if scores:
        write_scores(folder, tensors, trained.backbone.dim)
    if tower:
        write_tower(folder, trained)
    if page is not None:
        write_page(folder, tensors, trained, page)


@app.command()
def serve(
    model: Annotated[str | None, Argument(help=f"{MODEL_HELP}; default: the best run.")] = None,
    host: Annotated[str, Option(help="Address to bind; 0.0.0.0 lets other machines connect.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to bind; 0: any free port.")] = 8000,
    world: World = None,
    add: Add = None,
    compositions: Compositions = None,
    new_share: Annotated[str | None, Option(help=f"{NEW_SHARE} (from recent images); default: the model's.")] = None,
    device: Device = "auto",
    max_megabytes: Annotated[int, Option(min=1, help="Largest request, in MB.")] = Limits.bytes // 2**20,
    max_images: Annotated[int, Option(min=1, help="Most images in a request.")] = Limits.images,
    workers: Annotated[int | None, Option(min=1, max=64, help="Processes; default: 2, or 1 with a GPU.")] = None,
    seconds: Annotated[float, Option(min=0.1, max=3600, help="Time limit per request, in seconds.")] = Limits.seconds,
) -> None:
    """Serve a model over HTTP, with a page for browsers.

    Answers POST /predict, /labels, /health, /metrics and /docs; the page is at /.
    """
    try:
        import uvicorn

        from duplex.recognition.serve import HEADERS, WINDOW, RecentShares, application, recognizer_workers
    except ImportError as error:
        fix = install_command("serve")
        raise UsageError(f"the server needs the package {error.name}; run `{fix}`") from error
    hint = "give a model after `duplex serve`"
    options = {"world": world, "device": device, "add": add, "compositions": compositions, "new_share": new_share}
    recognizer = load_model(model, hint=hint, **options)  # type: ignore[arg-type]
    shares = RecentShares(recognizer.candidates(world), estimated=new_share == "auto")  # type: ignore[arg-type]
    if new_share == "auto":
        has_means = recognizer.candidates(world).mass is not None  # type: ignore[arg-type]
        line = f"share of new pairs: estimated from the last {WINDOW} images, see /health"
        log(line if has_means else str(shares.share))
    limits = Limits(bytes=max_megabytes * 2**20, images=max_images, seconds=seconds)
    neighbours = _training_images(recognizer)
    where = model or recognizer.trained.where
    load = partial(_load_same, where, recognizer.trained.fingerprint, recognizer.added, options)
    count, threads = _processes(workers, recognizer.device)
    pool = recognizer_workers(load, count, world=world, max_pixels=limits.pixels, threads=threads)  # type: ignore[arg-type]
    with _listen(host, port) as bound, suppress(KeyboardInterrupt), pool as running:
        config = uvicorn.Config(
            application(recognizer, running, limits, neighbours, world, shares),  # type: ignore[arg-type]
            http="h11",  # which limits the size of headers
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            headers=HEADERS,
            limit_concurrency=limits.connections,
            timeout_graceful_shutdown=round(limits.seconds),
        )
        address = f"[{host}]" if ":" in host else host
        print(f"http://{address}:{bound.getsockname()[1]}/", file=sys.stderr, flush=True)  # the socket listens
        uvicorn.Server(config).run(sockets=[bound])  # at KeyboardInterrupt, it finishes requests
    log("stopped")


def _load_same(where: str, fingerprint: str, added: tuple[Pair, ...], options: dict[str, Any]) -> Recognizer:
    recognizer = load_model(where, **options)
    changed = "has changed since the server started; restart the server"
    if recognizer.trained.fingerprint != fingerprint:
        raise DuplexError(f"the model in {where} {changed}")
    if recognizer.added != added:
        raise DuplexError(f"{options['compositions']} (--compositions) {changed}")
    return recognizer


def _processes(workers: int | None, device: torch.device) -> tuple[int, int]:
    """Numbers of worker processes (while one encodes, another runs Python) and threads."""
    import torch

    cores = torch.get_num_threads()
    count = workers or (min(2, cores) if device.type == "cpu" else 1)
    if count == 1:
        return 1, max(1, cores - 1)  # which leaves a core for HTTP
    return count, max(1, cores // count)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.create_server((host, port), family=family)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]
        problem = f"cannot listen on {host}:{port}: {reason}"
        raise DuplexError(f"{problem}; choose another --port or --host") from error
    # Without this, a body waits 40 ms for the client to acknowledge the head. Connections inherit
    # it; asyncio sets it only for sockets that name their protocol, which create_server's do not.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def _training_images(recognizer: Recognizer) -> NeighbourIndex | None:
    from duplex.project.runs import dataset_of_run, training_neighbours

    dataset = dataset_of_run(Path(recognizer.trained.where))
    if dataset is None or not Path("params.yaml").is_file():
        return None
    try:
        return training_neighbours(load_params(), dataset, check=recognizer.check_cache)
    except DuplexError as error:
        log(f"similar training images are not shown: {error}")
        return None
