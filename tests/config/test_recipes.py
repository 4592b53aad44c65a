"""Recipes: published methods with the settings of their publications (`run.recipes: published`)."""

from typing import Any

import pytest

from duplex.config.params import Params, load_params, parse_params, published_recipes, read_yaml
from duplex.data.tables import read_benchmarks
from duplex.errors import UsageError
from duplex.methods.registry import find_method
from duplex.report.claims import is_row, read_package_yaml
from tests.projects import SHIPPED, edited_params

EVERY = [(name, dataset) for name, recipe in published_recipes().items() for dataset in recipe["per_dataset"]]


def published(
    names: str, dataset: str, files: dict[str, Any] | None = None, only: bool = False, **entries: dict[str, Any]
) -> Params:
    record = read_yaml(SHIPPED)
    record["run"] = {"datasets": [dataset], "methods": names.split(), "seeds": [0], "recipes": "published"}
    record["run"]["published_only"] = only
    record["methods"] |= entries
    return parse_params(record, files or {}, SHIPPED)


@pytest.mark.parametrize(("name", "dataset"), EVERY)
def test_every_recipe_fits_its_benchmark_and_its_kind(name, dataset):
    assert dataset in read_benchmarks()
    if name in ("cds", "logiczsl", "eva"):
        with pytest.raises(UsageError, match=rf"no published learning_rate or batch_size .*methods.{name}"):
            published(name, dataset)
        return
    params = published(name, dataset)
    options, training = params.method(name, dataset), params.training(dataset, name)
    params.finetune(name, dataset)
    assert 768 % getattr(options, "heads", 1) == 0, "the width of the benchmarks' features"
    recipe = published_recipes()[name]
    for row in read_package_yaml("quoted.yaml")["entries"].values():
        assert name not in row["run"] or is_row({"kind": recipe["kind"], **options.to_dict()}, row)
    stated = {**recipe.get("training", {}), **recipe["per_dataset"][dataset].get("training", {})}
    assert all(getattr(training, key) == value for key, value in stated.items())
    if "training" in recipe:
        assert {"learning_rate", "weight_decay", "batch_size", "epochs", "schedule", "select"} <= stated.keys()


def test_models_for_the_open_world_keep_the_epoch_that_is_best_there():
    worlds = {name: recipe.get("world", "both") for name, recipe in published_recipes().items()}
    chosen = {name: published(name, "ut-zappos").training("ut-zappos", name).select_world for name in worlds
              if worlds[name] != "both"}  # fmt: skip
    assert chosen == {name: worlds[name] for name in chosen} and "open" in chosen.values()


def test_what_was_not_decided_can_be_decided_beside_the_data_set():
    files = {"ut-zappos": {"methods": {"cds": {"training": {"learning_rate": 5e-4, "batch_size": 64}}}}}
    training = published("cds", "ut-zappos", files).training("ut-zappos", "cds")
    assert (training.learning_rate, training.batch_size, training.word_dropout) == (5e-4, 64, 0.3)


def test_a_data_set_that_the_authors_did_not_run_has_the_common_settings_and_its_own_rate():
    params = published("ivr", "cgqa")
    training = params.training("cgqa", "ivr")
    assert (training.batch_size, training.epochs, training.select) == (512, 101, "hm"), "the recipe's"
    assert params.not_run_by_authors("cgqa") == {"ivr": ["ut-zappos"]}
    assert published("ivr", "ut-zappos").not_run_by_authors("ut-zappos") == {}
    elsewhere = published("troika", "shapes")
    assert elsewhere.training("shapes", "troika").learning_rate == 1e-3, "the data set's"
    assert elsewhere.training("shapes", "troika").weight_decay == 1e-5, "the recipe's"


