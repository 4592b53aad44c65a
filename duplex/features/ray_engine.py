"""The same extraction on a Ray cluster: one actor a GPU, one task a shard.

An actor that dies is started again by Ray and repeats its shard, which resumes from its unfinished file; a second run
finds finished shards and skips them. Actors on every CPU slot can starve Ray's own tasks: one stays free.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duplex.encoders import encoder_identity, load_encoder, resolve_device
from duplex.errors import DuplexError, UsageError
from duplex.features.extraction import ExtractionReport, extract
from duplex.features.layout import partial_path
from duplex.features.shards import shard_path
from duplex.system.allocator import keep_freed_memory
from duplex.system.progress import Bar

RETRIES = 5  # of one shard


@dataclass(frozen=True)
class EncoderSpec:
    """How each actor loads the encoder."""

    name: str
    weights: str | None = None
    device: str = "auto"
    precision: str = "fp32"


class ShardWorker:
    """One encoder in one process; encodes any shard it is given."""

    def __init__(self, spec: EncoderSpec) -> None:
        keep_freed_memory()
        device = resolve_device(spec.device)
        self.encoder = load_encoder(spec.name, spec.weights, towers="image", device=device, precision=spec.precision)

    def process(self) -> int:
        return os.getpid()

    def extract(self, shard: tuple[int, int], images: Sequence[str], options: dict[str, Any]) -> ExtractionReport:
        return extract(images, encoder=self.encoder, shard=shard, progress=False, **options)


def extract_on_ray(
    images: Sequence[str],
    root: Path,
    out: Path,
    spec: EncoderSpec,
    *,
    shards: int,
    progress: bool = True,
    **options: Any,
) -> list[ExtractionReport]:
    """Extract all shards of `out`; paths must mean the same on every node. `options` are those of `extract`."""
    encoder_identity(spec.name, spec.weights, precision=spec.precision)  # what is wrong with it is told here
    ray = connect()
    options = {"root": root.resolve(), "out": out.resolve(), **options}
    if options.get("num_workers") == "auto":
        options["num_workers"] = 1  # an actor has one CPU slot; its node's other cores belong to other actors
    if options.pop("fresh", False):  # once: a worker that dies goes on where it was
        for path in (shard_path(options["out"], k, shards) for k in range(shards)):
            path.unlink(missing_ok=True)
            partial_path(path).unlink(missing_ok=True)
    listed = ray.put(list(images))  # once, not once a shard
    pool = _start_actors(ray, spec, shards)
    waiting, idle, reports = list(range(shards)), list(pool), []
    running: dict[Any, Any] = {}
    try:
        with Bar("shards", shards if progress else 0) as bar:
            while waiting or running:
                while waiting and idle:
                    k, actor = waiting.pop(0), idle.pop(0)
                    running[actor.extract.remote((k, shards), listed, options)] = actor
                (done, *_), _ = ray.wait(list(running), num_returns=1)
                reports.append(_result(ray, done))
                idle.append(running.pop(done))
                bar.show(len(reports))
    finally:
        for actor in pool:
            ray.kill(actor)
    return sorted(reports, key=lambda report: str(report.path))


def connect() -> Any:
    """Ray, connected to the cluster of RAY_ADDRESS or to one of its own on this machine."""
    try:
        import ray
    except ImportError as error:
        raise UsageError("the Ray engine needs the extra: pip install 'duplex[ray]'") from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    return ray


def _start_actors(ray: Any, spec: EncoderSpec, shards: int) -> list[Any]:
    """One actor a GPU; without GPUs one a CPU slot, less one."""
    resources = ray.cluster_resources()
    on_gpu = spec.device in ("auto", "cuda") and resources.get("GPU", 0) > 0
    slots = int(resources["GPU"]) if on_gpu else max(1, int(resources.get("CPU", 1)) - 1)
    remote = ray.remote(num_cpus=1, num_gpus=1 if on_gpu else 0, max_restarts=-1, max_task_retries=RETRIES)(ShardWorker)
    return [remote.remote(spec) for _ in range(min(shards, slots))]


def _result(ray: Any, done: Any) -> ExtractionReport:
    """A person's mistake inside an actor is theirs to read, without Ray's traceback."""
    try:
        report: ExtractionReport = ray.get(done)
        return report
    except ray.exceptions.RayTaskError as error:
        cause = error.as_instanceof_cause()
        if isinstance(cause, DuplexError):
            raise DuplexError(str(error.cause)) from error
        raise
    except ray.exceptions.RayActorError as error:
        if getattr(error, "actor_init_failed", False):
            raise DuplexError(f"a worker could not start: {str(error).strip().splitlines()[-1]}") from error
        raise DuplexError(
            f"a worker died more than {RETRIES} times; finished rows are kept: run the same command again"
        ) from error
