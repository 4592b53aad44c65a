"""What is tried in limited time fits it by the predicted times, and is never nothing."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.encoders.base import load_encoder
from duplex.methods.registry import parse_options
from duplex.options import TrainingOptions
from duplex.testing import small_inputs
from duplex.training.lineup import (
    DEPTHS,
    EPOCHS,
    RATES,
    VAL_PASSES,
    BlockCost,
    ImageCounts,
    Lineup,
    SearchCosts,
    block_cost,
    duration,
    epoch_cost,
    finetunable_blocks,
    lineup_within,
    stored_lineup,
    time_range,
    whole_lineup,
)
from duplex.training.run import MethodSpec
from tests.clock import Clock

CPU = torch.device("cpu")
COST = {blocks: BlockCost(0.01 * blocks, 0.002 * blocks, 0.01 / blocks) for blocks in DEPTHS}


def costs(depth: int, final: int = 600) -> SearchCosts:
    blocks = {each: cost for each, cost in COST.items() if each <= depth}
    return SearchCosts(ImageCounts(train=400, val=100, final=final), blocks, epoch=1.0)


def seconds(blocks: int, epochs: int) -> tuple[float, float]:
    """The naive prediction of a recipe and of its final fit: every pass over images, one at a time."""
    recipe = 600 * COST[blocks].inputs
    final = 600 * COST[blocks].inputs
    for _ in range(epochs):
        recipe += 1.0 + 400 * COST[blocks].train + 400 * COST[blocks].forward
        final += 1.5 + 600 * COST[blocks].train + 600 * COST[blocks].forward
    for _ in range(VAL_PASSES):
        recipe += 100 * COST[blocks].forward
    return recipe, final


@pytest.mark.parametrize("blocks", DEPTHS)
@pytest.mark.parametrize("epochs", (1, 3, 24))
def test_predicted_times_are_those_of_every_pass(blocks: int, epochs: int):
    predicted = costs(8)
    recipe, final = seconds(blocks, epochs)
    assert (predicted.recipe(blocks, epochs), predicted.final(blocks, epochs)) == pytest.approx((recipe, final))
    steps = epochs * (1.0 + 400 * COST[blocks].train) + (epochs - 1) * 400 * COST[blocks].forward
    assert predicted.steps_share(blocks, epochs) == pytest.approx(steps / recipe)
    assert costs(8, final=0).final(blocks, epochs) == 0


@settings(max_examples=100, deadline=None)
@given(depth=st.sampled_from((0, 1, 2, 4, 8)), limit=st.floats(0, 1000))
def test_a_lineup_fits_into_its_time_and_no_deeper_one_does(depth: int, limit: float):
    made = lineup_within(limit, costs(depth))
    if not depth:
        assert made == Lineup((), ())
        return
    deepest = made.depths[-1]
    needed = sum(seconds(blocks, EPOCHS[0])[0] for blocks in made.depths)
    needed += (len(made.rates) - 1) * seconds(made.depths[0], EPOCHS[0])[0] + seconds(deepest, EPOCHS[0])[1]
    assert needed <= limit or made == Lineup((1,), RATES[:1])  # one block is always tried
    for blocks in DEPTHS:
        if deepest < blocks <= depth:
            assert sum(seconds(blocks, EPOCHS[0])) > limit


def test_a_whole_lineup_needs_no_times_and_takes_at_least_as_long_as_its_shortest_course():
    assert [whole_lineup(depth).depths for depth in (0, 1, 4)] == [(), (1,), (1, 2, 4)]
    assert whole_lineup(0).rates == () and whole_lineup(2).rates == RATES
    least, most = time_range(whole_lineup(4), costs(4))
    short = sum(seconds(blocks, EPOCHS[0])[0] for blocks in (1, 1, 2, 4))
    assert least == pytest.approx(short + seconds(4, EPOCHS[1])[0] + seconds(4, EPOCHS[0])[1])
    longer = sum(seconds(4, epochs)[0] for epochs in EPOCHS[1:])
    assert most == pytest.approx(short + longer + seconds(4, EPOCHS[-1])[1])
    assert time_range(whole_lineup(0), costs(0)) == (0.0, 0.0)
    assert (duration(59.0), duration(90.0)) == ("59 seconds", "1.5 minutes")


def test_a_search_that_continues_has_the_lineup_and_times_of_its_start(tmp_path):
    first = Lineup((1, 2), RATES), costs(2)
    other = Lineup((1,), RATES), replace(costs(1), epoch=9.0)
    assert stored_lineup(tmp_path / "new" / "a.json", lambda: first) == first
    assert stored_lineup(tmp_path / "new" / "a.json", lambda: other) == first
    assert stored_lineup(tmp_path / "b.json", lambda: other) == other


def test_block_inputs_must_fit_the_disk_and_the_tower_must_have_the_blocks(tmp_path, monkeypatch):
    encoder = load_encoder("tiny", towers="image")
    room = finetunable_blocks(encoder, 100, tmp_path / "absent" / "cache")
    assert room.depth == 4  # the packaged tower has four blocks
    free = 1_640_000  # as much as their inputs take
    monkeypatch.setattr("duplex.training.lineup.shutil.disk_usage", lambda _: type("", (), {"free": free})())
    smaller = finetunable_blocks(encoder, 100, tmp_path)
    assert smaller.depth < 4
    assert "GB" in smaller.reason


def test_steps_are_timed_by_the_given_clock():
    tower = load_encoder("tiny", towers="image")
    cost = block_cost(tower, 1, 2, images=4, clock=Clock(8.0))
    assert cost == BlockCost(train=2.0, forward=2.0)
    training = TrainingOptions(learning_rate=1e-3, batch_size=8, epochs=1, threads=1)
    inputs = small_inputs()
    spec = MethodSpec("m", "prompts", parse_options("prompts", {}), training, ("closed",), "closed")
    images = len(inputs.examples["train"])
    assert epoch_cost(spec, inputs, CPU, Clock(2.0)) == pytest.approx(2.0 * images / 8)
    still = replace(spec, kind="linear", options=parse_options("linear", {}))
    assert epoch_cost(still, inputs, CPU, Clock(2.0)) == 0.0
