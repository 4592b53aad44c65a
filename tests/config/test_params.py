"""params.yaml: the shipped file is valid, and every mistake in it is an error of one line that names the key."""

from itertools import product
from pathlib import Path

import pytest

from duplex.config.params import load_params
from duplex.errors import UsageError
from duplex.options import AutoFinetune, FinetuneOptions
from tests.projects import SHIPPED, edited_params


def changed(tmp_path: Path, old: str, new: str) -> Path:
    text = SHIPPED.read_text()
    assert text.count(old) >= 1, f"{old!r} is not in params.yaml"
    path = tmp_path / "params.yaml"
    path.write_text(text.replace(old, new, 1))
    return path


def test_the_shipped_file_is_valid():
    params = load_params(SHIPPED)
    ours = ("closed_form", "dual", "dual_finetuned")
    assert params.run.methods == ("linear", "clip", "csp", "cso", "duplex", "duplex_open", *ours)
    assert params.method("clip").losses == ()
    assert params.method("duplex").momentum == 0.9
    assert params.dataset("cgqa").training.learning_rate == 1.5e-5


def test_methods_of_run_finetune_no_more_blocks_than_caches_hold():
    params = load_params(SHIPPED)
    assert params.block_inputs("shapes") == params.finetune("dual_finetuned", "shapes").blocks == 4
    for dataset in set(params.datasets) - {"shapes", "mit-states-resnet18"}:
        assert params.block_inputs(dataset) == 0
        assert all(params.finetune(name, dataset) is None for name in params.run.methods)


def test_a_data_sets_block_inputs_override_those_of_extraction(tmp_path):
    params = load_params(changed(tmp_path, "  block_inputs: 0 #", "  block_inputs: 1 #"))
    assert (params.block_inputs("shapes"), params.block_inputs("cgqa")) == (4, 1)
    params = load_params(changed(tmp_path, "{name: tiny, block_inputs: 4}", "{name: tiny, block_inputs: 0}"))
    assert params.block_inputs("shapes") == 0


def test_a_method_overrides_the_training_options_of_the_data_set(tmp_path):
    entry = "per_dataset: {cgqa: {momentum: 0.5, training: {epochs: 3}}}, "
    entry += "training: {schedule: cosine, learning_rate: 0.25}"
    params = load_params(changed(tmp_path, "momentum: 0.9", entry))
    assert params.method("duplex", "cgqa").momentum == 0.5
    assert params.method("duplex", "shapes").momentum == 0.9
    settings = params.training("cgqa", "duplex")
    assert (settings.epochs, settings.schedule, settings.learning_rate, settings.batch_size) == (3, "cosine", 0.25, 32)
    assert params.training("shapes", "duplex").epochs == 6
    assert params.training("cgqa", "duplex_open") == settings, "taken over with `extends`"
    assert params.training("cgqa", "cso") == params.dataset("cgqa").training


@pytest.mark.parametrize(
    ("entry", "expected"),
    [({"finetune": {"blocks": 2}}, FinetuneOptions(blocks=2, adapter="full")), ({"finetune": "auto"}, AutoFinetune()),
     ({"training": {"epochs": 3}}, FinetuneOptions(blocks=4, adapter="full")), ({"finetune": {}}, None)],
)  # fmt: skip
def test_what_an_entry_sets_beats_what_its_base_sets_for_a_data_set(tmp_path, entry, expected):
    with edited_params(SHIPPED, tmp_path / "params.yaml") as record:
        own = {"finetune": {"blocks": 4, "adapter": "full"}, "training": {"epochs": 9, "weight_decay": 0.5}}
        record["methods"]["base"] = {"extends": "dual", "per_dataset": {"shapes": own}}
        record["methods"]["mine"] = {"extends": "base", **entry}
    params = load_params(tmp_path / "params.yaml")
    assert params.finetune("mine", "shapes") == expected
    training = params.training("shapes", "mine")
    assert (training.epochs, training.weight_decay) == (entry.get("training", own["training"])["epochs"], 0.5)
    assert params.training("shapes", "base").epochs == 9


def test_the_world_of_a_method_is_not_inherited():
    params = load_params(SHIPPED)
    assert (params.entry("duplex").worlds, params.entry("duplex_open").worlds) == (("closed",), ("open",))
    assert params.entry("duplex_open").trained_for == "open"
    assert params.entry("duplex_static").worlds == ("closed", "open")
    assert params.method("duplex_open") == params.method("duplex")


def test_the_method_of_a_world_is_that_of_the_tables(tmp_path):
    with edited_params(SHIPPED, tmp_path / "params.yaml") as record:
        other = {"extends": "duplex", "world": "open", "shown_as": "duplex"}
        record["methods"] = {"other": other, **record["methods"]}
    assert load_params(tmp_path / "params.yaml").method_for_world("duplex", "open") == "duplex_open"


