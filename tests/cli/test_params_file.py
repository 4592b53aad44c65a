"""Edits of params.yaml and dvc.lock: everything else in the file stays as it is."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from duplex.cli.params_file import add_dataset, forget_stages, remove_dataset, set_method
from duplex.config.params import load_params
from duplex.errors import DuplexError, UsageError
from tests.commands import Command
from tests.data.makers import make_folder
from tests.subprocesses import ROOT

ENTRY = {
    "source": {"kind": "folder", "root": "/data/my pictures: best"},
    "encoder": {"name": "tiny"},
    "training": {"learning_rate": 0.0001, "batch_size": 64, "epochs": 15},
}
SHAPES = (
    "{source: {kind: shapes, root: data/shapes}, encoder: {name: tiny}, "
    "training: {learning_rate: 0.1, batch_size: 1, epochs: 1}}"
)
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
LAYOUTS = {
    "comment at the end": f"datasets:\n  shapes: {SHAPES}\n# the end\n",
    "no newline at the end": f"datasets:\n  shapes: {SHAPES}",
    "one line": f"datasets: {{shapes: {SHAPES}}}\n",
    "block": BLOCK_ENTRY,
}


def other_sections() -> str:
    """params.yaml without `run`, `datasets` and comments."""
    yaml, stream = YAML(typ="safe", pure=True), io.StringIO()
    record = yaml.load(ROOT / "params.yaml")
    yaml.dump({key: value for key, value in record.items() if key not in ("run", "datasets")}, stream)
    return stream.getvalue()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("names", ["[shapes]", "\n  - shapes # one\n  # two", "[\n    shapes,\n  ]"])
def test_a_data_set_is_added_changed_and_removed_in_any_layout(tmp_path: Path, layout: str, names: str) -> None:
    path = tmp_path / "params.yaml"
    run = f"run:\n  methods: [clip]\n  seeds: [0]\n  datasets: {names}\n"
    before = run + other_sections() + LAYOUTS[layout]
    path.write_text(before)
    original = load_params(path)
    add_dataset("mine", ENTRY, run=True, path=path)
    params = load_params(path)
    assert params.run.datasets == ("shapes", "mine")
    assert params.datasets["mine"].source.root == Path("/data/my pictures: best")
    assert params.datasets["shapes"] == original.datasets["shapes"]
    assert path.read_text().count("#") == before.count("#")
    add_dataset("shapes", {"encoder": {"name": "tiny", "precision": "bf16"}}, run=True, path=path)
    assert load_params(path).datasets["shapes"].encoder.precision == "bf16"
    remove_dataset("mine", path)
    assert load_params(path).run.datasets == ("shapes",) and path.read_text().count("#") == before.count("#")


def test_options_of_a_method_change_without_losing_comments(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    entry = """\
  commented:
    kind: csp
    per_dataset:
      shapes:
        training: # tuned by hand
          batch_size: 8 # 16 diverged
          learning_rate: 1e-3
