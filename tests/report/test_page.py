"""The page: every number cites its file, names are escaped, missing files become notes."""

import json
import re
import shutil
from itertools import pairwise
from xml.etree import ElementTree

import pandas as pd
import pytest
from ruamel.yaml import YAML

from duplex.project import report
from duplex.project.inventory import inventory_stage
from duplex.project.maps import maps_stage
from duplex.project.run import ProjectData
from duplex.report import blocks
from duplex.report.blocks import Chart, Mark, Series, draw, render_page
from duplex.report.claims import paper_row
from tests.projects import inside
from tests.report.reading import Page, cited
from tests.subprocesses import ROOT

EVIL = "<b>bold</b> & \"quoted\" 'single' | `tick` café <script>alert(1)</script>"


@pytest.fixture
def copy(project, tmp_path):
    """A copy of the project that a test may change; the test runs in its folder."""
    shutil.copytree(project.folder, tmp_path / "copy")
    with inside(tmp_path / "copy"):
        yield tmp_path / "copy"


@pytest.fixture
def page(project):
    return Page(project.page.read_text(encoding="utf-8"))


def test_every_number_of_a_table_equals_the_one_it_cites(page):
    cells = [e for e in page.elements if "data-from" in e.attributes and "#" in e.attributes["data-from"]]
    assert len(cells) > 80
    for cell in cells:
        sources, text = cell.attributes["data-from"], cell.text
        shown = [float(number.replace(",", "")) for number in re.findall(r"-?[\d,]+(?:\.\d+)?", text)]
        places = sources.split()
        if "_low" in places[0]:
            assert shown == pytest.approx([cited(place) for place in places], abs=0.05001), (sources, text)
            continue
        scale = 1e-6 if "bytes" in sources else 1.0
        decimals = len(text.split(" ")[0].partition(".")[2].rstrip("s"))
        assert shown[0] == pytest.approx(cited(sources) * scale, abs=0.5001 * 10**-decimals), (sources, text)
        assert float(cell.attributes["data-value"]) == pytest.approx(cited(sources) * scale)
        if "±" in text:
            assert shown[1] == pytest.approx(cited(sources + "_se"), abs=0.05001)


def test_every_number_of_a_table_has_a_source(page):
    cells = [e for e in page.all("td") if e.attributes.get("class") == "num" and e.text != "–"]
    assert cells
    assert not [cell.text for cell in cells if not cell.attributes.get("data-from")]


def test_confusions_and_accuracies_equal_the_predictions(page):
    cells = [e for e in page.all("td") if e.attributes.get("data-from", "").endswith("predictions.csv")]
    table = pd.read_csv(cells[0].attributes["data-from"])
    closed = table[table["world"] == "closed"]
    wrong = closed[closed["top1"] != closed["label"]].groupby(["label", "top1"]).size()
    assert int(cells[0].text) == wrong.max()
    accuracy = (100 * closed.groupby("label")["right"].mean()).round(1)
    rows = [[c.text for c in page.elements if c.parents and c.parents[-1] is row] for row in page.all("tr")]
    rows = [row for row in rows if len(row) in (4, 5) and row[0] in accuracy.index and row[1] in ("seen", "unseen")]
    found = {row[0]: float(row[3]) for row in rows}
    assert len(found) > 8
    assert found == {name: accuracy[name] for name in found}


def test_the_page_is_self_contained_and_accessible(page, project):
    text = project.page.read_text(encoding="utf-8")
    assert len(text) < 5_000_000
    addresses = [e.attributes[key] for e in page.elements for key in ("src", "href") if key in e.attributes]
    assert addresses and all(a.startswith(("#", "data:")) for a in addresses)
    assert "@import" not in text and "url(" not in text
    assert page.all("html")[0].attributes["lang"] == "en"
    levels = [int(e.tag[1]) for e in page.elements if re.fullmatch(r"h\d", e.tag)]
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert page.all("img") and all(e.attributes["alt"] for e in page.all("img"))
    assert all(e.attributes.get("aria-label") for e in page.all("svg"))
    named = [e.attributes["id"] for e in page.elements if "id" in e.attributes]
    assert len(named) == len(set(named))
    assert all(link.attributes["href"][1:] in named for link in page.all("a"))


def test_the_same_runs_give_the_same_bytes(project):
    before = project.page.read_bytes()
    report.report_stage(project.params, project.paths)
    assert project.page.read_bytes() == before


def test_dvc_restores_all_files_of_the_report(project):
    """The page too: `dvc checkout` of another branch must not leave the page of this one."""
    written = (path.as_posix() for path in (project.paths.report, project.paths.plots, project.paths.runs))
    outs = YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"]["report"]["outs"]
    assert set(written) <= {out for out in outs if isinstance(out, str)}


def test_every_figure_is_also_a_file(project):
    drawings = sorted((project.folder / "artifacts/plots/figures").glob("*.svg"))
    assert {"own-curve-closed.svg", "own-curve-open.svg", "own-map-prototypes.svg"} <= {d.name for d in drawings}
    for drawing in drawings:
        assert ElementTree.parse(drawing).getroot().tag.endswith("svg")


