"""HTTP server that takes images and answers in JSON, with a web page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from duplex.errors import DuplexError
from duplex.labels import World
from duplex.recognition.batcher import Batcher
from duplex.recognition.limits import Limits, receive_limited
from duplex.recognition.neighbours import Neighbours
from duplex.recognition.recognizer import Recognizer
from duplex.recognition.server_metrics import ServerMetrics
from duplex.recognition.workers import ImageRequest
from duplex.system.process_pool import ProcessFailed, WorkerProcess
from duplex.system.version import __version__

POLICY = "default-src 'self'; img-src 'self' data: blob:; media-src blob:; style-src 'self' 'unsafe-inline'; "
HEADERS = [  # of every response
    ("Content-Security-Policy", POLICY + "script-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
]
FILES = {"type": "array", "items": {"type": "string", "format": "binary"}}
FORM = {"schema": {"type": "object", "properties": {"file": FILES}}}
UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": FORM}}}


def application(
    recognizer: Recognizer,
    workers: Sequence[WorkerProcess],
    limits: Limits,
    neighbours: Neighbours | None,
    world: World | None,
) -> Any:
    """Return the ASGI application of the server.

    recognizer: the model, for labels and candidates.
    workers: running processes, each with the same model, that recognise the images.
    limits: limits on requests.
    neighbours: training images to search for similar ones; None: requests for similar images are ignored.
    world: closed or open, the world whose candidates answers are chosen from; None: the model's default.
    """
    batcher = Batcher(workers)
    metrics, candidates = ServerMetrics(batcher, workers), recognizer.candidates(world)
    app = _application_of(batcher)

    @app.post("/predict", openapi_extra=UPLOAD, summary="Recognise the compositions in images")
    async def predict(request: Request, top: int = 3, similar: int = 0) -> JSONResponse:
        """Return one answer per image of the form, in order. `similar`: number of nearest training images to add."""
        if not (1 <= top <= 50 and 0 <= similar <= 20):
            raise HTTPException(422, f"top is {top} and similar is {similar}; expected 1–50 and 0–20")
        if batcher.full:
            raise HTTPException(429, "too many images are waiting; try again")
        try:
            answers = await asyncio.wait_for(answer_form(request, top, similar), limits.seconds)
        except asyncio.TimeoutError:
            raise HTTPException(408, f"no answer within {limits.seconds:g} s") from None
        except DuplexError as error:
            raise HTTPException(503 if isinstance(error, ProcessFailed) else 500, str(error)) from error
        bad = sum("error" in answer for answer in answers)
        metrics.bad_images.inc(bad)
        return JSONResponse({"answers": answers}, status_code=422 if bad == len(answers) else 200)

    async def answer_form(request: Request, top: int, similar: int) -> list[dict[str, Any]]:
        async with _uploaded_files(request, limits) as files:
            return await asyncio.gather(*(answer_file(file, top, similar if neighbours else 0) for file in files))

    async def answer_file(file: UploadFile, top: int, similar: int) -> dict[str, Any]:
        reply, feature = await batcher.answer(ImageRequest(await file.read(), top, similar > 0))
        record = {"image": (file.filename or "")[:200], **reply}
        if neighbours is not None and feature is not None:
            record["similar"] = await asyncio.to_thread(neighbours.nearest, feature, similar)
        return record

    @app.get("/labels", summary="List the states, the objects and the compositions to choose from")
    def labels() -> dict[str, Any]:
        pairs = [list(pair) for pair, chosen in zip(candidates.pairs, candidates.feasible, strict=True) if chosen]
        return {"states": candidates.states, "objects": candidates.objects, "compositions": pairs}

    @app.get("/health", summary="Report that the server is running")
    def health() -> dict[str, Any]:
        return {
            "status": "ok",
            "kind": recognizer.trained.kind,
            "compositions": len(candidates),
            "version": __version__,
        }

    app.get("/metrics", response_class=PlainTextResponse, summary="Counters for Prometheus")(metrics.text)
    app.get("/", response_class=HTMLResponse, include_in_schema=False)(lambda: _page("page.html"))
    app.get("/docs", response_class=HTMLResponse, include_in_schema=False)(lambda: _page("docs.html"))
    return metrics.count_requests(app)


def _application_of(batcher: Batcher) -> FastAPI:
    return FastAPI(
        title="duplex",
        version=__version__,
        lifespan=lambda _app: batcher.running(),
        docs_url=None,
        redoc_url=None,
        exception_handlers={HTTPException: _error_as_json},
    )


async def _error_as_json(_request: Request, error: Any) -> JSONResponse:
    return JSONResponse({"error": str(error.detail)}, status_code=error.status_code)


@asynccontextmanager
async def _uploaded_files(request: Request, limits: Limits) -> AsyncIterator[list[UploadFile]]:
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise HTTPException(415, "the request is not multipart/form-data; send images in fields named file")
    try:
        limited = Request(request.scope, receive_limited(request, limits.bytes))
        form = await limited.form(max_files=limits.images, max_fields=8)
    except HTTPException:
        raise
    except Exception as error:  # several kinds, of the parser and of clients that left
        raise HTTPException(400, "the form cannot be read") from error
    try:
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        if not files:
            raise HTTPException(400, "the form has no image; send images in fields named file")
        yield files
    finally:
        await form.close()


def _page(name: str) -> str:
    return (resources.files("duplex.recognition") / name).read_text(encoding="utf-8")
