"""HTTP server that takes images and answers in JSON, with a web page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser

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
QUERY = ("top", "similar")  # parameters of /predict
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
    world: closed (choose among the pairs of the data set) or open (among all pairs); None: the model's default.
    """
    batcher = Batcher(workers)
    form_answers = _FormAnswers(batcher, limits, neighbours)
    metrics, candidates = ServerMetrics(batcher, workers), recognizer.candidates(world)
    app = _application_of(batcher)

    @app.post("/predict", openapi_extra=UPLOAD, summary="Recognise the compositions in images")
    async def predict(request: Request, top: int = 3, similar: int = 0) -> JSONResponse:
        """Return one answer per image of the uploaded form, in order.

        top: number of most probable compositions per answer. similar: number of nearest training images per answer.
        """
        if not (1 <= top <= 50 and 0 <= similar <= 20):
            raise HTTPException(422, f"top is {top} and similar is {similar}; expected 1–50 and 0–20")
        _check_query(request)
        if batcher.full:
            raise HTTPException(429, "too many images are waiting; try again")
        answers = await form_answers(request, top, similar)
        bad = sum("error" in answer for answer in answers)
        metrics.bad_images.inc(bad)
        return JSONResponse({"answers": answers}, status_code=422 if bad == len(answers) else 200)

    @app.get("/labels", summary="List the states, the objects and the compositions to choose from")
    def labels() -> dict[str, Any]:
        pairs = [list(pair) for pair, chosen in zip(candidates.pairs, candidates.feasible, strict=True) if chosen]
        return {"states": candidates.states, "objects": candidates.objects, "compositions": pairs}

    @app.get("/health", summary="Report that the server is running")
    def health() -> dict[str, Any]:
        kind, count = recognizer.trained.kind, len(candidates)
        return {"status": "ok", "kind": kind, "compositions": count, "version": __version__}

    app.get("/metrics", response_class=PlainTextResponse, summary="Counters for Prometheus")(metrics.text)
    app.get("/", response_class=HTMLResponse, include_in_schema=False)(lambda: _page("page.html"))
    app.get("/docs", response_class=HTMLResponse, include_in_schema=False)(lambda: _page("docs.html"))
    return metrics.count_requests(app)


@dataclass(frozen=True)
class _FormAnswers:
    """Callable that answers the images of an uploaded form, within the time limit of a request."""

    batcher: Batcher
    limits: Limits
    neighbours: Neighbours | None

    async def __call__(self, request: Request, top: int, similar: int) -> list[dict[str, Any]]:
        try:
            return await asyncio.wait_for(self._answer_form(request, top, similar), self.limits.seconds)
        except asyncio.TimeoutError:
            raise HTTPException(408, f"no answer within {self.limits.seconds:g} s") from None
        except DuplexError as error:
            raise HTTPException(503 if isinstance(error, ProcessFailed) else 500, str(error)) from error

    async def _answer_form(self, request: Request, top: int, similar: int) -> list[dict[str, Any]]:
        async with _uploaded_files(request, self.limits) as files:
            return await asyncio.gather(*(self._answer_file(file, top, similar) for file in files))

    async def _answer_file(self, file: UploadFile, top: int, similar: int) -> dict[str, Any]:
        wants_feature = similar > 0 and self.neighbours is not None
        reply, feature = await self.batcher.answer(ImageRequest(await file.read(), top, wants_feature))
        record = {"image": (file.filename or "")[:200], **reply}
        if self.neighbours is not None and feature is not None:
            record["similar"] = await asyncio.to_thread(self.neighbours.nearest, feature, similar)
        return record


def _application_of(batcher: Batcher) -> FastAPI:
    return FastAPI(
        title="duplex",
        version=__version__,
        lifespan=lambda _app: batcher.running(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would lose the images
        exception_handlers={HTTPException: _error_as_json, RequestValidationError: _invalid_query_as_json},
    )


async def _error_as_json(_request: Request, error: Any) -> JSONResponse:
    return JSONResponse({"error": str(error.detail)}, status_code=error.status_code, headers=error.headers)


async def _invalid_query_as_json(_request: Request, error: Any) -> JSONResponse:
    fault = error.errors()[0]
    value = f"{fault['input']!r:.80}"
    return JSONResponse({"error": f"{fault['loc'][-1]} is {value}; expected a whole number"}, status_code=422)


def _check_query(request: Request) -> None:
    """Raise an HTTP error 422 if a query parameter is unknown or given twice, since it would be ignored."""
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in QUERY or names.count(name) > 1:
            problem = "given twice" if name in QUERY else "unknown"
            raise HTTPException(422, f"the parameter {name[:80]!r} is {problem}; known: {', '.join(QUERY)}")


class _WholeFormParser(MultiPartParser):
    """Parser of uploaded forms that refuses a form cut off before its end, as its last image would be lost."""

    is_whole = False

    def on_end(self) -> None:
        self.is_whole = True

    async def parse(self) -> FormData:
        form = await super().parse()
        if not self.is_whole:
            await form.close()
            raise MultiPartException("the form ends before its last boundary; send it again")
        return form


@asynccontextmanager
async def _uploaded_files(request: Request, limits: Limits) -> AsyncIterator[list[UploadFile]]:
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise HTTPException(415, "the request is not multipart/form-data; send images in fields named file")
    try:
        limited = Request(request.scope, receive_limited(request, limits.bytes))
        parser = _WholeFormParser(limited.headers, limited.stream(), max_files=limits.images, max_fields=8)
        form = await parser.parse()
    except HTTPException:
        raise
    except MultiPartException as error:
        if error.message.startswith("Too many files"):
            raise HTTPException(
                413, f"the request has more than {limits.images} images; send fewer per request"
            ) from error
        raise HTTPException(400, f"the form cannot be read: {error.message}") from error
    except OSError as error:  # no space for the upload
        raise HTTPException(503, f"the upload cannot be stored: {error.strerror}; try again later") from error
    except Exception as error:  # several kinds, of the parser and of clients that left
        raise HTTPException(400, "the form cannot be read") from error
    try:
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        if texts := [name for name, value in form.multi_items() if not isinstance(value, UploadFile)]:
            text = f"the field {texts[0][:80]!r} is text, not a file"
            raise HTTPException(400, f"{text}; send images as files, and options in the query")
        if not files:
            raise HTTPException(400, "the form has no image; send images in fields named file")
        yield files
    finally:
        await form.close()


def _page(name: str) -> str:
    return (resources.files("duplex.recognition") / name).read_text(encoding="utf-8")
