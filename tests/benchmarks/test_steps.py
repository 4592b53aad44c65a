"""The costs of a step are those of the recipes: their options, their batches, the parameters that they train."""

from pathlib import Path

import pytest

from benchmarks.steps import measure, recipe_settings
from duplex.config.params import published_recipes
from duplex.methods.registry import parse_options


@pytest.mark.parametrize("name", published_recipes())
def test_every_recipe_has_the_values_of_mit_states_if_it_was_run_there(name: str) -> None:
    recipe, dataset, chosen, training = recipe_settings(name)
    own = published_recipes()[name]["per_dataset"]
    assert dataset == ("mit-states" if "mit-states" in own else next(iter(own)))
    assert parse_options(recipe.kind, chosen).to_dict().get("adapter") != "blocks"
    stated = {**published_recipes()[name].get("training", {}), **own[dataset].get("training", {})}
    assert training.batch_size == {"?": 64}.get(stated.get("batch_size", 64), stated.get("batch_size", 64))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory cannot be reset on this system")
def test_a_step_counts_what_is_trained_and_takes_few_images_with_patch_tokens() -> None:
    vectors = measure("csp", 2, layers=1, width=64)
    assert vectors["trained, M"] == pytest.approx((115 + 245) * 64 / 1e6) and vectors["images"] == 64
    assert vectors["s a step"] > 0
    attending = measure("ade", 2)
    assert (attending["images"], attending["batch"], attending["settings of"]) == (2, 128, "ut-zappos")
