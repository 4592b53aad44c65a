"""Shards on a Ray cluster of this machine, with an actor that is killed."""

import fcntl
import os
import signal
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from duplex.config.params import EncoderParams
from duplex.encoders.base import load_encoder
from duplex.features.extract import ExtractionSettings, extract
from duplex.features.file import PENDING, PartialCache, partial_path
from duplex.features.shards import join_shards, shard_path
from duplex.project.ray import extract_on_ray
from tests.encoders.small import write_folder
from tests.features.pictures import write_pictures

pytestmark = pytest.mark.long
ray = pytest.importorskip("ray")


@pytest.fixture
def cluster():
    environment = {
        "env_vars": {"PYTHONPATH": os.pathsep.join(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep))}
    }
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


def lock_holder(lock: Path) -> int:
    """Number of the process that holds a record lock on the file, by the fields of `struct flock`."""
    with lock.open("r+b") as file:
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_, holder = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, asked))
    assert kind != fcntl.F_UNLCK
    return holder


def kill_once(out: Path, killed: list[int]) -> None:
    """Kill the process that holds the shard's lock, once some of its rows are done."""
    lock, deadline = out.with_name(out.name + ".lock.partial"), time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            cache = PartialCache(out)
            cache.close()
            if 0 < (cache.statuses != PENDING).sum() < len(cache.statuses):
                killed.append(lock_holder(lock))
                os.kill(killed[0], signal.SIGKILL)
                return
        except (OSError, KeyError, ValueError):
            pass
        time.sleep(0.005)


def test_a_killed_actor_is_replaced_and_the_file_is_the_same(cluster, tmp_path: Path) -> None:
    name = write_folder(tmp_path / "encoder")
    encoder = load_encoder(name, towers="image")
    names = write_pictures(tmp_path / "pictures", 2400, size=(300, 200))
    whole, out = tmp_path / "whole.h5", tmp_path / "ray" / "features.h5"
    settings = ExtractionSettings(tmp_path / "pictures", "m" * 64, batch_size=16, num_workers=1)
    extract(names, whole, encoder, replace(settings, num_workers=0))
    killed: list[int] = []
    killer = threading.Thread(target=kill_once, args=(shard_path(out, 0, 2), killed))
    killer.start()
    entry = EncoderParams(name=name)
    reports = extract_on_ray(names, out, entry, settings, shards=2, device="cpu")
    killer.join()
    assert killed, "no actor was killed"
    assert sum(report.rows for report in reports) == 2400 and reports[0].resumed > 0
    join_shards(out)
    assert out.read_bytes() == whole.read_bytes()
    again = extract_on_ray(names, out, entry, settings, shards=2, device="cpu")
    assert [report.resumed for report in again] == [report.rows for report in reports]
    assert not partial_path(shard_path(out, 0, 2)).exists()
