"""The search adopts costlier recipes that gain enough, and stops where more blocks gain nothing."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.encoders.base import load_encoder
from duplex.evaluation.curve import Margins
from duplex.methods.registry import parse_options
from duplex.options import TrainingOptions
from duplex.training.run import MethodSpec
from duplex.training.trials import (
    DEPTHS,
    EPOCHS,
    RATES,
    BlockCost,
    ImageCounts,
    Trial,
    TrialResult,
    choose_depths,
    finetunable_blocks,
    finetuned_recipes,
    search_recipes,
)

TRAINING = TrainingOptions(learning_rate=1e-3, batch_size=64, epochs=3)
SPEC = MethodSpec("m", "prompts", parse_options("prompts", {}), TRAINING, ("closed",), "closed")


def margins(auc: float, images: int = 200) -> Margins:
    """Return margins of that AUC: each seen image is ordered right against the same share of unseen ones."""
    seen = np.arange(images) / images
    unseen = (np.arange(images) + 0.5) / images - (2 * auc - 1)  # shifted; AUC rises with `auc`
    return Margins(seen, unseen, np.repeat([True, False], images))


def attempts(aucs: dict[str, float]):
    tried = []

    def attempt(recipe: Trial) -> TrialResult:
        tried.append(recipe.name)
        return TrialResult(recipe.name, margins(aucs[recipe.name]), epoch=1)

    return attempt, tried


def mixed(result: TrialResult, random: np.random.Generator) -> TrialResult:
    """Let a recipe be right on other images, so that a gain of one point is smaller than its error."""
    parts = [random.permutation(each) for each in (result.margins.seen, result.margins.unseen)]
    return replace(result, margins=Margins(*parts, result.margins.is_seen))


def levels(depths=(1, 2, 4)):
    return [[Trial("nothing", SPEC)], *finetuned_recipes(SPEC, depths)]


def names(level: int) -> list[str]:
    return [f"{level} block{'s' * (level > 1)}, rate {rate:g}" for rate in RATES]


def test_the_search_goes_to_the_most_blocks_that_gain_with_the_better_rate():
    aucs = {"nothing": 0.5, names(1)[0]: 0.6, names(1)[1]: 0.65, names(2)[1]: 0.75, names(4)[1]: 0.85}
    attempt, tried = attempts(aucs)
    choice = search_recipes(levels(), attempt, print)
    assert tried == ["nothing", *names(1), names(2)[1], names(4)[1]]
    assert choice.recipe.name == names(4)[1]
    assert [row["recipe"] for row in choice.table if row["chosen"]] == [choice.recipe.name]
    assert choice.table[-1]["gain"] == pytest.approx(choice.attempt.auc - choice.table[3]["auc"])


def test_a_higher_rate_is_taken_only_if_it_pays():
    aucs = {"nothing": 0.5, names(1)[0]: 0.65, names(1)[1]: 0.66, names(2)[0]: 0.75, names(4)[0]: 0.85}
    attempt, tried = attempts(aucs)
    random = np.random.default_rng(0)

    def noisy(recipe: Trial) -> TrialResult:
        """The higher rate is right on other images."""
        result = attempt(recipe)
        return mixed(result, random) if recipe.name == names(1)[1] else result

    choice = search_recipes(levels(), noisy, print)
    assert tried == ["nothing", *names(1), names(2)[0], names(4)[0]]
    assert choice.table[2]["auc"] > choice.table[1]["auc"]


def test_more_blocks_are_taken_for_any_gain_but_the_first_only_beyond_the_error():
    """Each recipe is right on other images."""
    random = np.random.default_rng(0)
    one, two = names(1)[0], names(2)[0]
    levels_of_one_rate = [[Trial("nothing", SPEC)], *finetuned_recipes(SPEC, (1, 2), RATES[:1])]
    chosen = [
        search_recipes(
            levels_of_one_rate, lambda recipe, attempt=attempts(aucs)[0]: mixed(attempt(recipe), random), print
        ).recipe.name
        for aucs in (
            {"nothing": 0.60, one: 0.61, two: 0.60},
            {"nothing": 0.50, one: 0.70, two: 0.71},
            {"nothing": 0.50, one: 0.71, two: 0.70},
        )
    ]
    assert chosen == ["nothing", two, one]


def test_the_search_ends_after_two_numbers_of_blocks_without_a_gain():
    aucs = {"nothing": 0.8, names(1)[0]: 0.6, names(1)[1]: 0.5, names(2)[0]: 0.7}
    attempt, tried = attempts(aucs)
    choice = search_recipes(levels(), attempt, print)
    assert tried == ["nothing", *names(1), names(2)[0]]
    assert choice.recipe.name == "nothing"


def test_one_depth_without_gain_does_not_end_the_climb():
    aucs = {"nothing": 0.5, names(1)[0]: 0.5, names(1)[1]: 0.4, names(2)[0]: 0.7, names(4)[0]: 0.5}
    attempt, _ = attempts(aucs)
    assert search_recipes(levels(), attempt, print).recipe.name == names(2)[0]


COST = {blocks: BlockCost(0.01 * blocks, 0.002 * blocks, 0.01 / blocks) for blocks in DEPTHS}
SIZES = ImageCounts(train=400, val=100, final=600)


def seconds(depths: tuple[int, ...], rates: int, epoch: float = 1.0) -> float:
    """The naive prediction: every epoch of every recipe, then those of the final fit, one at a time."""
    total = 0.0
    for place, blocks in enumerate(depths):
        total += 600 * COST[blocks].inputs
        for _ in range(rates if place == 0 else 1):
            for _ in range(EPOCHS):
                total += epoch + 400 * (COST[blocks].train + COST[blocks].forward) + 100 * COST[blocks].forward
    for _ in range(EPOCHS):
        total += 1.5 * epoch + 600 * (COST[depths[-1]].train + COST[depths[-1]].forward)
    return total


@settings(max_examples=100, deadline=None)
@given(depth=st.sampled_from((0, 1, 2, 4, 8)), budget=st.floats(0, 1000))
def test_a_plan_fits_into_its_time_and_no_deeper_one_does(depth: int, budget: float):
    made = choose_depths(depth, COST.__getitem__, SIZES, budget, 1.0)
    if made.depths:
        assert seconds(made.depths, len(made.rates)) == pytest.approx(made.seconds)
        assert made.seconds <= budget
    deepest = max(made.depths, default=0)
    assert deepest <= depth
    for blocks in DEPTHS:
        if deepest < blocks <= depth:
            assert seconds((blocks,), 1) > budget


def test_a_plan_without_time_names_what_it_would_take():
    made = choose_depths(2, COST.__getitem__, SIZES, 1.0, 1.0)
    assert made.depths == ()
    assert "fine-tuning takes at least" in made.reason


def test_block_inputs_must_fit_the_disk_and_the_tower_must_have_the_blocks(tmp_path, monkeypatch):
    encoder = load_encoder("tiny", towers="image")
    room = finetunable_blocks(encoder, 100, tmp_path / "absent" / "cache")
    assert room.depth == 4  # the packaged tower has four blocks
    free = 100 * room.image_bytes
    monkeypatch.setattr("duplex.training.trials.shutil.disk_usage", lambda _: type("", (), {"free": free})())
    smaller = finetunable_blocks(encoder, 100, tmp_path)
    assert smaller.depth < 4
    assert "GB" in smaller.reason