def test_an_ablation_is_a_method_with_changed_options():
    params = load_params(SHIPPED.parent / "ablations" / "params.yaml")
    params.check_entries()
    main = load_params(SHIPPED)
    for name in ("cso", "duplex", "duplex_additive", "troika", "cge", "cge_visual"):
        here, there = (each.methods[name].model_copy(update={"per_dataset": {}}) for each in (params, main))
        assert here == there
    for name, dataset in product(("cso", "duplex"), ("mit-states", "ut-zappos", "cgqa")):
        assert params.method(name, dataset) == main.method(f"{name}_paper", dataset)
        assert params.finetune(name, dataset) == main.finetune(f"{name}_paper", dataset)
        assert params.training(dataset, name) == main.training(dataset, f"{name}_paper")
        assert params.dataset(dataset).encoder.name == main.dataset(dataset).encoder.name
    for name, data in product(("cge", "cge_visual"), ("mit-states-resnet18",)):
        assert params.method(name, data) == main.method(name, data)
        assert params.finetune(name, data) == main.finetune(name, data)
    same = {"source": main.dataset("shapes").source}
    assert params.dataset("shapes").model_copy(update=same) == main.dataset("shapes")
    assert params.evaluation == main.evaluation
    assert params.extraction.model_copy(update={"tokens": "none"}) == main.extraction
    assert params.method("static").graph is False
    assert params.method("static").momentum == params.method("duplex").momentum
    assert params.method("update_batch").unseen_rows == "random"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("{momentum: 0.9, world: closed}", "[1]", ["params.yaml: methods.duplex is [1]; expected a table of keys"]),
        ("momentum: 0.9", "momentun: 0.9", ["methods.duplex.momentun", "unknown key", "momentum"]),
        ("momentum: 0.9", "momentum: -1, factor_widht: 9", ["methods.duplex.factor_widht", "unknown key"]),
        ("{blocks: all, adapter: full,", "{block: 1,", ["finetune.block: unknown key; known: blocks, adapter"]),
        ("epochs: 20", "epochs: 0", ["datasets.ut-zappos.training.epochs: input should be greater than or equal to 1"]),
        ("{kind: prompts}", "{kind: promts}", ["unknown kind of method 'promts'", "duplex", "prompts"]),
        ("world: open, shown_as", "world: both, shown_as", ["duplex and duplex_open are both shown as", "closed"]),
        ("extends: duplex, world: open", "extends: duplex_open, world: open", ["duplex_open is circular; remove"]),
        ("extends: duplex, world: open", "extends: duplexx, world: open", ["unknown method 'duplexx'; known"]),
        ("extends: duplex, world: open", "extends: [duplex], world: open", ["unknown method ['duplex']; known"]),
        ("momentum: 0.9", "per_dataset: {shapes: {world: open}}", ["per_dataset.shapes.world", "cannot differ"]),
        ("datasets: [shapes]", "datasets: [shape]", ["run.datasets", "'shape'", "shapes"]),
        ("seeds: [0, 1]", "seeds: [0, 0]", ["run.seeds", "twice"]),
        ("clip, csp", "clip, cps", ["run.methods", "'cps'", "csp"]),
        ("featured: duplex", "featured: duplexx", ["report.featured", "'duplexx'", "duplex"]),
        ("device: auto", "device: tpu", ["device", "cuda", "'tpu'"]),
        ("{kind: shapes,", "{kind: shape,", ["datasets.shapes.source.kind", "standard"]),
        ("{extends: duplex, graph: false}", "{extends: cso, graph: true}", ["static.graph", "unknown key"]),
        ("  ut-zappos:\n", "  plots:\n", ["datasets.plots", "reserved"]),
        ("num_workers: auto", "num_workers: -1", ["extraction.num_workers", "auto", "-1"]),
        ("worlds: [closed, open]", "worlds: [closed]", ["evaluation.worlds", "duplex_open is for the open world"]),
        ("word_vectors: null", "word_vectors: none.txt", ["evaluation.word_vectors", "there is no file none.txt"]),
        ("  cds: {", "  ../../x: {", ["methods", "'../../x'"]),
    ],
)
def test_a_mistake_is_one_line_that_names_its_key(tmp_path, old, new, words):
    with pytest.raises(UsageError) as caught:
        load_params(changed(tmp_path, old, new)).check_entries()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("content", [b"", b"3", b"- a", b"\xff\xfe\x00", b"run: 1", b"methods: {a: 1}", b"1: 2"])
def test_a_file_without_parameters_is_refused(tmp_path, content):
    path = tmp_path / "params.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError):
        load_params(path)


def test_the_largest_seed_and_whole_numbers_as_fractions_are_valid(tmp_path):
    assert load_params(changed(tmp_path, "seeds: [0, 1]", f"seeds: [{2**63 - 1}]")).run.seeds == (2**63 - 1,)
    training = load_params(changed(tmp_path, "learning_rate: 0.001", "learning_rate: 1")).dataset("shapes").training
    assert training.learning_rate == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [("", "cannot be read: Is a directory"), ("params.yaml", "run the command in the project's folder")],
)
def test_a_folder_and_a_missing_file_are_reported(tmp_path, name, words):
    with pytest.raises(UsageError, match=words):
        load_params(tmp_path / name)
