"""`duplex reproduce`: the plan, the page of claims, and what an interrupted command leaves to do."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from benchmarks import claims
from duplex.config.params import parse_params, published_recipes, read_yaml
from duplex.project.plan import write_plan
from duplex.report.verdicts import VERDICTS
from tests.commands import Command, command
from tests.data.makers import OBJECTS, STATES, make_benchmark, make_standard
from tests.encoders import small
from tests.projects import SHIPPED, edited_params, interrupt
from tests.subprocesses import ROOT

pytestmark = pytest.mark.slow

__all__ = ["command"]


def shipped() -> dict[str, Any]:
    return dict(YAML(typ="safe").load((ROOT / "ablations/params.yaml").read_text()))


def lines_of(plan: Any) -> dict[str, str]:
    """The lines of a plan by their first words."""
    assert plan.code == 0, plan.err
    return {line.partition(" ")[0]: line for line in plan.out.splitlines()}


@pytest.fixture
def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose mit-states has the layout of the benchmark and a small encoder."""
    make_standard(tmp_path / "data/mit-states", "spaces")
    record = shipped()
    record["datasets"]["mit-states"]["encoder"] = {"name": "tiny", "pixels": True}
    for entry in record["methods"].values():
        for changes in entry.get("per_dataset", {}).values():
            changes["finetune"] = {"blocks": "all", "adapter": "bottleneck"}
    record["device"], record["extraction"]["num_workers"] = "cpu", 0
    (tmp_path / "ablations").mkdir()
    with (tmp_path / "ablations/params.yaml").open("w") as file:
        YAML().dump(record, file)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_plan_has_the_rows_of_the_tables_the_sizes_and_the_hours(benchmark: Path, command: Command):
    lines = lines_of(command("reproduce", "mit-states", "--dry-run", "--seeds", "0-1"))
    assert "64 images in ../data/mit-states" in lines["data"]
    parts = r"([\d.]+) MB of features \(([\d.]+) MB of them pixels\), ([\d.]+) MB of checkpoints, .* GB free"
    features, pixels, checkpoints = map(float, re.search(parts, lines["disk"]).groups())
    assert 0 < pixels <= features and checkpoints > 1
    assert "prepare (missing), extract (missing)" in lines["stages"]
    total, extraction, training = map(float, re.findall(r"[\d.e-]+(?=:| to)", lines["hours"]))
    assert extraction + training == pytest.approx(total, rel=0.5) and total < 24
    assert "of duplex_five, duplex_five_open, module_sp, " in lines["hours"] and "its weights" in lines["hours"]
    rows = lines["rows"].split(": ")[1].split(", ")
    assert {"duplex_five", "duplex_five_open", "module_vp", "update_batch", "lambda_99", "cge"} <= set(rows)
    assert "infer_ch in duplex_five" in lines["once"], "the same losses, fewer terms"
    assert not {"loss_ch", "fixed_visual", "troika", "all_pairs"} & set(rows), "of other data sets, or of no table"
    assert f"{2 * len(rows)} of {2 * len(rows)} runs" in lines["stages"]
    assert "not comparable: feasibility is by the encoder's text features" in lines["words"]
    assert "not" not in lines, "every row of the tables has an entry"
    assert not (benchmark / "ablations/artifacts").exists()


def test_the_main_rows_are_those_of_the_tables_of_comparison_as_published(benchmark: Path, command: Command):
    with edited_params(benchmark / "ablations/params.yaml") as record:
        for name in ("troika", "plid", "caila", "cluspro", "vp_cmjl", "dfsp_t2i"):  # with heads that do not fit
            del record["methods"][name]
    plan = command("reproduce", "mit-states", "--rows", "main", "--dry-run", "--seeds", "0")
    lines = lines_of(plan)
    assert lines["rows"].endswith(": clip, coop, csp, gipcol, cso, duplex_five, duplex_five_open")
    for reason in (
        "dfsp_i2t (no published settings for mit-states)",
        "dfsp_bif (no published settings)",
        "cds (no published learning_rate or batch_size)",
    ):
        assert reason in lines["not"]
    drop = lines["drop"].partition("then ")[2].split(", ")
    assert drop[0].startswith("cso ("), "no sentence of the paper compares it by itself"
    sizes = dict(re.findall(r"^ +(\w+) +\S+ +([\d.]+) MB", plan.out, re.M))
    assert float(sizes["clip"]) == 0 < float(sizes["cso"]) <= float(sizes["duplex_five"])


