"""`duplex serve`: a trained run behind HTTP, and a page to show it."""

from __future__ import annotations

import math
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duplex.errors import DuplexError, UsageError

if TYPE_CHECKING:
    import torch
    from uvicorn import Server

    from duplex.recognition.neighbours import Neighbours
    from duplex.recognition.recognizer import Recognizer


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    model: Annotated[
        str | None, typer.Argument(help="A run's folder, an exported one, or hf-hub:OWNER/NAME; default: the best run.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen at; others than this machine need another.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    world: Annotated[str | None, typer.Option("--world", help="closed or open; by default the model's own.")] = None,
    add: Annotated[list[str] | None, typer.Option(help="A further composition, such as 'rusty kettle'.")] = None,
    words: Annotated[Path | None, typer.Option(help="A CSV file of further compositions: state,object.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    max_megabytes: Annotated[int, typer.Option(min=1, help="Of a request.")] = 32,
    max_pictures: Annotated[int, typer.Option(min=1, help="Of a request.")] = 32,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Processes with the model; default: 2, or 1 with a GPU or a single core."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="For a request to arrive, and for its answer.")] = 20.0,
) -> None:
    """Answer by HTTP until it is stopped: POST /predict, /labels, /health, /metrics, /docs, and a page at /."""
    from duplex.cli.predict import load_model

    try:
        import uvicorn

        from duplex.recognition.limits import Limits, protocol
        from duplex.recognition.server import application
        from duplex.recognition.workers import Job, staff
    except ImportError as error:
        raise UsageError(f"the server needs further packages ({error.name}); pip install 'duplex[serve]'") from error
    if not math.isfinite(seconds):
        raise UsageError(f"--seconds is {seconds}; give a number of them")
    recognizer = load_model(model, world, device, add or [], words, exact=False, hint="name it after `duplex serve`")
    limits = Limits(body=max_megabytes * 2**20, pictures=max_pictures, seconds=seconds)
    near, where = _neighbours(recognizer), model or recognizer.trained.where
    load = partial(_the_same, recognizer.trained.fingerprint, where, world, device, add or [], words)
    count, threads = _shared(workers, recognizer.device)
    job = Job(load, world, limits.pixels, threads)  # type: ignore[arg-type]
    stopped = suppress(KeyboardInterrupt)  # uvicorn has finished what was under way, and passes it on
    with _listening(host, port) as line, stopped, staff(job, count) as hands:
        config = uvicorn.Config(
            application(recognizer, hands, limits, near, world),  # type: ignore[arg-type]
            host=host,
            port=port,
            http=protocol(limits.seconds),
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=limits.connections,
            timeout_graceful_shutdown=round(limits.seconds),
        )
        server = uvicorn.Server(config)
        _announce(server, host, line.getsockname()[1])
        server.run(sockets=[line])
    typer.echo("stopped", err=True)


def _the_same(fingerprint: str, where: str, *rest: Any) -> Recognizer:
    """The model for a worker, which may be started long after the server."""
    from duplex.cli.predict import load_model

    found = load_model(where, *rest, exact=False)
    if found.trained.fingerprint != fingerprint:
        raise DuplexError(f"{where} holds another model than it did when the server started; start the server again")
    return found


def _shared(workers: int | None, device: torch.device) -> tuple[int, int]:
    """How many workers there are, and threads of torch in each. Two overlap what one would do in turns."""
    import torch

    cores = torch.get_num_threads()
    count = workers or (min(2, cores) if device.type == "cpu" else 1)
    return count, max(1, cores // count if count > 1 else cores - 1)  # one leaves a core for HTTP


def _listening(host: str, port: int) -> socket.socket:
    try:
        line = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise DuplexError(
            f"{host}:{port} cannot be listened at: {error.strerror or error}; choose another --port or --host"
        ) from error
    # An answer is a head and a body: without this, a body waits 40 ms for the client to acknowledge its head.
    # Connections inherit it; asyncio sets it only for sockets that name their protocol, which create_server's do not.
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


def _announce(server: Server, host: str, port: int) -> None:
    """Say the address as soon as it answers."""
    begin = server.startup

    async def startup(sockets: list[socket.socket] | None = None) -> None:
        await begin(sockets=sockets)
        print(f"http://{f'[{host}]' if ':' in host else host}:{port}/", file=sys.stderr, flush=True)

    server.startup = startup  # type: ignore[method-assign]


def _neighbours(recognizer: Recognizer) -> Neighbours | None:
    """The training pictures of the run's data set, where this is its project and they are there, seen as it sees."""
    from duplex.config.params import load_params
    from duplex.stages.trained_runs import dataset_of, training_pictures

    dataset = dataset_of(Path(recognizer.trained.where))
    if dataset is None or not Path("params.yaml").is_file():
        return None
    try:
        return training_pictures(load_params(), dataset, check=recognizer.check_cache)
    except DuplexError as error:
        typer.echo(f"no training pictures are shown: {error}", err=True)
        return None
