"""The study of fine-tuned blocks: its cells, tuning, and several processes in one folder."""

from __future__ import annotations

import multiprocessing
from functools import cache
from pathlib import Path

import pytest

from benchmarks import depth_study
from benchmarks.depth_study import ADAPTERS, FROZEN, METHODS, Cell, Study, cells, claim, markdown, table, work
from duplex.config.params import load_params
from tests.projects import draw_project
from tests.subprocesses import ROOT

STUDY = Study("shapes", Path("nowhere"), (3e-4, 1e-3), (100, 101), (0, 1), None, None, ROOT / "params.yaml")


@pytest.fixture(autouse=True)
def params_read_once(monkeypatch) -> None:
    monkeypatch.setattr(depth_study, "load_params", cache(load_params))


def test_every_cell_has_valid_options() -> None:
    every = cells(list(METHODS), [0, 1, 4], list(ADAPTERS), [])
    assert len({cell.name for cell in every}) == len(every) == len(METHODS) * (1 + 2 * len(ADAPTERS))
    for cell in every:
        params = STUDY.bench(cell).params
        params.method(cell.name, "shapes")
        tail = params.finetune(cell.name, "shapes")
        assert (tail is None) if cell.depth == 0 else (tail.blocks, tail.adapter) == (cell.depth, cell.adapter)
        assert params.entry(cell.name).worlds == ("closed", "open")


def test_the_closed_form_trains_only_with_finetuned_blocks() -> None:
    frozen, moved = (Cell("closed_form", depth, "full") for depth in (0, 2))
    assert STUDY.bench(frozen).params.method(frozen.name).losses == ()
    asked = STUDY.bench(moved).params.method(moved.name)
    assert asked.losses and dict(zip(asked.inference, asked.weights, strict=True)) == {
        "semantic": 0,
        "factors": 0,
        "gaussian": 1,
    }


def test_patterns_select_cells() -> None:
    names = [cell.name for cell in cells(["cso", "duplex"], [0, 2], ["bottleneck", "lora"], ["cso_*", "*_lora_2"])]
    assert names == ["cso_0", "cso_bottleneck_2", "cso_lora_2", "duplex_lora_2"]


def test_the_tuned_rate_is_that_of_finetune_if_there_is_one() -> None:
    flat, deep = Cell("cso", 0, "feature"), Cell("cso", 2, "lora")
    usual = load_params(ROOT / "params.yaml").training("shapes", "cso").learning_rate
    at = STUDY.bench(flat).at("cso_0", 0.25)
    assert at.training("shapes", "cso_0").learning_rate == 0.25 and at.finetune("cso_0") is None
    at = STUDY.bench(deep).at("cso_lora_2", 0.25)
    assert at.training("shapes", "cso_lora_2").learning_rate == usual
    assert at.finetune("cso_lora_2", "shapes").learning_rate == 0.25


def held(path: Path, taken, done) -> None:
    with claim(path) as mine:
        assert mine
        taken.set()
        done.wait(60)


def test_only_one_process_claims_a_cell_until_it_ends(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    taken, done = context.Event(), context.Event()
    other = context.Process(target=held, args=(tmp_path / "cell.lock", taken, done))
    other.start()
    try:
        assert taken.wait(60)
        with claim(tmp_path / "cell.lock") as mine:
            assert not mine
    finally:
        other.kill()
        other.join()
    with claim(tmp_path / "cell.lock") as mine:
        assert mine


@pytest.mark.slow
def test_a_small_study_from_images_to_the_table(tmp_path: Path) -> None:
    """Runs of one epoch; the second time nothing is trained, and missing cells are listed."""
    draw_project(tmp_path, scale=0.05, epochs=1)
    study = Study("own", tmp_path / "study", (1e-3,), (100,), (0,), "cso", None, tmp_path / "params.yaml")
    wanted = cells(["cso", "closed_form"], [0, 1], ["full"], [])
    work(study, wanted)
    before = {path: path.stat().st_mtime_ns for path in (study.folder / "runs").rglob("checkpoint.safetensors")}
    work(study, wanted)
    assert before == {path: path.stat().st_mtime_ns for path in (study.folder / "runs").rglob("checkpoint.safetensors")}
    found = table(study, [*wanted, Cell("static", 1, "full")])
    assert list(found["rows"]) == [cell.name for cell in wanted] and found["missing"] == ["static_full_1"]
    flat, deep = found["rows"]["cso_0"], found["rows"]["cso_full_1"]
    assert flat["cache_bytes"] < deep["cache_bytes"] and flat["parameters"] < deep["parameters"]
    assert "gain" not in flat and deep["gain"].keys() == {"closed", "open"}
    gained = deep["closed"]["auc"] - flat["closed"]["auc"]
    assert deep["gain"]["closed"]["auc"] == pytest.approx(gained)
    lines = markdown(found).splitlines()
    assert len({line.count("|") for line in lines[:6]}) == 1 and lines[-1] == "Not finished: static_full_1"
    assert FROZEN.keys() == {"closed_form"} and found["rows"]["closed_form_0"]["parameters"] == 0
