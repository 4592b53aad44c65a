"""Charts and maps are valid SVG drawings."""

from __future__ import annotations

import math
from itertools import pairwise
from xml.etree import ElementTree

import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.report.charts import Chart, Series, draw, standalone, ticks
from duplex.report.figures import tones_of
from duplex.report.results import DatasetResults
from duplex.report.scatter import draw_map

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
    ElementTree.fromstring(standalone(svg).encode())


def test_a_map_has_one_group_per_class_and_one_marker_per_prototype():
    rows = pd.DataFrame(
        [
            ("image", "red <cat>", "cat", 1, 0.0, 0.0),
            ("image", "red <cat>", "cat", 1, 1.0, 2.0),
            ("image", "blue dog", "dog", 0, 3.0, 1.0),
            ("semantic", "blue dog", "dog", 0, 3.0, 1.5),
            ("visual", "blue dog", "dog", 0, 2.0, 1.5),
            ("star", "red <cat>", "cat", 1, 2.0, 1.5),
        ],
        columns=["kind", "label", "object", "seen", "x", "y"],
    )
    root = ElementTree.fromstring(draw_map(rows, "label", "a map"))
    groups = root.findall("{http://www.w3.org/2000/svg}g")
    assert [g.attrib["data-tip"] for g in groups] == 2 * ["blue dog (unseen)", "red <cat> (seen)"]
    shapes = [shape.attrib["class"] for shape in root.iter() if "class" in shape.attrib]
    assert shapes.count("cloud") == 2 and shapes.count("proto") == 3


def test_a_method_shown_as_another_has_its_own_colour() -> None:
    data = DatasetResults("own", {}, {"clip": {}, "duplex_open": {}}, {"duplex_open": "duplex"})
    assert tones_of(data) == {"clip": 0, "duplex_open": 1, "duplex": 1}
    both = DatasetResults("own", {}, {"duplex": {}, "duplex_open": {}}, {"duplex_open": "duplex"})
    assert tones_of(both) == {"duplex": 0, "duplex_open": 1}
