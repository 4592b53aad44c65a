"""Encode images on a Ray cluster in shards (parts of a feature cache), or execute runs there.

Each GPU has one actor (worker process); without GPUs, actors use CPU slots. If an actor dies, Ray
restarts it: a shard is then resumed, but a run of a sweep is reported as failed. All nodes must
see the same files at the same paths.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from duplex.config.params import EncoderParams
from duplex.encoders.base import encoder_identity, load_encoder, resolve_device
from duplex.errors import DuplexError, UsageError, install_command
from duplex.features.extract import ExtractionReport, ExtractionSettings, extract
from duplex.features.file import partial_path
from duplex.features.shards import join_shards, shard_path
from duplex.project.extract import extraction_inputs, write_extraction_summary
from duplex.project.run import ProjectData
from duplex.system.processes import ProgressBar
from duplex.system.threads import keep_freed_memory

RETRIES = 5  # per shard


def extract_dataset_on_ray(
    data: ProjectData, shards: int, out: Path | None = None, *, fresh: bool = False
) -> list[ExtractionReport]:
    """Encode a data set's images on Ray into one feature cache; returns a report per shard."""
    cache = out or data.paths.features(data.dataset)
    stamp = data.stamp("extract")
    images, settings = extraction_inputs(data)
    device = data.params.device
    reports = extract_on_ray(images, cache, data.entry.encoder, settings, shards=shards, device=device, fresh=fresh)
    join_shards(cache)
    write_extraction_summary(cache)
    if out is None:
        data.write_stamp("extract", stamp)
    return reports


def extract_on_ray(
    images: Sequence[str],
    out: Path,
    entry: EncoderParams,
    settings: ExtractionSettings,
    *,
    shards: int,
    device: str = "auto",
    fresh: bool = False,
) -> list[ExtractionReport]:
    """Encode images (paths below `settings.root`) into shards of `out`; a report per shard."""
    encoder_identity(
        entry.name, entry.weights, precision=entry.precision, resize=entry.resize
    )  # an error before Ray starts
    ray = connect()
    out = out.resolve()
    settings = replace(settings, root=settings.root.resolve())
    if settings.num_workers == "auto":  # an actor has one CPU slot; other cores belong to other actors
        settings = replace(settings, num_workers=1)
    if fresh:  # deleted here once: a restarted actor must find its unfinished file
        for k in range(shards):
            path = shard_path(out, k, shards)
            path.unlink(missing_ok=True)
            partial_path(path).unlink(missing_ok=True)
    # stored once for all actors
    create = ray.put(partial(_shard_extractor, entry, device, list(images), out, settings))
    parts = [(k, shards) for k in range(shards)]
    reports = []
    with ProgressBar("shards", shards) as bar:
        for _, future in run_on_actors(ray, create, parts, on_gpu=device != "cpu", max_task_retries=RETRIES):
            reports.append(_shard_report(ray, future))
            bar.show(len(reports))
    return sorted(reports, key=lambda report: str(report.path))


def _shard_extractor(
    entry: EncoderParams, device: str, images: Sequence[str], out: Path, settings: ExtractionSettings
) -> Callable[[tuple[int, int]], ExtractionReport]:
    device = resolve_device(device)
    options: Any = {"precision": entry.precision, "resize": entry.resize}
    encoder = load_encoder(entry.name, entry.weights, towers="image", device=device, **options)
    return lambda shard: extract(images, out, encoder, settings, shard=shard)


def _shard_report(ray: Any, future: Any) -> ExtractionReport:
    try:
        report: ExtractionReport = ray.get(future)
        return report
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.as_instanceof_cause(), DuplexError):
            raise DuplexError(str(error.cause)) from error
        raise
    except ray.exceptions.RayActorError as error:
        if getattr(error, "actor_init_failed", False):
            reason = f"a worker could not start ({last_line(error)})"
            raise DuplexError(f"{reason}; fix the cause and try again") from error
        raise DuplexError(
            f"worker processes died more than {RETRIES} times on one shard, perhaps for lack of "
            "memory; free memory and run the same command again (encoded images are kept)"
        ) from error


def connect() -> Any:
    """The module `ray`, connected to the cluster of RAY_ADDRESS or to one on this machine."""
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"--engine ray needs the package ray; run `{install_command('ray')}`") from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    return ray


class RemoteWorker:
    """Ray actor that calls `create` once, and calls the result for each task."""

    def __init__(self, create: Callable[[], Callable[[Any], Any]], folder: str) -> None:
        keep_freed_memory()
        os.chdir(folder)
        self.call = create()

    def run(self, task: Any) -> Any:
        return self.call(task)


def run_on_actors(
    ray: Any, create: Any, tasks: Sequence[Any], *, on_gpu: bool, jobs: int | None = None, cpus: int = 1, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """Call a function, which `create` makes once per actor, for tasks; yields (task, future)."""
    resources = ray.cluster_resources()
    if on_gpu and resources.get("GPU", 0) > 0:
        count = int(resources["GPU"])
        options = {"num_cpus": 1, "num_gpus": 1, **options}
    else:  # one CPU slot stays free: actors on every slot can starve Ray's own tasks
        slots = int(resources.get("CPU", 1))
        count = max(1, (slots - 1) // cpus)
        options = {"num_cpus": min(cpus, slots), "num_gpus": 0, **options}
    actor_class = ray.remote(**options, max_restarts=-1)(RemoteWorker)
    count = min(jobs or count, len(tasks))
    actors = [actor_class.remote(create, str(Path.cwd())) for _ in range(count)]
    waiting = deque(tasks)
    idle = deque(actors)
    busy: dict[Any, tuple[Any, Any]] = {}
    try:
        while waiting or busy:
            while waiting and idle:
                actor = idle.popleft()
                task = waiting.popleft()
                busy[actor.run.remote(task)] = actor, task
            (future, *_), _ = ray.wait(list(busy), num_returns=1)
            actor, task = busy.pop(future)
            yield task, future
            idle.append(actor)
    finally:
        for actor in actors:
            ray.kill(actor)


def last_line(error: Exception) -> str:
    line = str(error).strip().splitlines()[-1].strip()
    return line.partition(": ")[2] if line.startswith("duplex.errors.") else line
