"""Published numbers are compared on their benchmarks only, for methods that were run there."""

from __future__ import annotations

import pytest

from duplex.config.params import load_params
from duplex.report.published import published_table
from duplex.report.tables import data_file, plain, result_table
from tests.projects import SHIPPED
from tests.report.test_tables import line, results


def test_a_method_is_compared_with_its_published_numbers():
    whole = results()
    whole.datasets[0].summary["dfsp_t2i"] = line(21.6)
    table = published_table(whole, whole.datasets[0], "closed")
    texts = {row.cells[0].text: [cell.text for cell in row.cells[1:]] for row in table.rows}
    assert texts["CLIP"] == ["clip", "26.1", "10.0", "11.0", "10.0", "-1.0", "-1.0 to -1.0"]
    assert texts["DFSP(t2i)"][0] == "dfsp_t2i" and texts["DFSP(t2i)"][-2] == "+1.0"
    assert texts["Duplex"][-2] == "-3.7"
    assert set(texts) == {"CLIP", "DFSP(t2i)", "Duplex"}
    assert table.rows[0].cells[5].source.endswith("#/mit-states/clip/closed/auc")


@pytest.mark.parametrize(("name", "world"), [("shapes", "closed"), ("mit-states", "open")])
def test_other_data_sets_and_worlds_have_no_comparison(name, world):
    whole = results(name)
    assert published_table(whole, whole.datasets[0], world) is None


def test_a_missing_interval_is_a_dash():
    whole = results()
    del whole.datasets[0].summary["clip"]["closed"]["auc_low"]
    assert published_table(whole, whole.datasets[0], "closed").rows[0].cells[-1].text == "–"


def test_other_backbones_are_quoted_in_the_closed_world():
    whole = results()
    rows = [row for row in result_table(whole, whole.datasets[0], "closed").rows if row.quoted]
    tips = [row.cells[0].tip for row in rows]
    assert sum("BLIP" in tip for tip in tips) == 2 and sum("ResNet-18" in tip for tip in tips) == 2
    blip = {row["method"]: row for row in data_file("quoted.yaml")["backbones"]}["Duplex"]
    assert (blip["mit-states"], blip["cgqa"]) == ([57.7, 51.7, 41.0, 24.6], [41.7, 37.5, 31.4, 14.0])


def test_every_name_of_a_published_method_exists_in_params():
    shipped, table = load_params(SHIPPED), data_file("quoted.yaml")
    methods = {row["method"] for world in ("closed", "open") for row in table[world]}
    assert set(table["names"]) <= methods
    assert set(table["names"].values()) <= set(shipped.methods)
    found = {plain(name) for name in shipped.methods}
    for name in ("CompCos", "CGE", "Co-CGE", "KG-SP", "SCEN", "CANet", "ADE", "GIPCOL", "Troika", "LOGICZSL"):
        assert name in methods and plain(name) in found
