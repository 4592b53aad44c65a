"""Charts and maps are valid SVG drawings; the mean curve equals the mean of its seeds' curves."""

import math
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.evaluation.curve import AucComponents, Curve, Margins
from duplex.report.aggregate import mean_curve, unseen_at
from duplex.report.blocks import Chart, Series, draw, standalone_svg, ticks
from duplex.report.figures import draw_map

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)


@settings(max_examples=80, deadline=None)
@given(NUMBERS, st.floats(1e-6, 1e6), st.booleans())
def test_ticks_cover_the_range_in_equal_round_steps(low, width, whole):
    found = ticks(low, low + width, whole=whole)
    step = found[1] - found[0]
    slack = 1e-6 * max(1, step, abs(low), abs(low + width))
    assert found[0] <= low + slack and found[-1] >= low + width - slack
    assert 2 <= len(found) <= 9
    assert all(math.isclose(b - a, step, rel_tol=1e-3, abs_tol=1e-9) for a, b in pairwise(found))
    assert not whole or all(tick == int(tick) for tick in found)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS | st.just(math.nan)), min_size=1, max_size=6), st.text(max_size=8))
def test_any_series_gives_valid_svg_within_its_frame(points, name):
    x, y = [p[0] for p in points], [p[1] for p in points]
    name = "".join(c for c in name if c.isprintable())
    svg = draw(Chart(name, name, name, [Series(name, sorted(x), y)] * 12))
    root = ElementTree.fromstring(svg)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        if "x" in text.attrib:
            assert 0 <= float(text.attrib["x"]) <= width and 0 <= float(text.attrib["y"]) <= height
    assert "nan" not in "".join(path.attrib["d"] for path in root.iter("{http://www.w3.org/2000/svg}path"))
    ElementTree.fromstring(standalone_svg(svg).encode())


def test_a_map_has_one_group_per_class_and_one_marker_per_prototype():
    rows = pd.DataFrame(
        [
            ("image", "red <cat>", "cat", 1, 0.0, 0.0), ("image", "red <cat>", "cat", 1, 1.0, 2.0),
            ("image", "blue dog", "dog", 0, 3.0, 1.0), ("semantic", "blue dog", "dog", 0, 3.0, 1.5),
            ("visual", "blue dog", "dog", 0, 2.0, 1.5), ("star", "red <cat>", "cat", 1, 2.0, 1.5),
        ],
        columns=["kind", "label", "object", "seen", "x", "y"],
    )  # fmt: skip
    root = ElementTree.fromstring(draw_map(rows, "label", "a map"))
    groups = root.findall("{http://www.w3.org/2000/svg}g")
    assert [g.attrib["data-tip"] for g in groups] == 2 * ["blue dog (unseen)", "red <cat> (seen)"]
    shapes = [shape.attrib["class"] for shape in root.iter() if "class" in shape.attrib]
    assert shapes.count("cloud") == 2 and shapes.count("proto") == 3


def some_margins(seed: int, seen: int = 40, unseen: int = 30) -> Margins:
    rng = np.random.default_rng(seed)
    d, u = rng.normal(0.5, 1, seen), rng.normal(-0.2, 1, unseen)
    d[rng.random(seen) < 0.3], u[rng.random(unseen) < 0.3] = np.nan, np.nan
    return Margins(d, u, np.r_[np.ones(seen, bool), np.zeros(unseen, bool)])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_unseen_at_is_the_best_at_each_seen_accuracy(seed):
    curve = Curve.of(some_margins(seed, 8, 6))
    grid = np.linspace(0, 1, 11)
    found = unseen_at(curve.seen_accuracies, curve.unseen_accuracies, grid)
    for g, value in zip(grid, found, strict=True):
        enough = curve.unseen_accuracies[curve.seen_accuracies >= g - 1e-12]
        assert value == (enough.max() if enough.size else 0.0)


def test_the_curve_of_one_seed_lies_within_its_interval():
    margins = some_margins(1)
    found = mean_curve([margins], points=801, rounds=50)
    curve = Curve.of(margins)
    assert found.seen[-1] == pytest.approx(100 * curve.seen_accuracies[0])
    assert found.unseen[0] == pytest.approx(100 * curve.unseen_accuracies[-1])
    assert (np.diff(found.unseen) <= 1e-9).all()
    area = np.trapezoid(found.unseen, found.seen) / 100
    assert area == pytest.approx(100 * AucComponents.of(margins).auc, abs=0.5)
    assert ((found.low <= found.unseen + 1e-9) & (found.unseen <= found.high + 1e-9)).mean() > 0.9


def test_seeds_are_averaged_and_different_test_sets_have_no_interval():
    pair = [some_margins(1), some_margins(2)]
    both = mean_curve(pair, rounds=5)
    grid = both.seen / 100
    apart = [unseen_at(Curve.of(m).seen_accuracies, Curve.of(m).unseen_accuracies, grid) for m in pair]
    assert both.unseen == pytest.approx(100 * np.mean(apart, axis=0))
    odd = mean_curve([some_margins(1), some_margins(2, seen=10)], rounds=5)
    assert (odd.low == odd.unseen).all() and (odd.high == odd.unseen).all()
