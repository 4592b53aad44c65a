"""`duplex serve`: serve a trained model over HTTP, with a web page."""

from __future__ import annotations

import math
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duplex.cli import app
from duplex.cli.options import load_params
from duplex.cli.predict import Add, Compositions, Device, NewShare, World, load_model
from duplex.errors import DuplexError, UsageError, install_command

if TYPE_CHECKING:
    import torch

    from duplex.recognition.added_words import Pair
    from duplex.recognition.neighbours import Neighbours
    from duplex.recognition.recognizer import Recognizer


@app.command()
def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="Folder of a run or an export, or hf-hub:OWNER/NAME; default: the run with the best AUC."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to bind; 0.0.0.0 for other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to bind; 0: any free port.")] = 8000,
    world: World = None,
    add: Add = None,
    compositions: Compositions = None,
    new_share: NewShare = None,
    device: Device = "auto",
    max_megabytes: Annotated[int, typer.Option(min=1, help="Largest request, in megabytes.")] = 32,
    max_images: Annotated[int, typer.Option(min=1, help="Largest number of images in a request.")] = 32,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Number of processes, each with the model; default: 2, or 1 with a GPU or one core."
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Time limit in seconds, for receiving a request and for answering it.")
    ] = 20,
) -> None:
    """Serve a model over HTTP until stopped: POST /predict, /labels, /health, /metrics, /docs, and a page at /."""
    try:
        import uvicorn

        from duplex.recognition.server import HEADERS, Limits, application
        from duplex.recognition.workers import image_workers
    except ImportError as error:
        raise UsageError(f"the server needs further packages ({error.name}); {install_command('serve')}") from error
    if not math.isfinite(seconds):
        raise UsageError(f"--seconds is {seconds}; expected a finite number")
    hint = "name it after `duplex serve`"
    recognizer = load_model(model, world, device, add or [], compositions, new_share, hint=hint)
    limits = Limits(bytes=max_megabytes * 2**20, images=max_images, seconds=seconds)
    neighbours = _training_images(recognizer)
    loaded = recognizer.trained.fingerprint, recognizer.added
    where = model or recognizer.trained.where
    load = partial(_load_same, loaded, where, world, device, add or [], compositions, new_share)
    count, threads = _processes(workers, recognizer.device)
    pool = image_workers(load, count, world=world, max_pixels=limits.pixels, threads=threads)  # type: ignore[arg-type]
    with _listen(host, port) as bound, suppress(KeyboardInterrupt), pool as running:
        config = uvicorn.Config(
            application(recognizer, running, limits, neighbours, world),  # type: ignore[arg-type]
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
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as `nohup` sets it
            signal.signal(signal.SIGHUP, lambda number, frame: signal.raise_signal(signal.SIGTERM))
        uvicorn.Server(config).run(sockets=[bound])  # finishes requests before it raises KeyboardInterrupt
    typer.echo("stopped", err=True)


def _load_same(loaded: tuple[str, tuple[Pair, ...]], where: str, *options: Any) -> Recognizer:
    """Load the model in a worker process, unless its fingerprint or the added compositions differ from `loaded`."""
    recognizer = load_model(where, *options)
    if recognizer.trained.fingerprint != loaded[0]:
        raise DuplexError(f"{where} holds another model than it did when the server started; start the server again")
    if recognizer.added != loaded[1]:
        raise DuplexError("the file of --compositions has changed since the server started; start the server again")
    return recognizer


def _processes(workers: int | None, device: torch.device) -> tuple[int, int]:
    """Number of worker processes and of torch threads in each. Two overlap Python code with encoding."""
    import torch

    cores = torch.get_num_threads()
    count = workers or (min(2, cores) if device.type == "cpu" else 1)
    return count, max(1, cores // count if count > 1 else cores - 1)  # a single worker leaves a core for HTTP


def _listen(host: str, port: int) -> socket.socket:
    try:
        bound = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = error.strerror or error
        raise DuplexError(f"{host}:{port} cannot be bound: {reason}; choose another --port or --host") from error
    # Without this, a body waits 40 ms for the client to acknowledge the head. Connections inherit it; asyncio sets it
    # only for sockets that name their protocol, which create_server's do not.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def _training_images(recognizer: Recognizer) -> Neighbours | None:
    """Images to compare uploads with; None if the run is not of this project, or if they cannot be read."""
    from duplex.stages.trained_runs import dataset_of_run, training_images

    dataset = dataset_of_run(Path(recognizer.trained.where))
    if dataset is None or not Path("params.yaml").is_file():
        return None
    try:
        return training_images(load_params(), dataset, check=recognizer.check_cache)
    except DuplexError as error:
        typer.echo(f"similar training images are not shown: {error}", err=True)
        return None
