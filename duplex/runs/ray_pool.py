"""The same makers of cells on a Ray cluster: one actor a GPU, or a few CPU slots. `artifacts/` must be on a disk that
all nodes share, at the same path."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from duplex.features.ray_engine import connect
from duplex.runs.run_tasks import Made, Maker, Task
from duplex.system.allocator import keep_freed_memory


class RemoteMaker:
    """A maker in an actor, in the project's folder."""

    def __init__(self, maker: Maker, folder: str) -> None:
        keep_freed_memory()
        os.chdir(folder)
        self.maker = maker

    def make(self, task: Task) -> Made:
        return self.maker.make(task)


def on_ray(tasks: Sequence[Task], maker: Maker, jobs: int | None, cpus: int) -> Iterator[Made]:
    """Make the cells on actors of `cpus` slots each; without `jobs` as many as the cluster has room for, less a slot:
    actors on every one can starve Ray's own tasks."""
    ray = connect()
    resources = ray.cluster_resources()
    on_gpu = maker.params.device != "cpu" and resources.get("GPU", 0) > 0
    room = int(resources["GPU"]) if on_gpu else max(1, (int(resources.get("CPU", 1)) - 1) // cpus)
    slots = 1 if on_gpu else min(cpus, int(resources.get("CPU", 1)))
    remote = ray.remote(num_cpus=slots, num_gpus=int(on_gpu), max_restarts=-1)(RemoteMaker)
    idle = [remote.remote(maker, str(Path.cwd())) for _ in range(min(jobs or room, len(tasks)))]
    actors, waiting = list(idle), deque(tasks)
    busy: dict[Any, tuple[Any, Task]] = {}
    try:
        while waiting or busy:
            while waiting and idle:
                actor, task = idle.pop(), waiting.popleft()
                busy[actor.make.remote(task)] = (actor, task)
            (ready, *_), _ = ray.wait(list(busy), num_returns=1)
            actor, task = busy.pop(ready)
            yield _result(ray, ready, task)
            idle.append(actor)
    finally:
        for actor in actors:
            ray.kill(actor)


def _result(ray: Any, ready: Any, task: Task) -> Made:
    try:
        made: Made = ray.get(ready)
        return made
    except ray.exceptions.RayError as error:
        last = str(error).strip().splitlines()[-1].strip()
        return Made(task, 0.0, failed=f"its actor died ({last}); run the same command again")
