"""The server: pictures by HTTP, answers as JSON, and one page for people."""

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
from duplex.recognition.batching import Batcher
from duplex.recognition.candidates import Panel
from duplex.recognition.counters import Counters, resident
from duplex.recognition.limits import Gate, Limits, Refused
from duplex.recognition.neighbours import Neighbours
from duplex.recognition.recognizer import Recognizer
from duplex.recognition.workers import Asked, Gone, Worker
from duplex.system.version import __version__

POLICY = "default-src 'self'; img-src 'self' data: blob:; media-src blob:; style-src 'self' 'unsafe-inline'; "
HEADERS = {
    "Content-Security-Policy": POLICY + "script-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"file": {"type": "array", "items": {"type": "string", "format": "binary"}}},
                }
            }
        },
    }
}


def application(
    recognizer: Recognizer,
    workers: Sequence[Worker],
    limits: Limits | None = None,
    neighbours: Neighbours | None = None,
    world: World | None = None,
) -> Gate:
    """An ASGI application that answers for one world. The workers, which do so too, are those of the caller."""
    limits, counters = limits or Limits(), Counters()
    batcher = Batcher(workers)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await batcher.stop()

    app = FastAPI(title="duplex", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    service = Service(recognizer, recognizer.panel(world), limits, counters, workers, batcher, neighbours)
    app.add_exception_handler(HTTPException, _told)  # type: ignore[arg-type]
    app.add_exception_handler(Refused, _refused)  # type: ignore[arg-type]
    app.get("/", response_class=HTMLResponse, include_in_schema=False)(lambda: _page("page.html"))
    app.get("/docs", response_class=HTMLResponse, include_in_schema=False)(lambda: _page("docs.html"))
    app.post("/predict", openapi_extra=UPLOAD, summary="What some pictures show")(service.predict)
    app.get("/labels", summary="States, objects, and the compositions to choose from")(service.labels)
    app.get("/health", summary="Whether it can answer")(service.health)
    app.get("/metrics", response_class=PlainTextResponse, summary="Counters for Prometheus")(service.metrics)
    return Gate(app, limits, counters, HEADERS)


class Service:
    """What the paths do."""

    def __init__(
        self,
        recognizer: Recognizer,
        panel: Panel,
        limits: Limits,
        counters: Counters,
        workers: Sequence[Worker],
        batcher: Batcher,
        neighbours: Neighbours | None,
    ) -> None:
        self._trained, self._panel, self._limits, self._counters = recognizer.trained, panel, limits, counters
        self._workers, self._batcher, self._neighbours = workers, batcher, neighbours

    async def predict(self, request: Request, top: int = 3, similar: int = 0) -> JSONResponse:
        """One answer for each picture of the form, in order. `similar` adds the nearest training pictures."""
        if not (1 <= top <= 50 and 0 <= similar <= 20):
            raise HTTPException(422, "top lies between 1 and 50, similar between 0 and 20")
        if self._batcher.full:
            raise HTTPException(429, "too many pictures are waiting; try again")
        try:
            answers = await asyncio.wait_for(self._answers(request, top, similar), self._limits.seconds)
        except asyncio.TimeoutError:
            raise HTTPException(408, f"there was no answer within {self._limits.seconds:g} s") from None
        except DuplexError as error:
            raise HTTPException(503 if isinstance(error, Gone) else 500, str(error)) from error
        bad = sum("error" in answer for answer in answers)
        self._counters.bad_pictures += bad
        return JSONResponse({"answers": answers}, status_code=422 if bad == len(answers) else 200)

    async def _answers(self, request: Request, top: int, similar: int) -> list[dict[str, Any]]:
        async with _form(request, self._limits) as files:
            return await asyncio.gather(*(self._one(file, top, similar) for file in files))

    async def _one(self, file: UploadFile, top: int, similar: int) -> dict[str, Any]:
        name = (file.filename or "")[:200]
        near = self._neighbours if similar else None
        record, feature = await self._batcher.ask(Asked(await file.read(), top, near is not None))
        record = {"image": name, **record}
        if near is not None and feature is not None:
            record["similar"] = await asyncio.to_thread(near.of_feature, feature, similar)
        return record

    def labels(self) -> dict[str, Any]:
        panel = self._panel
        pairs = [list(pair) for pair, live in zip(panel.pairs, panel.live, strict=True) if live]
        return {"states": panel.states, "objects": panel.objects, "compositions": pairs}

    def health(self) -> dict[str, Any]:
        return {"status": "ok", "kind": self._trained.kind, "compositions": len(self._panel), "version": __version__}

    def metrics(self) -> str:
        return self._counters.text(
            self._batcher.pictures,
            self._batcher.batches,
            sum(worker.restarts for worker in self._workers),
            resident("self") + sum(resident(worker.pid) for worker in self._workers),
        )


@asynccontextmanager
async def _form(request: Request, limits: Limits) -> AsyncIterator[list[UploadFile]]:
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise HTTPException(415, "send pictures as multipart/form-data, in fields called file")
    try:
        form = await request.form(max_files=limits.pictures, max_fields=8)
    except (Refused, HTTPException):
        raise
    except Exception as error:  # the parser's own kinds
        raise HTTPException(400, "the form is broken") from error
    try:
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        if not files:
            raise HTTPException(400, "the form holds no picture; send them in fields called file")
        yield files
    finally:
        await form.close()


async def _told(_request: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse({"error": str(error.detail)}, status_code=error.status_code)


async def _refused(_request: Request, error: Refused) -> JSONResponse:
    return JSONResponse({"error": error.sentence}, status_code=error.status, headers={"Connection": "close"})


def _page(name: str) -> str:
    return (resources.files("duplex.recognition") / name).read_text(encoding="utf-8")
