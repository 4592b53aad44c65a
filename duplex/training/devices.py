"""Train one run on several devices of this machine, one process each (`training.devices`).

    in_team(work, 4, "cuda")        # calls work(Team(rank, 4)) in four processes; returns what the first one returned

Processes talk through torch.distributed: by NCCL between GPUs, by Gloo otherwise. If one fails or dies, all are ended;
they write what a single process writes, so a killed run continues as usual.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import nullcontext, redirect_stderr
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from duplex.errors import DuplexError, UsageError
from duplex.methods.base import Method
from duplex.methods.blocks import FinetunedBlocks
from duplex.methods.prompts import Prompts
from duplex.methods.team import ALONE, Team
from duplex.options import TrainingOptions
from duplex.system.processes import BrokenProcessPool, WorkerProcess
from duplex.system.threads import cpu_cores
from duplex.training.checkpoint import tensor_digest

WAITS = timedelta(days=7)  # for others in a step; the first process validates meanwhile
SETTLED = 2.0  # seconds in which the processes notice that one has died
Result = TypeVar("Result")


def divide(method: Method[Any], settings: TrainingOptions, team: Team) -> None:
    """Tell a method's encoders which part of images and prompts is theirs; UsageError if there is nothing to divide."""
    asked = f"training.devices is {settings.devices}"
    if settings.devices != team.size:
        reason = "only `duplex train` and `dvc repro` train one run on several devices"
        raise UsageError(f"{asked}, but {reason}; set it to 1")
    parts: list[Prompts | FinetunedBlocks] = []
    for part in method.modules():
        if isinstance(part, FinetunedBlocks) or (isinstance(part, Prompts) and part.is_divisible):
            parts.append(part)
    if team != ALONE and not (method.groups() and parts):
        lack = f"{method.class_name} trains neither blocks of the image tower (`finetune`) nor prompts"
        raise UsageError(f"{asked}, but {lack}, whose encoding devices divide; set it to 1")
    for each in parts:
        each.team = team


def require_equal(method: Method[Any], team: Team) -> None:
    """Raise `DuplexError` unless all processes of a team have the same tensors and random numbers."""
    if team == ALONE:
        return
    held = {name: tensor.cpu() for name, tensor in method.state_dict().items()}
    held["random"] = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else torch.get_rng_state()
    digests: list[Any] = [None] * team.size
    distributed.all_gather_object(digests, tensor_digest(held))
    if len(set(digests)) > 1:
        raise DuplexError(
            f"the {team.size} processes that train {method.class_name} together no longer hold the same numbers, "
            "perhaps because its code draws random numbers for each image; set training.devices to 1"
        )


def require_devices(count: int, device: str) -> None:
    """Raise `UsageError` unless this machine has `count` equal GPUs or, for the device "cpu", as many cores."""
    asked = f"training.devices is {count}"
    if device not in ("cpu", "cuda"):
        raise UsageError(f"{asked}, but device is {device}; set device to auto, cuda or cpu, or training.devices to 1")
    if device == "cpu":
        cores = cpu_cores()
        if cores < count:
            raise UsageError(f"{asked}, but this process may use {cores} CPU cores; lower it")
        return
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    if len(names) < count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        limit = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible})"
        advice = "lower it, or use `duplex train` (a sweep shows each run one GPU)"
        raise UsageError(f"{asked}, but torch sees {len(names)} GPU(s){limit}; {advice}")
    if len(set(names[:count])) > 1:
        kinds = " and ".join(sorted(set(names[:count])))
        raise UsageError(f"{asked}, but GPUs of one kind are needed, and there are {kinds}; set it to 1")


def in_team(work: Callable[[Team], Result], count: int, device: str) -> Result:
    """Call `work` in `count` processes, each on its own device of the kind `device`; returns the first one's result."""
    require_devices(count, device)
    threads = max(1, torch.get_num_threads() // count)
    with tempfile.TemporaryDirectory(prefix="duplex-") as folder:
        create = partial(partial, _work_in_team, work, Path(folder) / "store", device, threads)
        workers = [WorkerProcess(create) for _ in range(count)]
        try:
            futures = [worker.submit(Team(rank, count)) for rank, worker in enumerate(workers)]
            if wait(futures, return_when=FIRST_EXCEPTION).not_done:
                wait(futures, timeout=SETTLED)
            _raise_cause(futures, workers)
            result: Result = futures[0].result()
            return result
        finally:
            for worker in workers:
                worker.kill()


def _work_in_team(work: Callable[[Team], Result], store: Path, device: str, threads: int, team: Team) -> Result:
    torch.set_num_threads(threads)
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(team.rank)
        backend = "cpu:gloo,cuda:nccl"
    met = store.as_uri()  # the processes find each other by this file
    distributed.init_process_group(backend, met, WAITS, world_size=team.size, rank=team.rank)
    with redirect_stderr(io.StringIO()) if team.rank else nullcontext():  # all would say the same
        return work(team)


def _raise_cause(futures: Sequence[Future[Any]], workers: Sequence[WorkerProcess]) -> None:
    """Raise why a process failed: a death or an error of ours before what others met because of it."""
    errors = [future.exception() for future in futures if future.done()]
    for future, worker in zip(futures, workers, strict=True):
        if future.done() and isinstance(future.exception(), BrokenProcessPool):
            ended = f"a process of training.devices ({len(workers)}) {worker.describe_end()}"
            raise DuplexError(f"{ended}, perhaps out of memory; run the same command again to continue")
    for kind in (DuplexError, BaseException):
        for error in errors:
            if isinstance(error, kind):
                raise error
