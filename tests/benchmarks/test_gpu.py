"""A quick trial of `make gpu` on a CPU: every part runs, and a page is written."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import bare, gpu, paper
from benchmarks.gpu_holds import TESTS, streams
from benchmarks.gpu_times import Look, compiled, hours
from duplex.config.params import load_params
from duplex.features.tokens import DiskTokens
from duplex.training.run import MethodSpec
from tests.subprocesses import ENVIRONMENT, ROOT


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_a_trial_runs_every_part(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--quick", "--out", str(tmp_path / "page.md"))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text()
    assert "**All checks passed.**" in page
    assert "A quick trial" in page
    for name in gpu.TIMES:
        assert f"**{name.capitalize()}**: " in page
    assert [line.split('"')[1] for line in (tmp_path / "results/gpu_text.csv").read_text().splitlines()[1:]] == [
        f"ut-zappos, {p}" for p in ("fp32", "tf32", "bf16")
    ]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_run_or_written() -> None:
    before = gpu.PAGE.read_bytes()
    done = run()
    assert (done.returncode, done.stdout) == (0, "")
    assert "torch finds no GPU" in done.stderr
    assert gpu.PAGE.read_bytes() == before


def test_the_device_tests_exist() -> None:
    assert [name for name in TESTS if not (ROOT / name).is_file()] == []


def test_wrong_tokens_on_the_device_fail_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert streams(Look("cpu", True), tmp_path / "one.h5")
    read = DiskTokens.__getitem__
    monkeypatch.setattr(DiskTokens, "__getitem__", lambda self, key: read(self, key).roll(1, 0))
    assert not streams(Look("cpu", True), tmp_path / "other.h5")


def test_hours_are_those_of_all_steps_of_the_rows_that_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params, found = load_params(ROOT / "params.yaml"), []

    def timed(rows: list[MethodSpec], tower: paper.Tower, batch: int, *_: object) -> dict[str, float]:
        found.append((len(tower.labels.pairs["train"]), batch))
        assert [(spec.options, spec.finetune) for spec in rows] == [
            (params.method(name, "cgqa"), params.finetune(name, "cgqa")) for name in bare.ROWS
        ]
        return {"cso": 1.0, "duplex_five": 2.0}

    tower = paper.Tower(None, None, paper.labels_of_size("ut-zappos"))
    monkeypatch.setattr(paper.Tower, "of", lambda *_: tower)
    monkeypatch.setattr(bare, "measure_steps", timed)
    table = hours(Look("cuda", False), tmp_path)
    assert list(table) == ["ut-zappos", "mit-states", "cgqa"] and found == [(83, 64), (1262, 64), (5592, 32)]
    row = table["ut-zappos"]
    assert (row["steps"], row["epochs"], row["duplex_five, h"], row["seeds"]) == (360, 20, 4, 5)
    steps = {16: 1438, 32: 719, 64: 360, 128: 180 * 2}  # of an epoch by the batch; one of 128 images counts as two
    published = {"coop": (20, 64), "csp": (20, 64), "gipcol": (10, 64), "dfsp_i2t": (20, 128), "troika": (15, 128)}
    published |= {"plid": (25, 128), "caila": (21, 32), "cluspro": (15, 32), "vp_cmjl": (20, 16)}
    seconds = [epochs * steps[batch] for epochs, batch in published.values()]
    assert row["rows"] == len(published) + 3
    assert row["one seed, h"] == pytest.approx((sum(seconds) + (1 + 2 + 2) * 20 * 360) / 3600)


@pytest.mark.long
def test_a_compiled_step_is_timed_beside_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler that returns its function; where compiling fails, the time is left out."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    [(name, row)] = compiled(Look("cpu", True), tmp_path).items()
    assert name == "duplex_paper, bf16"
    assert row["ratio"] == row["compiled, ms"] / row["step, ms"] and row["compiling, s"] > 0
    monkeypatch.setattr(torch, "compile", lambda function, **_: None)
    [row] = compiled(Look("cpu", True), tmp_path).values()
    assert row["compiled, ms"] is row["ratio"] is None and row["step, ms"] > 0
