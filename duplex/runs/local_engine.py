"""Execute runs in worker processes on this machine. A process that dies fails its current run only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial

from duplex.runs.run_tasks import RunExecutor, RunResult, RunTask
from duplex.system.process_pool import BrokenProcessPool, WorkerProcess


def run_in_processes(
    tasks: Sequence[RunTask], executor: RunExecutor, jobs: int, gpus: Sequence[str]
) -> Iterator[RunResult]:
    """Execute `tasks` in `jobs` processes, each with the next of `gpus`; yield results as they are ready."""
    create = partial(getattr, executor, "execute")
    workers = [WorkerProcess(create, environment_of(n, gpus)) for n in range(min(jobs, len(tasks)))]
    waiting, idle = deque(tasks), list(workers)
    busy: dict[Future[RunResult], tuple[WorkerProcess, RunTask]] = {}
    try:
        while waiting or busy:
            while waiting and idle:
                worker, task = idle.pop(), waiting.popleft()
                busy[worker.submit(task)] = worker, task
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                worker, task = busy.pop(future)
                try:
                    yield future.result()
                except BrokenProcessPool:
                    reason = f"its process {worker.describe_end()}, perhaps out of memory; try fewer --jobs"
                    yield RunResult(task, 0.0, error=reason)
                idle.append(worker)
    finally:
        for worker in workers:
            worker.kill()  # files are replaced whole, so a process may be killed at any moment


def environment_of(n: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment of process `n`: its GPU, and waiting OpenMP threads that sleep."""
    gpu = {"CUDA_VISIBLE_DEVICES": gpus[n % len(gpus)]} if gpus else {}
    return {"OMP_WAIT_POLICY": "passive", **gpu}
