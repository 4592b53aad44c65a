"""The search tries whole trainings only, and chooses among them by validation, never by time."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.config.params import EvaluationParams
from duplex.errors import DuplexError
from duplex.evaluation.curve import Margins
from duplex.methods.registry import parse_options
from duplex.options import TrainingOptions
from duplex.testing import small_inputs
from duplex.training import trials
from duplex.training.lineup import EPOCHS, RATES, BlockCost, ImageCounts, SearchCosts, lineup_within, whole_lineup
from duplex.training.recipes import (
    Attempt,
    BlockRecipes,
    RecipeChoice,
    SearchSpace,
    choose,
    search_recipes,
    whole_cosine,
)
from duplex.training.run import MethodSpec, reproducible, train_run
from duplex.training.trials import Trial, TrialResult, Trials

TRAINING = TrainingOptions(learning_rate=1e-3, batch_size=64, epochs=3, patience=2)
SPEC = MethodSpec("m", "prompts", parse_options("prompts", {}), TRAINING, ("closed",), "closed")
NOTHING = Trial("nothing", SPEC)
COSTS = SearchCosts(
    ImageCounts(train=400, val=100, final=600),
    {blocks: BlockCost(0.01 * blocks, 0.002 * blocks, 0.01 / blocks) for blocks in (1, 2, 4)},
    epoch=1.0,
)


def margins(auc: float, images: int = 200) -> Margins:
    """Return margins of that AUC: each seen image is ordered right against the same share of unseen ones."""
    seen = np.arange(images) / images
    unseen = (np.arange(images) + 0.5) / images - (2 * auc - 1)  # shifted; AUC rises with `auc`
    return Margins(seen, unseen, np.repeat([True, False], images))


def mixed(result: TrialResult, random: np.random.Generator) -> TrialResult:
    """Let a recipe be right on other images, so that a gain of one point is smaller than its error."""
    parts = [random.permutation(each) for each in (result.margins.seen, result.margins.unseen)]
    return replace(result, margins=Margins(*parts, result.margins.is_seen))


def name(blocks: int, rate: float = RATES[0], epochs: int = EPOCHS[0]) -> str:
    return f"{blocks} block{'s' * (blocks > 1)}, rate {rate:g}, {epochs} epochs"


@dataclass
class Trainings:
    """Pretended trainings of known AUC on a machine that is `slow` times slower than predicted."""

    aucs: dict[str, float]
    slow: float = 1.0
    random: np.random.Generator | None = None  # recipes are right on other images
    seen: dict[str, float] = field(default_factory=dict)  # accuracies
    unseen: dict[str, float] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __call__(self, recipe: Trial) -> TrialResult:
        self.tried.append(recipe.name)
        epochs = recipe.spec.training.epochs
        seconds = 1.0
        if recipe.blocks:
            whole = COSTS.recipe(recipe.blocks, epochs)
            steps = COSTS.steps_share(recipe.blocks, epochs) * whole
            limited = self.slow * steps if recipe.seconds is None else min(recipe.seconds, self.slow * steps)
            seconds = limited + self.slow * (whole - steps)
        self.seconds += seconds
        result = TrialResult(
            recipe.name,
            margins(self.aucs[recipe.name]),
            epochs,
            accuracy_seen=self.seen.get(recipe.name),
            accuracy_unseen=self.unseen.get(recipe.name),
        )
        result = replace(result, seconds=seconds)
        return result if self.random is None else mixed(result, self.random)


def search(trainings: Trainings, depth: int, frozen: tuple[Trial, ...] = (NOTHING,)) -> RecipeChoice:
    return search_recipes(frozen, BlockRecipes(SPEC, whole_lineup(depth)), trainings, print)


def test_every_depth_has_a_whole_short_cosine_with_the_better_rate_of_the_first():
    slow, fast = RATES
    trainings = Trainings(
        {
            "nothing": 0.5,
            name(1, slow): 0.6,
            name(1, fast): 0.65,
            name(2, fast): 0.75,
            name(4, fast): 0.85,
            name(4, fast, EPOCHS[1]): 0.85,
        }
    )
    choice = search(trainings, 4)
    assert trainings.tried == list(trainings.aucs)
    assert choice.recipe.name == name(4, fast)
    assert [row["recipe"] for row in choice.table if row["chosen"]] == [choice.recipe.name]
    assert choice.table[-1]["gain"] == pytest.approx(choice.table[-1]["auc"] - choice.table[-2]["auc"])
    training = choice.recipe.spec.training
    assert (training.schedule, training.epochs, training.select) == ("cosine_steps", EPOCHS[0], "last")
    assert (training.patience, training.validate_every) == (None, EPOCHS[0])


def test_the_search_ends_after_two_numbers_of_blocks_without_a_gain():
    aucs = {name(1): 0.6, name(1, RATES[1]): 0.5, name(2): 0.5, name(4): 0.6, name(1, epochs=6): 0.6}
    trainings = Trainings({"nothing": 0.8, **aucs})
    assert search(trainings, 8).recipe == NOTHING
    assert trainings.tried == ["nothing", *aucs]


def test_one_depth_without_gain_does_not_end_the_climb():
    one = {name(1): 0.5, name(1, RATES[1]): 0.4}
    trainings = Trainings({"nothing": 0.4, **one, name(2): 0.5, name(4): 0.7, name(4, epochs=6): 0.5})
    assert search(trainings, 4).recipe.name == name(4)


def test_the_best_depth_is_trained_twice_as_long_while_auc_rises_by_more_than_its_error():
    one = {name(1): 0.6, name(1, RATES[1]): 0.5}
    aucs = {"nothing": 0.5, **one, name(1, epochs=6): 0.7, name(1, epochs=12): 0.8, name(1, epochs=24): 0.8}
    trainings = Trainings(aucs)
    assert search(trainings, 1).recipe.name == name(1, epochs=12)
    assert trainings.tried == list(aucs)
    random = np.random.default_rng(0)
    trainings = Trainings({**aucs, name(1, epochs=6): 0.61}, random=random)
    assert search(trainings, 1).recipe.name == name(1)
    assert trainings.tried[-1] == name(1, epochs=6)


def test_within_an_error_of_the_highest_auc_the_better_on_seen_and_unseen_pairs_is_chosen():
    random = np.random.default_rng(0)
    recipes = [Trial(each, SPEC) for each in ("a", "b", "c")]

    def chosen(unseen: dict[str, float], aucs: dict[str, float], seen: dict[str, float] | None = None) -> str:
        trainings = Trainings(aucs, random=random, seen=seen or {}, unseen=unseen)
        return choose([Attempt(recipe, trainings(recipe)) for recipe in recipes]).recipe.name

    level = {"a": 0.50, "b": 0.70, "c": 0.71}
    assert chosen({"a": 90.0, "b": 60.0, "c": 50.0}, level) == "b"
    assert chosen({"a": 90.0, "b": 50.0, "c": 60.0}, level) == "c"
    assert chosen({"b": 50.0, "c": 60.0}, level, {"b": 90.0, "c": 85.0}) == "c"
    assert chosen({"b": 50.0, "c": 60.0}, level, {"b": 90.0, "c": 75.0}) == "b"
    assert chosen({}, level) == "b"  # the cheapest, where this accuracy is not measured
    assert chosen({}, {"a": 0.7, "b": 0.7, "c": 0.7}) == "a"
    with pytest.raises(DuplexError, match="there is no recipe to try"):
        choose([])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), slow=st.floats(1, 100))
def test_without_a_limit_a_busy_machine_tries_and_chooses_what_an_idle_one_does(seed: int, slow: float):
    random = np.random.default_rng(seed)
    aucs = {name(b, rate, epochs): random.uniform(0.3, 0.9) for b in (1, 2, 4) for rate in RATES for epochs in EPOCHS}
    idle, busy = (Trainings({"nothing": 0.5, **aucs}, slow=factor) for factor in (1.0, slow))
    choices = [search(each, 4) for each in (idle, busy)]
    assert idle.tried == busy.tried
    assert choices[0].recipe == choices[1].recipe


@settings(max_examples=100, deadline=None)
@given(limit=st.floats(2, 2000), slow=st.floats(0.5, 4), seed=st.integers(0, 2**32 - 1), before=st.floats(0, 1))
def test_limited_time_is_shared_so_that_search_and_final_fit_end_with_it(limit, slow, seed, before):
    """However slow the machine becomes: only what follows the last step of a training may be late."""
    random = np.random.default_rng(seed)
    aucs = {
        name(b, rate, epochs): random.uniform(0.3, 0.9) for b in (1, 2, 4) for rate in RATES for epochs in range(3, 25)
    }
    trainings = Trainings({"nothing": 0.3, **aucs}, slow=slow)
    lineup = lineup_within(before * limit, COSTS)
    tuned = BlockRecipes(SPEC, lineup, limit=limit, costs=COSTS)
    choice = search_recipes([NOTHING], tuned, trainings, print)
    assert len(trainings.tried) > 1  # whatever the estimates, something is tuned
    assert choice.seconds == pytest.approx(trainings.seconds)
    late = 0.0
    for row in choice.table[1:]:
        late += (
            slow * (1 - COSTS.steps_share(row["blocks"], row["epochs"])) * COSTS.recipe(row["blocks"], row["epochs"])
        )
    assert choice.seconds <= limit + late
    needed = COSTS.short(lineup.depths, len(lineup.rates)) + COSTS.final(lineup.depths[-1], EPOCHS[0])
    if slow <= 1 and needed + 1 <= limit and choice.recipe.blocks:
        final = slow * COSTS.final(choice.recipe.blocks, choice.recipe.spec.training.epochs)
        assert choice.seconds + final <= limit * (1 + 1e-9)


def test_time_that_is_left_makes_one_longer_cosine_that_ends_before_the_final_fit():
    lineup = whole_lineup(2)
    tuned = BlockRecipes(SPEC, lineup, limit=3 * COSTS.recipe(2, 24), costs=COSTS)
    leader = Attempt(tuned.levels(0.0)[1][0], TrialResult("", margins(0.6), 3, seconds=COSTS.recipe(2, 3)))
    (longer,) = tuned.longer(leader, COSTS.recipe(2, 24))
    epochs = longer.spec.training.epochs
    assert EPOCHS[0] < epochs < EPOCHS[-1]
    assert longer.seconds == pytest.approx(COSTS.recipe(2, epochs) * COSTS.steps_share(2, epochs), rel=0.1)
    assert COSTS.recipe(2, epochs) + COSTS.final(2, epochs) <= 2 * COSTS.recipe(2, 24)
    assert COSTS.recipe(2, epochs + 1) + COSTS.final(2, epochs + 1) > 2 * COSTS.recipe(2, 24)
    slower = replace(leader, result=replace(leader.result, seconds=2 * leader.result.seconds))
    (shorter,) = tuned.longer(slower, COSTS.recipe(2, 24))
    assert shorter.spec.training.epochs < epochs
    assert tuned.longer(leader, tuned.limit - 1.0) == []
    assert tuned.limit is not None and tuned.levels(tuned.limit) == []


@pytest.mark.parametrize(("text_width", "trained"), [(64, "text prompts"), (0, "heads")])
def test_the_search_space_has_prompts_or_heads_alone_and_beside_blocks(text_width: int, trained: str):
    space = SearchSpace(text_width)
    names = [f"{trained}, rate 0.001", f"{trained}, rate 0.0001"]
    untrained = ["nothing trained", "two logistic regressions", "closed form times regressions"]
    assert [recipe.name for recipe in space.frozen()] == [*untrained, *names]
    assert [recipe.name for recipe in space.frozen(regressions=False)] == ["nothing trained", *names]
    assert set(space.kinds) == {recipe.spec.kind for recipe in space.frozen()}
    first, *_ = space.finetuned(whole_lineup(2)).levels(0.0)
    assert [recipe.name for recipe in first] == [name(1, rate) for rate in RATES]
    beside = first[0].spec
    assert (beside.kind, beside.options) == (space.prompts()[0].spec.kind, space.prompts()[0].spec.options)


def test_in_limited_time_prompts_have_a_share_of_it_along_a_whole_cosine():
    for limited, usual in zip(SearchSpace(64).prompts(200.0), SearchSpace(64).prompts(), strict=True):
        assert (limited.seconds, usual.seconds) == (10.0, None)
        assert limited.spec.training.schedule == "cosine_steps"
        assert limited.spec.training.learning_rate == usual.spec.training.learning_rate


@pytest.mark.parametrize("kill", [0, 1, 2])
def test_a_search_killed_in_any_trial_keeps_the_finished_ones_and_chooses_as_an_undisturbed_one(
    tmp_path, monkeypatch, kill
):
    training = replace(TRAINING, batch_size=8, threads=1)
    specs = [replace(SPEC, training=whole_cosine(training, epochs)) for epochs in (1, 2, 3)]
    recipes = [Trial(f"{spec.training.epochs} epochs", spec) for spec in specs]
    begun: list[int] = []

    def counted(spec, *arguments):
        begun.append(spec.training.epochs)
        if len(begun) - 1 == kill:
            raise KeyboardInterrupt
        return train_run(spec, *arguments)

    def choice(folder: str) -> tuple[RecipeChoice, bytes]:
        store = Trials(tmp_path / folder, lambda _: small_inputs(), torch.device("cpu"), EvaluationParams())
        with reproducible(1):
            chosen = search_recipes(recipes, None, store.result, print)
        return chosen, store.files(chosen.recipe).checkpoint.read_bytes()

    whole, checkpoint = choice("whole")
    monkeypatch.setattr(trials, "train_run", counted)
    with pytest.raises(KeyboardInterrupt):
        choice("broken")
    resumed, same_checkpoint = choice("broken")
    assert (resumed.table, same_checkpoint) == (whole.table, checkpoint)
    assert begun == [*range(1, kill + 2), *range(kill + 1, 4)]
