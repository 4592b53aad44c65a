"""`duplex data ...` as a person runs it: in a project's folder, on pictures of their own."""

from __future__ import annotations

import dataclasses
import difflib
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from duplex.cli import main
from duplex.cli.params_file import add_dataset
from duplex.config.params import load_params
from duplex.data.mirrors import BENCHMARKS
from duplex.errors import DuplexError, UsageError
from tests.data.makers import make_folder, make_standard, make_table, rows, write_lists
from tests.data.web import serving

PROJECT = Path(__file__).parents[2]
ENTRY = {
    "source": {"kind": "folder", "root": "/data/my pictures: best"},
    "encoder": {"name": "tiny"},
    "training": {"learning_rate": 0.0001, "batch_size": 64, "epochs": 15},
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "params.yaml").write_text((PROJECT / "params.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("duplex.encoders.hub.answers", lambda address: True)  # a network
    return tmp_path


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def duplex(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit status, stdout and stderr of a command."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["duplex", "data", *words])
        with pytest.raises(SystemExit) as left:
            main()
        return int(left.value.code or 0), *capsys.readouterr()

    return run


def test_the_real_program_runs_without_a_terminal(project: Path) -> None:
    make_folder(project / "mine", "nested")
    program = f"import sys; sys.path.insert(0, {str(PROJECT)!r}); from duplex.cli import main; main()"
    words = ["data", "stats", "mine", "--root", "mine", "--json"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["states"] == 4


def changed_lines(before: str, after: str) -> tuple[list[str], list[str]]:
    diff = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    return [line[2:] for line in diff if line.startswith("- ")], [line[2:] for line in diff if line.startswith("+ ")]


@pytest.mark.parametrize("layout", ["folder", "table"])
def test_add_writes_what_params_needs_and_touches_nothing_else(project: Path, duplex: Run, layout: str) -> None:
    before = (project / "params.yaml").read_text()
    if layout == "folder":
        make_folder(project / "my pictures", "nested")
        path = project / "my pictures"
    else:
        path = make_table(project / "my pictures", ".parquet", split=True)
    made = ["--split-seed", "5"] if layout == "folder" else []
    status, out, err = duplex("add", "mine", str(path), *made, "--encoder", "tiny")
    assert (status, err) == (0, "params.yaml has mine; `dvc repro` runs it\n")
    assert "nothing to report" in out and "images in" in out
    params = load_params()
    assert params.run.datasets == ("shapes", "mine")
    source = params.datasets["mine"].source
    assert (source.kind, source.root) == (layout, project / "my pictures")
    assert source.split.seed == (5 if layout == "folder" else 0)
    removed, added = changed_lines(before, (project / "params.yaml").read_text())
    assert len(removed) == 1 and "datasets: [" in removed[0] and len(added) == 6
    assert duplex("stats", "mine", "--json")[0] == 0


def test_add_again_changes_the_source_alone(project: Path, duplex: Run) -> None:
    make_standard(project / "elsewhere", "spaces")
    before = (project / "params.yaml").read_text()
    status, out, _ = duplex("add", "mit-states", "elsewhere", "--no-run")
    assert status == 0 and "train images: 24, published 30,338" in out
    removed, added = changed_lines(before, (project / "params.yaml").read_text())
    assert [line.strip() for line in removed] == ["source: {kind: standard, root: data/mit-states}"]
    assert [line.strip() for line in added] == [f"source: {{kind: standard, root: {project / 'elsewhere'}}}"]
    assert (
        load_params().datasets["mit-states"].training
        == load_params(PROJECT / "params.yaml").datasets["mit-states"].training
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mine/table.csv", "--val-unseen", "0.4"], "comes with its split"),
        (["mine/table.csv", "--split-seed", "9"], "comes with its split"),
        (["pictures", "--images", "mine"], "is no table; leave it out"),
    ],
)
def test_options_that_would_do_nothing_are_refused(project: Path, duplex: Run, words: list[str], says: str) -> None:
    table = make_table(project / "mine", ".csv", split=True)
    table.rename(table.with_name("table.csv"))
    make_folder(project / "pictures", "nested")
    before = (project / "params.yaml").read_text()
    status, _, err = duplex("add", "own", *words, "--encoder", "tiny")
    assert status == 2 and says in err and (project / "params.yaml").read_text() == before


def test_a_file_keeps_its_line_ends(project: Path, duplex: Run) -> None:
    lines = (project / "params.yaml").read_bytes()
    (project / "params.yaml").write_bytes(lines.replace(b"\n", b"\r\n"))
    make_folder(project / "mine", "nested")
    assert duplex("add", "mine", "mine", "--encoder", "tiny")[0] == 0
    written = (project / "params.yaml").read_bytes()
    assert b"mine:" in written and written.count(b"\n") == written.count(b"\r\n") > lines.count(b"\n")


def test_split_adds_data_sets_that_load_and_touches_nothing_else(project: Path, duplex: Run) -> None:
    path = make_table(project / "mine", ".csv", split=True)
    duplex("add", "mine", str(path), "--encoder", "tiny", "--no-run")
    before = (project / "params.yaml").read_text()
    status, out, err = duplex("split", "mine", "--splits", "2")
    assert (status, out) == (0, "")
    assert [line.split(":")[0] for line in err.splitlines()] == ["mine-split1", "mine-split2"]
    assert all("12 seen pairs, 2 unseen in validation and 2 in test" in line for line in err.splitlines())
    params = load_params()
    assert params.run.datasets == ("shapes", "mine-split1", "mine-split2")
    base, second = params.dataset("mine"), params.dataset("mine-split2")
    assert second.model_copy(update={"source": base.source}) == base, "the encoder and the training are the same"
    assert second.source == base.source.model_copy(update={"resplit": 2})
    removed, added = changed_lines(before, (project / "params.yaml").read_text())
    assert len(removed) == 1 and "datasets: [" in removed[0] and len([line for line in added if line]) == 9
    assert json.loads(duplex("stats", "mine-split1", "--json")[1])["test"]["unseen"] == 2
    again = (project / "params.yaml").read_text()
    assert duplex("split", "mine", "--splits", "2")[0] == 0 and (project / "params.yaml").read_text() == again


def test_splits_are_split_again_where_a_plain_number_stands(project: Path, duplex: Run) -> None:
    text = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(text.replace("  shapes:\n", "  shapes:\n    views: 2\n    flip: true\n", 1))
    for count in ("1", "2"):
        assert duplex("split", "shapes", "--splits", count, "--no-run")[0] == 0
    assert [load_params().dataset(f"shapes-split{number}").views for number in (1, 2)] == [2, 2]


def test_split_keeps_what_the_data_set_says_of_its_pictures_and_training(project: Path, duplex: Run) -> None:
    text = (project / "params.yaml").read_text()
    text = text.replace("seed: 7}", "seed: 8}").replace("epochs: 12, ", "epochs: 12, schedule: cosine, ", 1)
    text = text.replace("{kind: prompts}", "{kind: prompts, on: {shapes: {context: fixed}}}", 1)
    (project / "params.yaml").write_text(text)
    status, _, err = duplex("split", "shapes", "--splits", "1", "--no-run")
    assert status == 0 and "fixed_plain: what `on: shapes` says is not of its splits" in err
    params = load_params()
    assert params.run.datasets == ("shapes",)
    split = params.dataset("shapes-split1")
    assert (split.source.seed, split.source.resplit, split.training.schedule) == (8, 1, "cosine")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["split", "none"], "unknown data set 'none'"),
        (["split", "cgqa"], "the data root data/cgqa is not a folder"),
        (["split", "shapes-split1"], "is a split itself"),
    ],
)
def test_what_cannot_be_split_is_one_line_and_changes_nothing(
    project: Path, duplex: Run, words: list[str], says: str
) -> None:
    duplex("split", "shapes", "--splits", "1", "--no-run")
    before = (project / "params.yaml").read_text()
    status, _, err = duplex(*words)
    assert status == 2 and says in err and err.count("\n") == 1
    assert (project / "params.yaml").read_text() == before


