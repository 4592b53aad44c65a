"""The search adopts costlier recipes that gain enough, and trains only the best of them to its end."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.config.params import EvaluationParams
from duplex.encoders.base import load_encoder
from duplex.errors import DuplexError
from duplex.evaluation.curve import Margins
from duplex.methods.registry import parse_options
from duplex.options import TrainingOptions
from duplex.testing import small_inputs
from duplex.training.recipes import (
    DEPTHS,
    EPOCHS,
    PAUSE,
    RATES,
    Attempt,
    BlockCost,
    ImageCounts,
    Lineup,
    SearchSpace,
    best_depth,
    best_frozen,
    choose_lineup,
    extend,
    finetunable_blocks,
    finetuned_recipes,
    search_recipes,
    stored_lineup,
)
from duplex.training.run import MethodSpec, reproducible
from duplex.training.trials import Trial, TrialResult, Trials

CPU = torch.device("cpu")
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
        at_its_end = recipe.name.removesuffix(f", {EPOCHS[0]} epochs")  # as good as when it was paused
        auc = aucs.get(recipe.name, aucs.get(at_its_end, aucs.get(f"{at_its_end}, epoch {PAUSE}")))
        assert auc is not None
        return TrialResult(recipe.name, margins(auc), epoch=recipe.spec.training.epochs)

    return attempt, tried


def mixed(result: TrialResult, random: np.random.Generator) -> TrialResult:
    """Let a recipe be right on other images, so that a gain of one point is smaller than its error."""
    parts = [random.permutation(each) for each in (result.margins.seen, result.margins.unseen)]
    return replace(result, margins=Margins(*parts, result.margins.is_seen))


NOTHING = [[Trial("nothing", SPEC)]]


def names(level: int) -> list[str]:
    return [f"{level} block{'s' * (level > 1)}, rate {rate:g}, epoch {PAUSE}" for rate in RATES]


def whole(name: str, epochs: int = EPOCHS[0]) -> str:
    return name.replace(f"epoch {PAUSE}", f"{epochs} epochs")


def test_the_search_goes_to_the_most_blocks_that_gain_with_the_better_rate():
    aucs = {"nothing": 0.5, names(1)[0]: 0.6, names(1)[1]: 0.65, names(2)[1]: 0.75, names(4)[1]: 0.85}
    attempt, tried = attempts(aucs)
    choice = search_recipes(NOTHING, finetuned_recipes(SPEC, (1, 2, 4)), attempt, print)
    assert tried == ["nothing", *names(1), names(2)[1], names(4)[1], whole(names(4)[1])]
    assert choice.recipe.name == whole(names(4)[1])
    assert [row["recipe"] for row in choice.table if row["chosen"]] == [choice.recipe.name]
    assert choice.table[-2]["gain"] == pytest.approx(choice.table[-2]["auc"] - choice.table[3]["auc"])
    assert choice.table[-1]["gain"] == pytest.approx(choice.table[-1]["auc"] - choice.table[0]["auc"])


def test_the_best_of_equally_expensive_recipes_is_taken_for_any_gain():
    slow, fast = (Trial(name, SPEC) for name in ("slow", "fast"))
    aucs = {"slow": 0.5, "fast": 0.51, names(1)[0]: 0.65, names(1)[1]: 0.66, names(2)[1]: 0.75}
    attempt, tried = attempts(aucs)
    random = np.random.default_rng(0)
    blocks = finetuned_recipes(SPEC, (1, 2))
    choice = search_recipes([[slow, fast]], blocks, lambda recipe: mixed(attempt(recipe), random), print)
    assert tried == ["slow", "fast", *names(1), names(2)[1], whole(names(2)[1])]
    assert choice.recipe.name == whole(names(2)[1])
    assert choice.table[2]["gain"] == pytest.approx(choice.table[2]["auc"] - choice.table[1]["auc"])  # over `fast`


def test_a_rate_whose_gain_exceeds_its_error_is_kept_even_if_that_of_the_first_does_not():
    nothing, slow, fast = (Trial(name, SPEC) for name in ("nothing", "slow", "fast"))
    attempt, _ = attempts({"nothing": 0.5, "slow": 0.505, "fast": 0.51})
    random = np.random.default_rng(0)
    results = {each.name: attempt(each) for each in (nothing, slow, fast)}
    results["slow"] = mixed(results["slow"], random)
    for rates in ([slow, fast], [fast, slow]):
        choice = search_recipes([[nothing], rates], [], lambda recipe: results[recipe.name], print)
        assert choice.recipe.name == "fast"
        slow_row = next(row for row in choice.table if row["recipe"] == "slow")
        assert 0 < slow_row["gain"] < slow_row["gain_error"]


def test_more_blocks_are_taken_for_any_gain_but_the_first_only_beyond_the_error():
    """Each recipe is right on other images."""
    random = np.random.default_rng(0)
    one, two = names(1)[0], names(2)[0]
    blocks = finetuned_recipes(SPEC, (1, 2), RATES[:1])
    chosen = [
        search_recipes(
            NOTHING, blocks, lambda recipe, attempt=attempts(aucs)[0]: mixed(attempt(recipe), random), print
        ).recipe.name
        for aucs in (
            {"nothing": 0.60, one: 0.61, two: 0.60},
            {"nothing": 0.50, one: 0.70, two: 0.71},
            {"nothing": 0.50, one: 0.71, two: 0.70},
        )
    ]
    assert chosen == ["nothing", whole(two), whole(one)]


def test_a_recipe_that_is_exactly_as_good_as_a_cheaper_one_is_not_chosen():
    """Neither blocks nor epochs are added for nothing; images on which both agree give a gain and an error of 0."""
    one, two = names(1)[0], names(2)[0]
    of_one_rate = list(finetuned_recipes(SPEC, (1, 2), RATES[:1]))
    for aucs, expected in (
        ({"nothing": 0.6, one: 0.6, two: 0.6}, "nothing"),
        ({"nothing": 0.6, one: 0.7, two: 0.7}, whole(one)),
    ):
        assert search_recipes(NOTHING, of_one_rate, attempts(aucs)[0], print).recipe.name == expected
    longer = finetuned_recipes(SPEC, (1,), RATES[:1], EPOCHS)
    attempt, _ = attempts({"nothing": 0.6, one: 0.7, **{whole(one, epochs): 0.7 for epochs in EPOCHS}})
    assert search_recipes(NOTHING, longer, attempt, print).recipe.name == whole(one)


def test_the_search_ends_after_two_numbers_of_blocks_without_a_gain():
    aucs = {"nothing": 0.8, names(1)[0]: 0.6, names(1)[1]: 0.5, names(2)[0]: 0.5, names(4)[0]: 0.6}
    attempt, tried = attempts(aucs)
    choice = search_recipes(NOTHING, finetuned_recipes(SPEC, (1, 2, 4, 8)), attempt, print)
    assert tried == ["nothing", *names(1), names(2)[0], names(4)[0], whole(names(1)[0])]
    assert choice.recipe.name == "nothing"


def test_one_depth_without_gain_does_not_end_the_climb():
    aucs = {"nothing": 0.5, names(1)[0]: 0.5, names(1)[1]: 0.4, names(2)[0]: 0.7, names(4)[0]: 0.5}
    attempt, _ = attempts(aucs)
    assert search_recipes(NOTHING, finetuned_recipes(SPEC, (1, 2, 4)), attempt, print).recipe.name == whole(names(2)[0])


def test_the_best_recipe_trains_longer_while_its_last_epoch_is_its_best_and_auc_rises():
    one = names(1)[0]
    aucs = {"nothing": 0.5, one: 0.6, whole(one): 0.7, whole(one, 12): 0.75, whole(one, 24): 0.74}
    attempt, tried = attempts(aucs)
    blocks = finetuned_recipes(SPEC, (1,), RATES[:1], EPOCHS)
    assert search_recipes(NOTHING, blocks, attempt, print).recipe.name == whole(one, 12)
    assert tried == ["nothing", one, *(whole(one, number) for number in EPOCHS)]
    tried.clear()
    ended = search_recipes(NOTHING, blocks, lambda recipe: replace(attempt(recipe), epoch=3), print)
    assert (ended.recipe.name, tried[-1]) == (whole(one), whole(one))


def test_a_paused_training_goes_on_to_the_bits_of_one_without_a_pause(tmp_path):
    spec = replace(SPEC, training=replace(TRAINING, batch_size=8, threads=1))
    paused, at_once = (Trials(tmp_path / name, lambda _: small_inputs(), CPU, EvaluationParams()) for name in "ab")
    with reproducible(1):
        part = paused.result(Trial("m", spec, pause=1))
        assert part.epoch <= 1 and not paused.files(Trial("m", spec)).checkpoint.exists()
        ends = [trials.result(Trial("m", spec)) for trials in (paused, at_once)]
        assert paused.result(Trial("m", spec, pause=1)).auc == part.auc
    assert ends[0].auc == ends[1].auc
    files = [trials.files(Trial("m", spec)) for trials in (paused, at_once)]
    assert files[0].checkpoint.read_bytes() == files[1].checkpoint.read_bytes()
    assert files[0].history.read_text() == files[1].history.read_text()


COST = {blocks: BlockCost(0.01 * blocks, 0.002 * blocks, 0.01 / blocks) for blocks in DEPTHS}
SIZES = ImageCounts(train=400, val=100, final=600)


def seconds(depths: tuple[int, ...], rates: int, epochs: tuple[int, ...], epoch: float = 1.0) -> float:
    """The naive prediction: every epoch of every recipe, then those of the final fit, one at a time."""
    total = 0.0
    for place, blocks in enumerate(depths):
        total += 600 * COST[blocks].inputs
        trained = PAUSE * (rates if place == 0 else 1) + (sum(epochs) - PAUSE if blocks == depths[-1] else 0)
        for _ in range(trained):
            total += epoch + 400 * (COST[blocks].train + COST[blocks].forward) + 100 * COST[blocks].forward
    for _ in range(epochs[-1]):
        total += 1.5 * epoch + 600 * (COST[depths[-1]].train + COST[depths[-1]].forward)
    return total


@settings(max_examples=100, deadline=None)
@given(depth=st.sampled_from((0, 1, 2, 4, 8)), budget=st.floats(0, 1000))
def test_a_lineup_fits_into_its_time_and_no_deeper_one_does(depth: int, budget: float):
    made = choose_lineup(depth, COST.__getitem__, SIZES, budget, 1.0)
    if made.depths:
        assert seconds(made.depths, len(made.rates), made.epochs) == pytest.approx(made.seconds)
        assert made.seconds <= budget
        more = EPOCHS[: len(made.epochs) + 1]
        assert made.epochs == EPOCHS or seconds(made.depths, len(made.rates), more) > budget
    deepest = max(made.depths, default=0)
    assert deepest <= depth
    for blocks in DEPTHS:
        if deepest < blocks <= depth:
            assert seconds((blocks,), 1, EPOCHS[:1]) > budget


def test_a_lineup_without_time_names_what_it_would_take():
    made = choose_lineup(2, COST.__getitem__, SIZES, 1.0, 1.0)
    assert made.depths == ()
    assert "fine-tuning takes at least" in made.reason


def test_block_inputs_must_fit_the_disk_and_the_tower_must_have_the_blocks(tmp_path, monkeypatch):
    encoder = load_encoder("tiny", towers="image")
    room = finetunable_blocks(encoder, 100, tmp_path / "absent" / "cache")
    assert room.depth == 4  # the packaged tower has four blocks
    free = 100 * room.image_bytes
    monkeypatch.setattr("duplex.training.recipes.shutil.disk_usage", lambda _: type("", (), {"free": free})())
    smaller = finetunable_blocks(encoder, 100, tmp_path)
    assert smaller.depth < 4
    assert "GB" in smaller.reason


class Tries:
    """Tries recipes whose AUC is known, and notes which recipe each is compared with."""

    def __init__(self, aucs: dict[str, float], epoch: int = EPOCHS[-1]) -> None:
        self.aucs, self.epoch = aucs, epoch
        self.compared: list[tuple[str, str | None]] = []

    def __call__(self, recipe: Trial, other: Attempt | None) -> Attempt:
        self.compared.append((recipe.name, None if other is None else other.recipe.name))
        return Attempt(recipe, TrialResult(recipe.name, margins(self.aucs[recipe.name]), self.epoch))


def test_recipes_of_equal_cost_are_compared_with_the_best_cheaper_one():
    tries = Tries({"a": 0.5, "b": 0.7, "c": 0.8, "d": 0.6})
    a, b, c, d = (Trial(name, SPEC) for name in "abcd")
    assert best_frozen([[a], [b, c], [d]], tries).recipe == c
    assert tries.compared == [("a", None), ("b", "a"), ("c", "a"), ("d", "c")]
    with pytest.raises(DuplexError, match="there is no recipe to try"):
        best_frozen([], tries)


def test_depths_are_compared_with_the_best_depth_and_the_first_with_the_frozen_recipe():
    one, two = names(1), names(2)
    tries = Tries({"nothing": 0.9, one[0]: 0.6, one[1]: 0.5, two[0]: 0.7})
    frozen = tries(NOTHING[0][0], None)
    assert best_depth(finetuned_recipes(SPEC, (1, 2)), frozen, tries).recipe.name == two[0]
    assert tries.compared[1:] == [(one[0], "nothing"), (one[1], "nothing"), (two[0], one[0])]
    assert best_depth([], frozen, tries) is None


def test_a_paused_recipe_that_gains_nothing_at_its_end_leaves_the_frozen_one():
    (one,) = names(1)[:1]
    ((paused,),) = finetuned_recipes(SPEC, (1,), RATES[:1], EPOCHS)
    tries = Tries({"nothing": 0.6, one: 0.8, whole(one): 0.5, whole(one, 12): 0.9})
    frozen = tries(NOTHING[0][0], None)
    assert extend(tries(paused, frozen), frozen, tries) is frozen
    assert tries.compared[2:] == [(whole(one), "nothing")]


@pytest.mark.parametrize(("text_width", "trained"), [(64, "prompts"), (0, "heads")])
def test_the_search_space_has_prompts_or_heads_alone_and_beside_blocks(text_width: int, trained: str):
    space = SearchSpace(text_width)
    assert [recipe.name for recipe in space.prompts] == [f"{trained}, rate 0.001", f"{trained}, rate 0.0001"]
    assert space.kinds == [recipe.spec.kind for recipe in (space.nothing_trained, space.prompts[0], space.rival)]
    levels = space.finetuned(Lineup((1, 2), RATES, EPOCHS[:2], 1.0, ""))
    assert [recipe.name for level in levels for recipe in level] == [*names(1), *names(2)]
    beside = levels[0][0].spec
    assert (beside.kind, beside.options) == (space.prompts[0].spec.kind, space.prompts[0].spec.options)
    assert [longer.spec.training.epochs for longer in levels[0][0].longer] == [*EPOCHS[:2]]


def test_a_search_that_continues_has_the_lineup_of_its_start(tmp_path):
    first = Lineup((1, 2), RATES, EPOCHS[:1], 3.5, "blocks 1, 2")
    other = replace(first, depths=(1,))
    assert stored_lineup(tmp_path, 30, lambda: first) == first
    assert stored_lineup(tmp_path, 30, lambda: other) == first
    assert stored_lineup(tmp_path, 5, lambda: other) == other