def test_the_plan_says_whether_open_numbers_can_be_compared(
    benchmark: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    def plan(text: str) -> Any:
        (benchmark / "words.txt").write_text(text)
        with edited_params(benchmark / "ablations/params.yaml") as record:
            record["evaluation"]["word_vectors"] = "../words.txt"
            record["methods"] = {name: entry for name, entry in shipped()["methods"].items() if name == "clip"}
            record["run"]["methods"] = ["clip"]
        monkeypatch.chdir(benchmark)
        return command("reproduce", "mit-states", "--rows", "main", "--dry-run", "--seeds", "0")

    words = [*STATES, *OBJECTS]
    known = "".join(f"{word} {'0.1 ' * 300}\n" for word in words)
    assert "as in CSP's code" in lines_of(plan(known))["words"]
    narrow = "".join(f"{word} {'0.1 ' * 50}\n" for word in words)
    assert "not comparable: word vectors have 50 numbers, not 300" in lines_of(plan(narrow))["words"]
    useless = plan("other 0.1 0.2\n")
    assert useless.code == 1 and "no vector for any word of 'green', 'hollow'" in useless.err


def test_rows_of_other_groups_are_refused(benchmark: Path, command: Command):
    assert command("reproduce", "mit-states", "--rows", "some").refused("group of rows 'some'")
    assert command("reproduce", "mit-states", "--rows", "main", "--methods", "csp").refused("leave --rows out")


@pytest.mark.slow
def test_encoders_of_the_paper_have_their_own_rows(benchmark: Path, command: Command, monkeypatch: pytest.MonkeyPatch):
    """Tab. 9, whose ResNet-18 gets words from a file; random weights are timed where there are none."""
    refused = command("reproduce", "mit-states-resnet18", "--dry-run", "--seeds", "0")
    assert refused.refused("needs word vectors: set evaluation.word_vectors")
    (benchmark / "words.txt").write_text(
        "".join(f"{word} 0.1 {place} 0.3\n" for place, word in enumerate(STATES + OBJECTS))
    )
    with edited_params(benchmark / "ablations/params.yaml") as record:
        record["evaluation"]["word_vectors"] = "../words.txt"
    monkeypatch.chdir(benchmark)
    lines = lines_of(command("reproduce", "mit-states-resnet18", "--dry-run", "--seeds", "0"))
    assert lines["rows"].endswith("2 × seeds 0: cge, cge_visual")
    assert "of cge, cge_visual on this device" in lines["hours"]
    assert "9.7 MB of features" in lines["disk"], "64 times 3 x 224 x 224 pixels"
    monkeypatch.chdir(benchmark)
    lines = lines_of(command("reproduce", "mit-states-blip", "--dry-run", "--seeds", "0"))
    assert lines["rows"].endswith("2 × seeds 0: duplex_five, module_sp")


def test_missing_images_and_rows_are_refused(benchmark: Path, command: Command, monkeypatch: pytest.MonkeyPatch):
    assert command("reproduce", "cgqa").refused("`duplex data download cgqa`")
    monkeypatch.chdir(benchmark)
    assert command("reproduce", "absent").refused("unknown data set 'absent'")
    for image in (benchmark / "data/mit-states/images").rglob("*.png"):
        image.unlink()
    monkeypatch.chdir(benchmark)
    assert command("reproduce", "mit-states").refused("`duplex data download mit-states`")
    monkeypatch.chdir(benchmark / "data")
    assert command("reproduce").refused("ablations/params.yaml, which lists the paper's table rows")


def test_too_little_space_is_refused_before_extraction(
    benchmark: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("duplex.project.reproduce.free_bytes", lambda path: 1000)
    refused = command("reproduce", "mit-states", "--seeds", "0")
    assert refused.code == 1 and "0.0 MB are free; make room" in refused.err
    assert not (benchmark / "ablations/artifacts").exists()


@pytest.fixture
def zappos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose ut-zappos has the layout of the benchmark and a small random CLIP, in which 12 heads fit."""
    make_standard(tmp_path / "data/ut-zappos", "archive")
    monkeypatch.setitem(small.ARCHITECTURE, "embed_dim", 24)
    encoder = small.write_folder(tmp_path / "clip")
    recipe = published_recipes()["troika"]["per_dataset"]["ut-zappos"]["training"]
    with edited_params(SHIPPED, tmp_path / "params.yaml") as record:
        record["device"], record["extraction"]["num_workers"], record["evaluation"]["bootstrap"] = "cpu", 0, 20
        entry = record["datasets"]["ut-zappos"]
        entry |= {"encoder": {"name": encoder}, "methods": {"troika": {"training": {**recipe, "epochs": 2}}}}
        entry["training"]["threads"] = 1
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_plan_of_published_recipes(zappos: Path, command: Command):
    plan = command("reproduce", "ut-zappos", "--methods", "csp,troika,cluspro", "--dry-run")
    lines = lines_of(plan)
    assert "counts are not the published ones of ut-zappos: no number will be compared" in lines["data"]
    assert re.search(r"0\.\d MB of features .* MB of checkpoints, .* to write, [\d.]+ GB free", lines["disk"])
    assert "prepare (missing), extract (missing), 15 of 15 runs" in lines["stages"]
    assert "learning_rate 0.0005, batch_size 64, epochs 20, weight_decay 1e-05, word_dropout 0.2" in lines["csp"]
    assert "epochs 2," in lines["troika"] and "finetune.blocks all, finetune.adapter parallel" in lines["troika"]
    assert "about" in lines["hours"] and "of csp, troika, cluspro on this device" in lines["hours"]
    assert lines["rows"].endswith("3 × seeds 0, 1, 2, 3, 4: csp, troika, cluspro") and "not run" not in plan.out
    untrained = lines_of(command("reproduce", "ut-zappos", "--methods", "clip", "--seeds", "0", "--dry-run"))
    assert "of clip on this device" in untrained["hours"]
    assert command("reproduce", "ut-zappos", "--methods", "cds", "--dry-run").refused("cds has no published")


def test_the_plan_says_which_authors_did_not_run_the_data_set(
    zappos: Path, command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    record = read_yaml(zappos / "params.yaml")
    methods = ["csp", "dfsp_t2i", "linear"]
    record |= {"run": {"datasets": ["ut-zappos"], "methods": methods, "seeds": [0], "recipes": "published"}}
    record["report"], record["extraction"]["tokens"] = {}, "patch"
    write_plan(parse_params(record, {}, zappos / "params.yaml"))
    said = capsys.readouterr().err
    assert "recipes: their authors did not run ut-zappos: dfsp_t2i (mit-states, cgqa)" in said
    assert "recipes: no published recipe, so with their own settings of params.yaml: linear\n" in said
    request = ("reproduce", "ut-zappos", "--methods", ",".join(methods), "--seeds", "0", "--dry-run")
    lines = lines_of(command(*request))
    stated = lines["authors"]
    assert "did not run ut-zappos: dfsp_t2i (mit-states, cgqa)" in stated and "csp" not in stated
    assert lines["own"].endswith("own settings of params.yaml: linear")
    with edited_params(zappos / "params.yaml") as record:
        record["run"]["published_only"] = True
    monkeypatch.chdir(zappos)
    refused = command(*request)
    assert refused.refused("dfsp_t2i has no published settings for ut-zappos")


@pytest.mark.slow
def test_two_epochs_of_troika_as_published(zappos: Path, command: Command, in_this_process: None):
    done = command("reproduce", "ut-zappos", "--methods", "troika", "--seeds", "0")
    assert done.code == 0, done.err
    run = zappos / "artifacts/published/ut-zappos/troika/0"
    assert len((run / "history.csv").read_text().splitlines()) == 4, "epoch 0 and two more"
    settings = json.loads((run / "train.stamp.json").read_text())
    assert settings["training"]["word_dropout"] == 0.3 and settings["finetune"]["adapter"] == "parallel"
    assert set(json.loads((run / "metrics.json").read_text())["closed"]["sampled"]) == {"seen", "unseen", "hm", "auc"}
    assert "troika" in (zappos / done.out.strip()).read_text()
    assert "0 of 1 runs" in command("reproduce", "ut-zappos", "--methods", "troika", "--seeds", "0", "--dry-run").out


@pytest.fixture
def clip_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the paper's rows as shipped, whose benchmarks have a small random CLIP, in which 12 heads fit."""
    monkeypatch.setitem(small.ARCHITECTURE, "embed_dim", 48)
    encoder = {"name": small.write_folder(tmp_path / "clip"), "pixels": True}
    (tmp_path / "ablations").mkdir()
    with edited_params(ROOT / "ablations/params.yaml", tmp_path / "ablations/params.yaml") as record:
        record["device"], record["extraction"]["num_workers"], record["evaluation"]["bootstrap"] = "cpu", 0, 20
        for name in ("mit-states", "ut-zappos", "cgqa"):
            record["datasets"][name]["encoder"] = encoder
            record["datasets"][name]["training"]["threads"] = 1
    monkeypatch.chdir(tmp_path)
    return tmp_path


MAIN = {
    "mit-states": (53_753, "clip, coop, csp, gipcol, dfsp_t2i, troika, plid, caila, cluspro, vp_cmjl"),
    "ut-zappos": (29_126, "clip, coop, csp, gipcol, dfsp_i2t, troika, plid, caila, cluspro, vp_cmjl"),
    "cgqa": (39_298, "clip, coop, csp, gipcol, dfsp_t2i, troika, plid, caila, cluspro, vp_cmjl"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MAIN)
def test_the_plan_of_a_benchmark_of_its_size(clip_rows: Path, command: Command, name: str):
    make_benchmark(clip_rows / "data" / name, name)
    plan = command("reproduce", name, "--rows", "main", "--dry-run", "--seeds", "0-4")
    lines = lines_of(plan)
    images, rows = MAIN[name]
    assert f"{images:,} images" in lines["data"] and "counts are not" not in lines["data"]
    assert lines["rows"] == f"rows     13 × seeds 0, 1, 2, 3, 4: {rows}, cso, duplex_five, duplex_five_open"
    assert "65 of 65 runs" in lines["stages"] and "MB of checkpoints" in lines["disk"]
    costs = {row: (hours, size) for row, hours, size in re.findall(r"^ +(\w+) +(\S+) +([\d.]+ [MG]B)", plan.out, re.M)}
    assert list(costs) == lines["rows"].partition(": ")[2].split(", ")
    assert all(float(hours.replace(",", "")) > 0 for hours, _ in costs.values())
    if name == "cgqa":  # all 278,362 pairs may be refined: 49 numbers of four bytes each, beside prompts and adapters
        megabytes = float(costs["duplex_five_open"][1].removesuffix(" MB"))
        assert 278_362 * 49 * 4 / 1e6 < megabytes < 58


LARGE = {"name": "ViT-L-14-quickgelu", "weights": "random:1", "pixels": True}


@pytest.mark.parametrize("size", ["small", pytest.param("large", marks=pytest.mark.long)])
def test_main_rows_of_a_random_encoder_end_to_end_killed_and_resumed(
    clip_rows: Path, command: Command, in_this_process: None, monkeypatch: pytest.MonkeyPatch, size: str
):
    make_standard(clip_rows / "data/ut-zappos", "archive")
    with edited_params(clip_rows / "ablations/params.yaml") as record:
        entry = record["datasets"]["ut-zappos"]
        entry["training"]["epochs"] = 2
        if size == "large":
            entry["encoder"] = LARGE
            entry["training"] |= {"batch_size": 2, "threads": 2}
        kept = ("clip", "cso", "duplex", "duplex_five", "duplex_five_open", "duplex_additive")
        record["methods"] = {name: record["methods"][name] for name in kept}
        record["run"]["methods"] = ["clip"]
    monkeypatch.chdir(clip_rows)
    with monkeypatch.context() as patch:
        interrupt(patch, 4)  # in the second epoch of the second run with epochs
        assert command("reproduce", "ut-zappos", "--rows", "main", "--seeds", "0").code == 130
    folder = clip_rows / "ablations/artifacts/ut-zappos"
    assert len(list(folder.glob("*/0/metrics.json"))) == 1
    monkeypatch.chdir(clip_rows)
    done = command("reproduce", "ut-zappos", "--rows", "main", "--seeds", "0")
    assert done.code == 0, done.err
    assert "continuing after epoch 1" in done.err
    assert "3 of 4 runs to train or evaluate" in done.err
    assert "4 runs: 1 complete, 3 trained and evaluated" in done.err
    page = (clip_rows / done.out.strip()).read_text()
    beside = clip_rows / done.out.strip().removesuffix("index.html")
    assert list((beside / "plots/figures").glob("*.svg")) and json.loads((beside / "summary.json").read_text())
    assert "cso" in (beside / "runs.csv").read_text()
    assert not (folder.parent / "summary.json").exists(), "that of `make ablations` is not touched"
    monkeypatch.chdir(clip_rows / "ablations")
    judged = claims.judged("ut-zappos")
    assert {each["verdict"] for each in judged} <= set(VERDICTS) and {each["source"] for each in judged} >= {"Fig. 7"}
    assert "Claims of the paper" in page and "not comparable" in page
    closed = json.loads((folder / "duplex_five/0/metrics.json").read_text())["closed"]
    assert set(closed["sampled"]) == {"seen", "unseen", "hm", "auc"}
    monkeypatch.chdir(clip_rows)
    again = command("reproduce", "ut-zappos", "--rows", "main", "--seeds", "0", "--dry-run")
    assert "0 of 4 runs" in again.out and "hours    none\n" in again.out
    stamp = json.loads((folder / "duplex_five/0/train.stamp.json").read_text())
    assert stamp["finetune"]["blocks"] == "all" and stamp["options"]["reading"] == "literal"
    whole = {path.parent.parent.name: path.read_bytes() for path in folder.glob("*/0/checkpoint.safetensors")}
    assert set(whole) == {"clip", "cso", "duplex_five", "duplex_five_open"}
    for path in folder.glob("duplex_five/0/*"):
        path.unlink()
    monkeypatch.chdir(clip_rows)
    assert command("reproduce", "ut-zappos", "--rows", "main", "--seeds", "0").code == 0
    assert (folder / "duplex_five/0/checkpoint.safetensors").read_bytes() == whole["duplex_five"]
