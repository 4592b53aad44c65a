"""The picture of gains shows the tables that it is drawn from."""

import re
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib", reason="the pictures need matplotlib")

from docs.builder.results import read_csv
from docs.pictures import GAINS, HERE, OVER, gains


def test_the_picture_of_gains_is_drawn_from_the_tables() -> None:
    drawn = gains()
    assert (HERE / "gains.svg").read_text(encoding="utf-8") == drawn, "run `python -m docs.pictures gains`"
    rows = [row for name in GAINS.values() for row in read_csv(HERE / "results" / name)[1] if row[OVER]]
    root = ElementTree.fromstring(drawn)
    dots = [node for node in root.iter() if "dot" in node.get("class", "")]
    lines = [node for node in root.iter() if node.get("class", "").startswith("line")]
    assert len(dots) == len(rows) + len(GAINS) and len(lines) == len(rows)
    assert {row["method"] for row in rows} <= {node.text for node in root.iter() if node.tag.endswith("text")}


def test_dots_lie_within_their_intervals_and_zero_on_the_axis() -> None:
    root = ElementTree.fromstring(gains())
    nodes = [node for node in root.iter() if node.get("class", "").startswith(("line", "dot"))][len(GAINS) :]
    for line, dot in zip(nodes[::2], nodes[1::2], strict=True):
        low, high = map(float, re.findall(r"M(\S+) \S+H(\S+)", line.get("d", ""))[0])
        assert low <= float(dot.get("cx", "")) <= high