def test_json_statistics_have_the_promised_keys_also_for_unknown_folders(project: Path, duplex: Run) -> None:
    make_standard(project / "data set", "archive")
    status, out, _ = duplex("stats", "whatever", "--root", "data set", "--json")
    record = json.loads(out)
    assert status == 0 and list(record) == ["states", "objects", "train", "val", "test", "shares"]
    assert record["train"] == {"seen": 12, "images": 24}
    assert record["test"] == {"seen": 12, "unseen": 2, "images": 20}
    assert sum(record["shares"].values()) == pytest.approx(1)


def test_pair_lists_alone_are_counted_and_checked(project: Path, duplex: Run) -> None:
    write_lists(project / "lists", rows())
    status, out, _ = duplex("stats", "cgqa", "--root", "lists", "--json")
    assert status == 0 and json.loads(out)["val"] == {"seen": 12, "unseen": 2, "images": None}
    status, out, err = duplex("check", "cgqa", "--root", "lists")
    assert status == 1 and "states: 4, published 413" in out and "only the pair lists" in err


def test_check_exits_with_1_on_a_problem_and_names_it(project: Path, duplex: Run) -> None:
    make_folder(project / "mine", "flat")
    assert duplex("check", "mine", "--root", "mine")[:2] == (0, "mine: nothing to report\n")
    (project / "mine/red circle/0001.png").write_bytes(b"")
    status, out, _ = duplex("check", "mine", "--root", "mine", "--json")
    assert status == 1
    assert json.loads(out)["findings"][0]["examples"] == ["red circle/0001.png (0 bytes)"]


def test_list_says_what_is_there(project: Path, duplex: Run) -> None:
    status, out, _ = duplex("list", "--json")
    assert status == 0
    assert {row["name"]: row["there"] for row in json.loads(out)}["cgqa"] is False
    assert "duplex data download cgqa" in duplex("list")[1]


