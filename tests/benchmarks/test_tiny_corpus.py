from dataclasses import replace
from itertools import product

import numpy as np

from benchmarks.tiny_corpus import SEED, corpus_item, training_example
from benchmarks.tiny_drawing import FURTHER_COLOURS, FURTHER_OUTLINES, FURTHER_TREATMENTS, LOOKS
from duplex.data import shapes
from duplex.data.shapes import OBJECTS, STATES

ITEMS = [corpus_item(number) for number in range(10_000)]


def test_no_item_shows_or_names_a_state_of_the_benchmark_on_an_object_of_the_benchmark():
    pairs = set(product(STATES, OBJECTS))
    for item in ITEMS:
        assert not pairs & {(state, item.kind) for state in item.states}
        words = item.caption.split()
        assert not pairs & set(product(words, words)), item.caption


def test_objects_of_the_benchmark_have_none_of_its_colours_in_any_part():
    """Else a plain heart in any colour could be a red heart."""
    for item in ITEMS:
        if item.kind in OBJECTS:
            assert item.ink in FURTHER_COLOURS and item.second in FURTHER_COLOURS


def test_further_colours_differ_from_the_benchmarks():
    """In hue by more than both vary (10 degrees each), or by their whole range of saturation or value."""

    def apart(one: shapes.Look, other: shapes.Look) -> bool:
        assert one.hue is not None and other.hue is not None
        turn = abs((one.hue - other.hue + 180) % 360 - 180)
        ranges = ((one.saturation, other.saturation), (one.value, other.value))
        return turn > 20 or any(low[1] < high[0] or high[1] < low[0] for low, high in ranges)

    benchmark = [look for look in shapes.LOOKS.values() if look.hue is not None]
    assert all(apart(look, other) for look in FURTHER_COLOURS.values() for other in benchmark)


def test_there_are_at_least_thirty_further_objects_and_states_and_all_are_drawn():
    further = {*FURTHER_TREATMENTS, *FURTHER_COLOURS}
    assert len(FURTHER_OUTLINES) >= 30 and len(further) >= 30
    assert not set(OBJECTS) & set(FURTHER_OUTLINES) and not set(STATES) & further
    assert {item.kind for item in ITEMS} == {*OBJECTS, *FURTHER_OUTLINES}
    assert {state for item in ITEMS for state in item.states} == set(LOOKS) == {*STATES, *further}
    for names in (OBJECTS, FURTHER_OUTLINES):
        assert any(len(item.states) == 2 for item in ITEMS if item.kind in names)


def test_a_part_of_the_captions_is_wrong_or_incomplete():
    complete = [all(word in item.caption.split() for word in (*item.states, item.kind)) for item in ITEMS]
    assert 0.4 < np.mean(complete) < 0.7


def test_an_image_is_a_function_of_its_number_and_none_is_the_benchmarks():
    (one, item), (again, same) = training_example(11), training_example(11)
    assert item == same and one.tobytes() == again.tobytes()
    assert training_example(12)[0].tobytes() != one.tobytes()
    assert SEED != shapes.SEED
    names = shapes.shapes_manifest(scale=0.02)["image"].sample(60, random_state=0)
    benchmark = {shapes.draw(name).tobytes() for name in names}
    assert not benchmark & {training_example(number)[0].tobytes() for number in range(60)}


def test_an_items_look_has_the_colour_of_its_ink():
    item = next(item for item in ITEMS if item.kind in OBJECTS and item.ink not in item.states)
    treatment, ink = LOOKS[item.states[0]], LOOKS[item.ink]
    assert item.look == replace(treatment, hue=ink.hue, saturation=ink.saturation, value=ink.value)