"""
    path.write_text((ROOT / "params.yaml").read_text().replace("\nmethods:\n", f"\nmethods:\n{entry}", 1))
    before = path.read_text()
    assert entry in before
    set_method("commented", "shapes", {}, {"batch_size": 4, "epochs": 5}, path)
    changed = before.replace("batch_size: 8 #", "batch_size: 4 #")
    assert path.read_text() == changed.replace("learning_rate: 1e-3", "learning_rate: 1e-3\n          epochs: 5", 1)
    set_method("commented", "cgqa", {}, {"epochs": 5}, path)
    assert path.read_text().count("#") == before.count("#")
    assert load_params(path).methods["commented"].training_for("cgqa") == {"epochs": 5}


def test_an_invalid_edit_leaves_the_file_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    text = (ROOT / "params.yaml").read_text()
    path.write_text(text)
    with pytest.raises(UsageError, match=r"params.yaml: datasets.mine.source"):
        add_dataset("mine", {**ENTRY, "source": {"kind": "magic", "root": "x"}}, run=True, path=path)
    shared = text.replace("encoder: {name: tiny", "encoder: &encoder {name: tiny", 1)
    path.write_text(shared.replace("encoder: {name: ViT-L-14-quickgelu, weights: openai}", "encoder: *encoder", 1))
    before = path.read_bytes()
    with pytest.raises(DuplexError):
        remove_dataset("shapes", path)
    assert path.read_bytes() == before and [entry.name for entry in tmp_path.iterdir()] == ["params.yaml"]


def test_line_ends_are_kept(project: Path, command: Command) -> None:
    lines = (project / "params.yaml").read_bytes()
    (project / "params.yaml").write_bytes(lines.replace(b"\n", b"\r\n"))
    make_folder(project / "mine", "nested")
    assert command("data", "add", "mine", "mine", "--encoder", "tiny").code == 0
    written = (project / "params.yaml").read_bytes()
    assert b"mine:" in written and written.count(b"\n") == written.count(b"\r\n") > lines.count(b"\n")
    assert command("data", "remove", "mine").code == 0
    assert (project / "params.yaml").read_bytes() == lines.replace(b"\n", b"\r\n")


def test_remove_deletes_the_comment_above_and_nothing_else(project: Path) -> None:
    text = Path("params.yaml").read_text()
    remove_dataset("ut-zappos")
    left = Path("params.yaml").read_text()
    removed = [line for line in text.splitlines() if line not in left.splitlines()]
    assert len(removed) == 4 and removed[0].startswith("  # Expect (paper") and "ut-zappos" in removed[1]
    assert "\n\n\n" not in left and set(load_params().datasets) == {"shapes", "mit-states", "cgqa"}


@pytest.mark.parametrize(
    "names", ["[shapes, cgqa]", "[cgqa, shapes]", "\n  - shapes\n  - cgqa # last", "\n  - cgqa\n  - shapes"]
)
def test_remove_deletes_the_name_from_a_list_in_any_layout(project: Path, names: str) -> None:
    text = Path("params.yaml").read_text()
    Path("params.yaml").write_text(text.replace("  datasets: [shapes]\n", f"  datasets: {names}\n", 1))
    assert set(load_params().run.datasets) == {"shapes", "cgqa"}
    remove_dataset("cgqa")
    assert load_params().run.datasets == ("shapes",) and "cgqa" not in load_params().datasets


@pytest.mark.parametrize(
    "entry",
    [
        "{extends: duplex, per_dataset: {cgqa: {momentum: 0.5}}}",
        "{per_dataset: {cgqa: {momentum: 0.5}, shapes: {momentum: 0.7}}, extends: duplex} # a word",
        "{extends: duplex, per_dataset: {shapes: {momentum: 0.7}, cgqa: {momentum: 0.5}}}",
        "\n    extends: duplex\n    per_dataset:\n      cgqa: {momentum: 0.5} # x\n      shapes: {momentum: 0.7}",
        "\n    per_dataset:\n      shapes:\n        momentum: 0.7\n      cgqa: {momentum: 0.5}\n    extends: duplex",
        "\n    extends: duplex\n    per_dataset:\n      cgqa:\n        momentum: 0.5",
    ],
)
def test_remove_deletes_the_options_of_methods_for_the_data_set(project: Path, entry: str) -> None:
    text = Path("params.yaml").read_text().replace("\nmethods:\n", f"\nmethods:\n  extra: {entry}\n")
    Path("params.yaml").write_text(text)
    before = load_params().methods
    assert before["extra"].per_dataset["cgqa"] == {"momentum": 0.5}
    remove_dataset("cgqa")
    after = load_params().methods
    assert dict(after["extra"].per_dataset) == {k: v for k, v in before["extra"].per_dataset.items() if k != "cgqa"}
    assert {**after, "extra": None} == {**before, "extra": None}
    assert text.count("#") - Path("params.yaml").read_text().count("#") <= 2  # above the entry, and beside the options


@pytest.mark.slow
def test_stages_of_one_data_set_are_removed_from_the_lock(project: Path) -> None:
    """Names that begin like another data set's stay, and DVC can read what is left."""
    for name in ("dvc.yaml", "params.yaml"):
        (project / name).write_bytes((ROOT / name).read_bytes())
    for folder in ("duplex", "pipeline"):
        (project / folder).symlink_to(ROOT / folder)
    yaml = YAML()
    record = yaml.load(ROOT / "dvc.lock")
    stages = {name: stage for name, stage in record["stages"].items() if "shapes" in name}
    for dataset in ("shapes-duplex", "mine"):
        for name, stage in stages.items():
            copied = {**stage, "cmd": stage["cmd"].replace("shapes", dataset)}
            record["stages"][name.replace("shapes", dataset)] = copied
    lock = project / "dvc.lock"
    yaml.dump(record, lock)
    others = [name for name in record["stages"] if "mine" not in name]
    assert forget_stages("mine", lock) == len(stages) > 0
    assert list(YAML().load(lock)["stages"]) == others
    assert forget_stages("shapes-duplex", lock) == forget_stages("shapes", lock) == len(stages)
    assert "@" not in lock.read_text() and forget_stages("shapes", project / "absent.lock") == 0
    subprocess.run(["git", "init", "-q", "."], check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], check=True, capture_output=True)
    status = [sys.executable, "-m", "dvc", "status", "prepare@shapes"]
    done = subprocess.run(status, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