def test_a_method_without_a_recipe_runs_beside_recipes_by_its_own_entry():
    mine = {"extends": "csp", "maxima": True, "training": {"epochs": 3}}
    params = published("csp mine dual", "cgqa", only=True, mine=mine)
    ours = load_params(SHIPPED)
    assert params.training("cgqa", "csp").epochs == 20, "the recipe's"
    assert params.training("cgqa", "mine") == ours.training("cgqa", "csp").changed({"epochs": 3}), "not the recipe's"
    assert params.method("mine", "cgqa") == ours.method("csp_maxima", "cgqa")
    assert params.method("dual", "cgqa") == ours.method("dual", "cgqa")
    assert params.not_run_by_authors("cgqa") == {}
    assert params.own_settings_note().endswith(" settings of params.yaml: mine, dual")
    assert published("csp", "cgqa").own_settings_note() == ours.own_settings_note() == ""


def test_a_product_of_methods_with_and_without_a_recipe_is_no_method_without_one():
    record = read_yaml(SHIPPED)
    run = {"datasets": ["cgqa"], "methods": ["dual", "scen"], "products": ["dual_scen"], "seeds": [0]}
    record["run"] = {**run, "recipes": "published"}
    params = parse_params(record, {}, SHIPPED)
    assert params.authors_note("cgqa") == ""
    assert params.own_settings_note().endswith(": dual")


def test_unknown_methods_are_refused_and_data_sets_without_a_recipe_on_request():
    remedies = r"known: clip, .*; correct the name, or add an entry magic to `methods:` in params.yaml"
    with pytest.raises(UsageError, match=rf"unknown published recipe 'magic'; {remedies}"):
        published("csp magic", "cgqa")
    refused = r"^ivr has no published settings for cgqa; choose from ut-zappos, or leave out run.published_only$"
    with pytest.raises(UsageError, match=refused):
        published("ivr", "cgqa", only=True)
    assert published("ivr", "ut-zappos", only=True).run.published_only


@pytest.mark.parametrize("dataset", ["mit-states", "ut-zappos", "cgqa"])
def test_an_entry_with_a_recipe_has_its_settings_on_benchmarks_and_its_own_elsewhere(dataset):
    ours, theirs = load_params(SHIPPED.parent / "ablations/params.yaml"), published("troika", dataset)
    assert ours.method("troika", dataset) == theirs.method("troika", dataset)
    assert ours.finetune("troika", dataset) == theirs.finetune("troika", dataset)
    assert ours.training(dataset, "troika") == theirs.training(dataset, "troika")
    plain = find_method("troika").Options()
    assert ours.method("troika", "shapes") == plain and ours.finetune("troika", "shapes") is None


def with_entry(entry: dict[str, Any]) -> Params:
    record = read_yaml(SHIPPED)
    record["methods"]["mine"] = entry
    return parse_params(record, {}, SHIPPED)


@pytest.mark.parametrize("entry", [{"recipe": "troika"}, {"extends": "troika", "recipe": "troika"}])
def test_an_entry_with_a_recipe_has_its_kind(entry):
    params = with_entry(entry)
    assert params.entry("mine").kind == "troika"
    assert params.method("mine", "shapes") == find_method("troika").Options()
    assert params.method("mine", "cgqa") == published("troika", "cgqa").method("troika", "cgqa")


@pytest.mark.parametrize(
    ("entry", "kind"), [({"kind": "csp"}, "csp"), ({"extends": "duplex"}, "duplex"), ({"extends": "ade"}, "ade")]
)
def test_a_recipe_of_another_kind_is_refused(entry, kind):
    wrong = rf"methods.mine.recipe: troika has settings of the kind troika, but the entry's kind is {kind}; set"
    with pytest.raises(UsageError, match=wrong):
        with_entry({**entry, "recipe": "troika"})


def test_an_unknown_recipe_of_an_entry_is_refused(tmp_path):
    with edited_params(SHIPPED, tmp_path / "params.yaml") as record:
        record["methods"]["csp"]["recipe"] = "cps"
    with pytest.raises(UsageError, match=r"unknown published recipe in params.yaml, methods.csp.recipe: 'cps'"):
        load_params(tmp_path / "params.yaml")