def test_a_table_alone_is_no_data_set(project: Path, duplex: Run) -> None:
    before = {row["name"]: row["there"] for row in json.loads(duplex("list", "--json")[1])}
    (project / "table.csv").write_text("image,state,object\n")
    source = "source: {kind: table, root: nowhere, table: table.csv}"
    entry = (
        f"  absent: {{{source}, encoder: {{name: tiny}}, training: {{learning_rate: 0.1, batch_size: 2, epochs: 1}}}}\n"
    )
    text = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(text.replace("\ndatasets:\n", "\ndatasets:\n" + entry))
    found = {row["name"]: row["there"] for row in json.loads(duplex("list", "--json")[1])}
    assert found == {**before, "absent": False}


def test_download_goes_on_where_a_killed_one_stopped_and_the_result_loads(
    project: Path, duplex: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_standard(project / "published", "flat")
    bundle = Path(shutil.make_archive(str(project / "cgqa"), "zip", project / "published")).read_bytes()
    with serving() as server:
        server.files["/cgqa.zip"] = bundle
        server.cut = len(bundle) // 3
        benchmark = BENCHMARKS["cgqa"]
        archive = dataclasses.replace(benchmark.archives[0], urls=(server.url("/gone.zip"), server.url("/cgqa.zip")))
        monkeypatch.setitem(BENCHMARKS, "cgqa", dataclasses.replace(benchmark, archives=(archive,)))
        status, out, err = duplex("download", "cgqa")
        assert (status, out) == (0, "") and "CC BY 4.0" in err and "CVPR 2021" in err and "404" in err
        assert len(server.asked) >= 4 and server.asked[-1] is not None
    assert duplex("stats", "cgqa", "--json")[1] == duplex("stats", "cgqa", "--root", "published", "--json")[1]
    assert sorted(path.name for path in (project / "data/cgqa").iterdir()) == sorted(
        [".archives", *(path.name for path in (project / "published").iterdir())]
    )


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["stats", "nope"], 2, "no data set 'nope'"),
        (["stats", "cgqa"], 2, "not a folder"),
        (["add", "bad name", "."], 2, "no name for a data set"),
        (["add", "x", "nowhere"], 2, "neither a folder nor a table"),
        (["add", "x", ".", "--val-unseen", "0.9"], 2, "together below 1"),
        (["add", "x", "."], 1, "holds no pictures"),
        (["download", "imagenet"], 2, "unknown benchmark"),
    ],
)
def test_mistakes_are_one_line(project: Path, duplex: Run, words: list[str], status: int, says: str) -> None:
    before = (project / "params.yaml").read_text()
    code, out, err = duplex(*words)
    assert (code, out) == (status, "") and says in err and err.count("\n") == 1
    assert (project / "params.yaml").read_text() == before


BLOCK_ENTRY = """\
datasets:
    # first
    shapes:
        source:
            kind: shapes # drawn
            root: data/shapes
        encoder: {name: tiny}
        training:
            learning_rate: 0.1
            batch_size: 1
            epochs: 1 # few


"""
FORMS = {
    "comment at the end": "datasets:\n  shapes: {SHAPES}\n# the end\n",
    "no last line end": "datasets:\n  shapes: {SHAPES}",
    "block entry": BLOCK_ENTRY,
}
SHAPES = (
    "{source: {kind: shapes, root: data/shapes}, encoder: {name: tiny}, "
    "training: {learning_rate: 0.1, batch_size: 1, epochs: 1}}"
)


def other_sections() -> str:
    """The project's own params.yaml without the two sections that `add` edits, and without comments."""
    yaml, stream = YAML(typ="safe", pure=True), io.StringIO()
    record = yaml.load(PROJECT / "params.yaml")
    yaml.dump({key: value for key, value in record.items() if key not in ("run", "datasets")}, stream)
    return stream.getvalue()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("names", ["[shapes]", "\n  - shapes # one\n  # two", "[\n    shapes,\n  ]"])
def test_params_in_other_forms_are_edited_too(tmp_path: Path, form: str, names: str) -> None:
    path = tmp_path / "params.yaml"
    rest = other_sections()
    run = f"run:\n  methods: [clip]\n  seeds: [0]\n  datasets: {names}\n"
    before = run + rest + FORMS[form].replace("{SHAPES}", SHAPES)
    path.write_text(before)
    add_dataset("mine", ENTRY, run=True, path=path)
    params = load_params(path)
    assert params.run.datasets == ("shapes", "mine")
    assert params.datasets["mine"].source.root == Path("/data/my pictures: best")
    assert params.datasets["shapes"].training.epochs == 1
    assert path.read_text().count("#") == before.count("#")


def test_params_that_cannot_be_edited_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    text = (
        f"run: {{datasets: [shapes], methods: [clip], seeds: [0]}}\n{other_sections()}datasets: {{shapes: {SHAPES}}}\n"
    )
    path.write_text(text)
    with pytest.raises(DuplexError, match=r"add by hand: \{mine: \{source"):
        add_dataset("mine", ENTRY, run=True, path=path)
    path.write_text(text.replace(f"{{shapes: {SHAPES}}}", f"\n  shapes: {SHAPES}"))
    with pytest.raises(UsageError, match=r"params.yaml: datasets.mine.source"):
        add_dataset("mine", {**ENTRY, "source": {"kind": "magic", "root": "x"}}, run=True, path=path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["params.yaml"]
