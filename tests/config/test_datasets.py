"""Files of data sets, datasets/NAME.yaml, and the one line of params.yaml that lists them."""

from dataclasses import replace
from pathlib import Path

import pytest

from duplex.config.datasets import remove_dataset, write_dataset, write_settings
from duplex.config.params import load_params
from duplex.errors import UsageError
from duplex.options import FinetuneOptions
from tests.projects import edited_params
from tests.subprocesses import ROOT

ENTRY = {
    "source": {"kind": "folder", "root": "/data/my pictures: best"},
    "encoder": {"name": "tiny"},
    "training": {"learning_rate": 0.0001, "batch_size": 64, "epochs": 15},
}


@pytest.fixture(autouse=True)
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text((ROOT / "params.yaml").read_text())
    return Path("params.yaml")


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_data_set_is_written_changed_and_removed(params: Path, line_end: str) -> None:
    before = params.read_bytes().replace(b"\n", line_end.encode())
    params.write_bytes(before)
    original = load_params()
    write_dataset("mine", ENTRY, run=True)
    assert params.read_bytes() == before.replace(b"datasets: [shapes]", b"datasets: [shapes, mine]", 1)
    assert load_params().run.datasets == ("shapes", "mine")
    assert load_params().datasets["mine"].source.root == Path("/data/my pictures: best")
    file = Path("datasets/mine.yaml")
    file.write_text(file.read_text().replace("epochs: 15", "epochs: 15 # enough"))
    write_dataset("mine", {"encoder": {"name": "tiny", "precision": "bf16"}}, run=True)
    assert load_params().datasets["mine"].encoder.precision == "bf16" and "# enough" in file.read_text()
    remove_dataset("mine")
    assert params.read_bytes() == before and not file.exists() and load_params() == original


def test_keys_of_the_file_replace_those_of_params(params: Path) -> None:
    write_dataset("cgqa", {"source": {"kind": "standard", "root": "elsewhere"}}, run=False)
    assert load_params().datasets["cgqa"].source.root == Path("elsewhere")
    assert load_params().datasets["cgqa"].training.batch_size == 32
    with pytest.raises(UsageError, match=r"; delete datasets\.cgqa in"):
        remove_dataset("cgqa")


def test_options_of_a_method_are_those_of_the_data_set_alone(params: Path) -> None:
    write_dataset("mine", ENTRY, run=False)
    write_settings(load_params(), "duplex", "mine", {"momentum": 0.5, "epochs": 4})
    write_settings(load_params(), "duplex", "mine", {"learning_rate": 0.1})
    write_settings(load_params(), "dual_finetuned", "shapes", {"epochs": 3})
    changed = load_params()
    for name in ("duplex", "duplex_open"):  # extends it
        assert (changed.method(name, "mine").momentum, changed.method(name, "shapes").momentum) == (0.5, 0.9)
        training = changed.training("mine", name)
        assert (training.epochs, training.learning_rate) == (4, 0.1)
    assert changed.training("shapes", "dual_finetuned").epochs == 3
    assert changed.finetune("dual_finetuned", "shapes").blocks == 4, "of the entry in params.yaml"
    write_dataset("mine", {"methods": {"dual": {"finetune": "auto"}}}, run=False)
    assert load_params().finetune("dual", "mine").to_dict() == {"blocks": "auto", "minutes": None}


def test_settings_are_written_beside_those_of_other_methods_in_params(params: Path) -> None:
    with edited_params(params) as record:
        record["datasets"]["shapes"]["methods"] = {"duplex": {"momentum": 0.8}}
    write_settings(load_params(), "csp", "shapes", {"epochs": 3})
    changed = load_params()
    assert (changed.method("duplex", "shapes").momentum, changed.training("shapes", "csp").epochs) == (0.8, 3)


def test_what_a_data_set_leaves_unsaid_is_taken_over_through_extends(params: Path) -> None:
    more = "\nmethods:\n  mine: {extends: dual_finetuned, per_dataset: {shapes: {training: {epochs: 3}}}}\n"
    params.write_text(params.read_text().replace("\nmethods:\n", more, 1))
    base = load_params().finetune("dual_finetuned", "shapes")
    assert isinstance(base, FinetuneOptions) and load_params().finetune("mine", "shapes") == base
    write_dataset("shapes", {"methods": {"mine": {"training": {"patience": 2}, "finetune": {"minutes": 9}}}}, run=False)
    with pytest.raises(UsageError, match="minutes: unknown key"):  # the base has a number of blocks
        load_params().finetune("mine", "shapes")
    write_dataset("shapes", {"methods": {"mine": {"training": {"patience": 2}, "finetune": "auto"}}}, run=False)
    training = load_params().training("shapes", "mine")
    assert (training.epochs, training.patience) == (3, 2)
    assert load_params().finetune("mine", "shapes").to_dict() == {"blocks": "auto", "minutes": None}
    write_dataset("shapes", {"methods": {"dual_finetuned": {"finetune": {"learning_rate": 0.5}}}}, run=False)
    assert load_params().finetune("dual_finetuned", "shapes") == replace(base, learning_rate=0.5)
    write_dataset("shapes", {"methods": {"dual_finetuned": {"finetune": {}}}}, run=False)
    write_settings(load_params(), "dual_finetuned", "shapes", {"epochs": 3})
    assert load_params().finetune("dual_finetuned", "shapes") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": {"kind": "magic", "root": "x"}}, "mine.yaml: source.kind: input should be"),
        ({"training": {"epoch": 3}}, "mine.yaml: training.epoch: unknown key; known: learning_rate"),
        ({"sorce": {}}, "mine.yaml: sorce: unknown key; known: source, encoder"),
        ({"methods": {"dupex": {}}}, "unknown method in datasets/mine.yaml, methods: 'dupex'"),
        ({"methods": {"duplex": {"world": "open"}}}, "methods.duplex.world: cannot differ by data set"),
        ({"methods": {"duplex": {"momentum": 3}}}, "datasets/mine.yaml: methods.duplex.momentum: input should be"),
    ],
)
def test_a_mistake_is_refused_with_file_and_key(params: Path, change: dict[str, object], message: str) -> None:
    before = params.read_bytes()
    with pytest.raises(UsageError) as caught:
        write_dataset("mine", ENTRY | change, run=True)
        load_params().check_entries()
    assert message in str(caught.value)
    if "momentum" not in message:  # options of methods are checked when they are used
        assert params.read_bytes() == before and not Path("datasets").exists()


@pytest.mark.parametrize("names", ["\n  - shapes", "[\n    shapes]", "[shapes] # [one"])
def test_a_list_on_several_lines_is_left_alone(params: Path, names: str) -> None:
    text = params.read_text().replace("datasets: [shapes]", f"datasets: {names}", 1)
    params.write_text(text)
    if names.startswith("[shapes]"):
        write_dataset("mine", ENTRY, run=True)
        assert "datasets: [shapes, mine] # [one" in params.read_text()
        return
    with pytest.raises(UsageError, match=r"run\.datasets is not a list on one line.*`datasets: \[shapes, mine\]`"):
        write_dataset("mine", ENTRY, run=True)
    assert params.read_text() == text and not Path("datasets").exists()
