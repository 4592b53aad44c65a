from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.tiny_drawing import LOOKS, OUTLINES, FurtherLook, draw, random_style
from duplex.data.shapes import HARSH, SIDE, Look, random_stream

QUIET = replace(HARSH, noise=(0.0, 0.0), textured=0.0, clutter=0, wash=0.0, haze=0.0, lamp=(1.0, 1.0, 1.0))


def pixels(kind, look, style=QUIET, name="test"):
    return np.asarray(draw(kind, look, FurtherLook(), style, random_stream(5, name))).astype(int)


@pytest.mark.parametrize("state", [name for name in LOOKS if name != "plain"])
def test_every_state_shows_on_every_object(state):
    """The same random stream draws the same place and background, so any difference is the state's."""
    for kind in set(OUTLINES) - ({"circle"} if state == "swirled" else set()):
        plain, changed = pixels(kind, FurtherLook()), pixels(kind, LOOKS[state])
        assert np.abs(plain - changed).max(axis=2).astype(bool).mean() > 0.01, (state, kind)


def test_objects_differ_from_each_other():
    drawn = [pixels(kind, Look()) for kind in OUTLINES]
    for i, one in enumerate(drawn):
        assert all(np.abs(one - other).max(axis=2).astype(bool).mean() > 0.01 for other in drawn[:i])


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(sorted(OUTLINES)), st.sampled_from(sorted(LOOKS)), st.integers(0, 10**6), st.booleans())
def test_any_picture_is_a_small_rgb_picture_with_something_on_it(kind, state, number, harsh):
    rng = random_stream(number, "any")
    image = draw(kind, LOOKS[state], FurtherLook(), HARSH if harsh else random_style(rng), rng)
    assert (image.size, image.mode) == ((SIDE, SIDE), "RGB")
    assert np.asarray(image).std() > 0


def test_colour_names_mean_their_colours():
    for state, channel in (("red", 0), ("green", 1), ("blue", 2)):
        for number in range(5):
            middle = pixels("circle", LOOKS[state], replace(QUIET, shift=0.0), f"{number}")[SIDE // 2, SIDE // 2]
            assert middle.argmax() == channel
