"""Records of what stages depend on: which edits of params.yaml and of code change which of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.project.stamps import dataset_records, report_record, run_records
from tests.subprocesses import ENVIRONMENT, ROOT
from tests.system.test_code_hash import change


def records(params: Params) -> dict[str, object]:
    """Return `train duplex` -> record, of every stage of the data set shapes."""
    stages: dict[str, object] = {**dataset_records(params, "shapes"), "report": report_record(params)}
    for method in params.run.methods:
        stages |= {f"{stage} {method}": record for stage, record in run_records(params, "shapes", method).items()}
    return stages


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("momentum: 0.9,", "momentum: 0.5,", {"train duplex", "train duplex_open"}),
        ("batch_size: 64\n", "batch_size: 32\n", {"extract"}),
        ("num_workers: auto", "num_workers: 1", set()),
        ("seed: 7", "seed: 8", {"prepare"}),
        ("seeds: [0, 1]", "seeds: [0, 1, 2]", set()),
        ("bootstrap: 1000", "bootstrap: 10", {"evaluate"}),
        ("thresholds: 50", "thresholds: 5", {"train", "evaluate"}),
        ("epochs: 12", "epochs: 13", {"train"}),
        ("block_inputs: 4", "block_inputs: 3", {"extract", "train", "evaluate"}),
    ],
)
def test_a_changed_parameter_changes_the_records_of_the_stages_that_use_it(tmp_path, old, new, changed):
    """`train` stands for the training of every method."""
    before = records(load_params(ROOT / "params.yaml"))
    path = tmp_path / "params.yaml"
    path.write_text((ROOT / "params.yaml").read_text())
    change(path, old, new)
    after = records(load_params(path))
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == {
        name for name in before if name in changed or name.partition(" ")[0] in changed
    }


def test_the_report_depends_on_the_tables_of_ablations(tmp_path):
    params, paths = load_params(ROOT / "params.yaml"), ArtifactPaths(tmp_path / "artifacts")
    paths.ablations.mkdir()
    before = report_record(params, paths)
    (paths.ablations / "metrics.json").write_text("{}")
    assert report_record(params, paths) != before


PLAN = """
import sys
from duplex.config.params import load_params
from duplex.project.stamps import dataset_records, run_records
params = load_params()
dataset_records(params, "shapes"), run_records(params, "shapes", "duplex")
assert "torch" not in sys.modules
"""


def test_records_are_made_without_torch():
    subprocess.run([sys.executable, "-c", PLAN], cwd=ROOT, env=ENVIRONMENT, check=True)


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """The shipped params.yaml with a method `mine` of the working folder."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "params.yaml").read_text()
    text = text.replace("methods: [clip,", "methods: [mine, clip,").replace(
        "\nmethods:\n", '\nmethods:\n  mine: {kind: "mine_for_records:Mine"}\n'
    )
    (tmp_path / "params.yaml").write_text(text)
    (tmp_path / "mine_for_records.py").write_text(
        "from duplex.methods.prompts import PromptMethod\n\n\nclass Mine(PromptMethod):\n    pass\n"
    )
    return load_params()


def test_an_edit_of_a_plugin_changes_the_records_of_its_own_methods_alone(params, tmp_path):
    before = records(params)
    change(tmp_path / "mine_for_records.py", "pass", '"""A comment."""  # another\n    pass')
    assert records(params) == before
    change(tmp_path / "mine_for_records.py", "pass", "factor = 2")
    after = records(params)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"train mine", "evaluate mine", "maps", "report"}


def test_replaced_files_of_encoders_and_word_vectors_change_the_records(tmp_path):
    folder, weights, words = tmp_path / "enc", tmp_path / "weights.pt", tmp_path / "words.txt"
    folder.mkdir()
    for path in (folder / "open_clip_model.safetensors", weights, words):
        path.write_text("before")
    params = load_params(ROOT / "params.yaml")

    def with_files(**encoder) -> Params:
        entry = params.datasets["shapes"]
        entry = entry.model_copy(update={"encoder": entry.encoder.model_copy(update=encoder)})
        evaluation = params.evaluation.model_copy(update={"word_vectors": words})
        return params.model_copy(update={"datasets": {"shapes": entry}, "evaluation": evaluation})

    local, file = with_files(name=f"local-dir:{folder}"), with_files(name="ViT-B-32", weights=str(weights))
    for changed_params, path, stages in (
        (local, folder / "open_clip_model.safetensors", {"extract", "train", "evaluate"}),
        (file, weights, {"extract", "train", "evaluate"}),
        (local, words, {"train", "evaluate"}),
    ):
        before = records(changed_params)
        path.write_text("after, of another size")
        after = records(changed_params)
        assert {name.partition(" ")[0] for name in before if before[name] != after[name]} == stages