def evil_report() -> blocks.Report:
    row = blocks.TableRow([blocks.TableCell(EVIL, EVIL, tip=EVIL), blocks.TableCell("1", 1)])
    table = blocks.Table(EVIL, [blocks.Column(EVIL, False, tip=EVIL), blocks.Column("n")], [row], EVIL)
    series = Series(EVIL, [0.0, 1.0], [0.0, 1.0], marks=[Mark(0.5, 0.5, EVIL)])
    figure = blocks.Figure("evil", draw(Chart(EVIL, EVIL, EVIL, [series])), EVIL)
    thumbs = [blocks.Thumb(None, EVIL, EVIL, True, [blocks.Caption(EVIL, False)])]
    gallery = blocks.Gallery([blocks.Strips(EVIL, [blocks.Strip(EVIL, thumbs)])], EVIL)
    parts = [blocks.ReportPart(EVIL, [table, figure, gallery, blocks.Note(EVIL, "dvc repro")])]
    return blocks.Report(EVIL, EVIL, [blocks.ReportSection("evil", EVIL, parts)], [(EVIL, EVIL)])


def test_names_are_escaped_on_the_page():
    page = Page(render_page(evil_report()))
    assert not page.all("b")
    assert len(page.all("script")) == 1
    assert [e.text for e in page.all("h1")] == [EVIL]
    assert EVIL in [e.text for e in page.all("text")]
    assert EVIL in [e.attributes.get("data-tip") for e in page.all("circle")]
    assert {e.attributes["aria-label"] for e in page.all("svg")} == {EVIL}
    ElementTree.fromstring(draw(Chart(EVIL, EVIL, EVIL, [Series(EVIL, [0.0], [1.0])])))


def test_missing_files_are_notes_with_commands(project, copy):
    """Without images, features, maps, ablations, timings and predictions."""
    for folder in ("pictures", "artifacts/maps"):
        shutil.rmtree(copy / folder)
    for name in ("features.h5", "statistics.json"):
        (copy / "artifacts/own" / name).unlink()
    for name in ("timing.json", "evaluation_timing.json", "history.csv", "predictions.csv"):
        for path in (copy / "artifacts/own").rglob(name):
            path.unlink()
    text = report.report_stage(project.params, project.paths).read_text()
    commands = ("make ablations", "dvc repro maps@own", "dvc repro prepare@own", "duplex extract --dataset own")
    assert [said for said in (*commands, "Results") if said not in text] == []


def test_claims_are_judged_on_the_page(project, copy):
    """With made ablations of two rows; test_claims.py has the other verdicts."""
    own = json.loads(project.paths.summary.read_text())["own"]["duplex"]
    assert (own["settings"]["encoder"], own["settings_open"]["world"]) == ("tiny", "open")
    assert own["settings"]["counts"]["states"] > 0 and own["validation"]["untrained"] in (0, 1, 2)
    made = {}
    for name, auc in (("fixed_plain", 10.0), ("module_sp", 40.0)):
        row = paper_row(name)
        stated = {key: value for key, value in row.get("options", {}).items() if value != "any"}
        settings = {**own["settings"], "kind": row["kind"], **stated}
        closed = {**own["closed"], "auc": auc, "auc_se": 0.1}
        made[name] = {"closed": closed, "settings": settings, "validation": {"auc": 1.0, "untrained": 1}}
    project.paths.ablations.parent.mkdir(parents=True)
    project.paths.ablations.write_text(json.dumps({"own": made}))
    page = Page(report.report_stage(project.params, project.paths).read_text())
    rows = [[cell.text for cell in page.elements if row in cell.parents[-1:]] for row in page.all("tr")]
    found = {
        (row[0], row[1], row[3]): (row[4], row[-1]) for row in rows if row[0].startswith("Tab.") and len(row) == 11
    }
    assert found["Tab. 5", "SP improves c-s-o", "AUC"][0] == "reproduced"
    assert found["Tab. 10", "the codebook improves c-s-o", "AUC"] == ("not run", "static")
    assert "untrained in 1 of 2" in found["Tab. 5", "SP improves c-s-o", "AUC"][1]
    test_every_number_of_a_table_equals_the_one_it_cites(page)
    test_every_number_of_a_table_has_a_source(page)


def test_labels_are_shown_without_images(project, copy):
    shutil.rmtree(copy / "pictures")
    text = report.report_stage(project.params, project.paths).read_text()
    assert "The images of own are not on this machine" in text
    page = Page(text)
    assert not page.all("img")
    assert [e for e in page.all("span") if e.attributes.get("class") == "absent"]


def test_methods_without_prototypes_have_a_page_without_maps(project, copy):
    run = project.params.run.model_copy(update={"methods": ("clip",)})
    params = project.params.model_copy(update={"run": run})
    inventory_stage(ProjectData(params, "own", project.paths))
    assert json.loads((project.paths.inventory("own") / "featured.json").read_text()) == {}
    maps_stage(ProjectData(params, "own", project.paths))
    text = report.report_stage(params, project.paths).read_text()
    assert "No method of `run:` has visual prototypes to map" in text
    assert "no state and object factors to swap" in text
