"""The rehearsal of `make gpu` on a CPU: every part runs, and what it finds becomes a page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_holds import streams
from benchmarks.gpu_times import Look
from duplex.features.tokens import Streamed
from tests.subprocesses import ENVIRONMENT, ROOT


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_a_rehearsal_runs_every_part(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--quick", "--out", str(tmp_path / "page.md"))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text()
    assert "**Everything held.**" in page
    assert "A rehearsal" in page
    for name in gpu.TIMES:
        assert f"## {name.capitalize()}" in page
    assert all(f"| ut-zappos, {precision} |" in page for precision in ("fp32", "tf32", "bf16"))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_changes_nothing() -> None:
    before = gpu.PAGE.read_bytes()
    done = run()
    assert (done.returncode, done.stdout) == (0, "")
    assert "torch sees no GPU" in done.stderr
    assert gpu.PAGE.read_bytes() == before


@pytest.mark.slow
def test_a_rehearsal_never_writes_the_real_page() -> None:
    for words in (["--device", "cpu"], ["--device", "cpu", "--quick"]):
        done = run(*words)
        assert done.returncode == 2
        assert "--out" in done.stderr


def test_what_breaks_or_does_not_hold_is_said_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(look: Look, folder: Path) -> None:
        raise ValueError("no such kernel\nand more")

    parts = {
        "holds": lambda look, folder: {"held": {"water": False, "air": True}, "read": {"depth": 0.5}},
        "text": breaks,
        "graph": lambda look, folder: {"batch 8": {"ms": 1234.4, "dense, ms": None}},
    }
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu, "make_deterministic", lambda: None)
    record = gpu.measure(Look("cpu", True))
    assert gpu.failures(record) == ["text broke off: ValueError: no such kernel", "water does not hold"]
    page = gpu.page(record)
    assert "| batch 8 | 1,234 |  |" in page
    assert "| water | **does not hold** |" in page
    assert "Left out, for lack of time: holds, text, graph." in gpu.page(gpu.measure(Look("cpu", True), limit=-1))


def test_tokens_that_arrive_otherwise_do_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert streams(Look("cpu", True), tmp_path / "one.h5")
    read = Streamed.__getitem__
    monkeypatch.setattr(Streamed, "__getitem__", lambda self, key: read(self, key).roll(1, 0))
    assert not streams(Look("cpu", True), tmp_path / "other.h5")
