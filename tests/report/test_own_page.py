"""The page of one data set: its sections, in a browser too, with keyboard alone; and in a project."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from duplex.artifacts import ArtifactPaths
from duplex.errors import DuplexError, UsageError
from duplex.features.tokens import Examples
from duplex.project import report
from duplex.project.run import ProjectData
from duplex.report.own import own_report, write_page
from tests.projects import inside
from tests.report.own_data import own_data
from tests.report.reading import Page
from tests.report.test_browser import CONTRAST

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return own_data(tmp_path_factory.mktemp("shop") / "images")


@pytest.fixture(scope="module")
def written(data, tmp_path_factory):
    return write_page(data, tmp_path_factory.mktemp("page") / "shop.html")


def titles(report) -> list[str]:
    return [section.title for section in report.sections]


def test_the_page_has_every_section_and_its_numbers(data, written) -> None:
    page = Page(written.read_text(encoding="utf-8"))
    headings = [element.text for element in page.all("h2")]
    assert headings == ["Accuracy", "Confusions", "Probabilities", "More images", "Wrong answers"]
    text = written.read_text(encoding="utf-8")
    assert f"{data.answered.accuracy:.1f} %" in text
    assert f"Expected calibration error {100 * data.answered.reliability.calibration_error:.1f} %" in text
    assert "This is an extrapolation" in text
    assert len(page.all("img")) > 20 and all(e.attributes["src"].startswith("data:") for e in page.all("img"))
    assert not [e for e in page.elements if e.attributes.get("href", "#")[0] not in "#d"]


def test_accuracy_is_listed_by_the_share_of_unseen_pairs(data) -> None:
    at = {"new_share": 0.4, "accuracy": 71.5, "accuracy_seen": 80.25, "accuracy_unseen": 58.75}
    shares = {"run": {"stored": {**at, "new_share": 0.1}, "estimated": {**at, "error": 0.05}, "true": at}}
    overall = own_report(replace(data, by_share=shares)).sections[0].parts[0]
    *_, table = overall.blocks
    rows = [[cell.text for cell in row.cells] for row in table.rows]
    assert [row[1] for row in rows] == ["10.0 %, stored", "40.0 ± 5.0 %, estimated", "40.0 %, of these images"]
    assert all(row[0] == "run" and row[2] == "71.5" for row in rows)
    assert len(own_report(data).sections[0].parts[0].blocks) == 1


def test_images_that_could_not_be_read_are_not_counted(data) -> None:
    train = data.examples["train"]
    read = Examples(train.rows[2:], {"cls": train.cls[2:]}, train.compositions[2:])
    report = own_report(replace(data, examples={**data.examples, "train": read}))
    counts = data.manifest["split"].value_counts()
    assert dict(report.facts)["images"] == f"{len(data.manifest) - 2:,}"
    assert dict(report.facts)["train / val / test"].startswith(f"{counts['train'] - 2:,} / ")


def test_confusion_matrices_hold_the_counts_of_all_test_images(data, written) -> None:
    page = Page(written.read_text(encoding="utf-8"))
    labels = data.labels
    assert len([e for e in page.all("table") if e.attributes.get("class") == "matrix"]) == 2
    for part, names in ((labels.state_of, labels.states), (labels.object_of, labels.objects)):
        counted = 0
        for cell in page.all("td"):
            words = re.match(r"(\w+) answered as (\w+): (\d+) of (\d+)", cell.attributes.get("data-tip", ""))
            if words is None or words[1] not in names:
                continue
            here = part(data.answered.target) == names.index(words[1])
            assert int(words[4]) == here.sum()
            assert cell.text == words[3]
            assert int(words[3]) == (here & (part(data.answered.answer) == names.index(words[2]))).sum()
            assert cell.attributes["class"] == ("hit" if words[1] == words[2] else "miss")
            counted += int(words[3])
        assert counted == len(data.answered)


def test_sections_without_data_are_left_out(data, tmp_path) -> None:
    elsewhere = own_report(replace(data, root=tmp_path / "no images here"))
    assert "Wrong answers" not in titles(elsewhere) and "Confusions" in titles(elsewhere)
    perfect = own_report(replace(data, answered=replace(data.answered, answer=data.answered.target)))
    assert "Wrong answers" not in titles(perfect)
    assert [part.title for part in perfect.sections[1].parts] == ["States", "Objects"]


def test_equal_data_give_equal_bytes(data, written, tmp_path) -> None:
    assert write_page(data, tmp_path / "again.html").read_bytes() == written.read_bytes()


@pytest.mark.parametrize(("width", "media"), [(320, "screen"), (400, "screen"), (1200, "screen"), (720, "print")])
@pytest.mark.parametrize("dark", [False, True])
def test_both_themes_fit_every_width_without_errors(browser, written, width, media, dark) -> None:
    browser.window(width, dark=dark, media=media)
    browser.open(written)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(CONTRAST) == []
    assert browser.complaints == [] and browser.requests == [written.resolve().as_uri()]


def test_the_keyboard_alone_reaches_every_table_and_sorts_it(browser, written) -> None:
    browser.window(400)
    browser.open(written)

    browser.press("Tab", 9)
    assert browser.run("document.activeElement.textContent") == "Skip to the results"
    reached = []
    for _ in range(200):
        browser.press("Tab", 9)
        place = browser.run(
            "(e => e === document.body ? null : [e.tagName, e.getAttribute('aria-label') || e.textContent.trim()])"
            "(document.activeElement)"
        )
        if place is None:
            break
        reached.append(tuple(place))
        if place == ["BUTTON", "right, %"]:
            browser.press("Enter", 13)
            sort = "document.activeElement.closest('th').getAttribute('aria-sort')"
            assert browser.run(sort) == "descending"
            column = "[...document.activeElement.closest('table').tBodies[0].rows].map(r => +r.cells[4].textContent)"
            values = browser.run(column)
            assert values == sorted(values, reverse=True)
    regions = browser.run("[...document.querySelectorAll('.scroll')].map(e => e.getAttribute('aria-label'))")
    assert ("BUTTON", "right, %") in reached
    assert [name for kind, name in reached if kind == "DIV"] == regions
    assert "States: label against answer" in regions


def test_a_project_writes_the_page_of_a_data_set_from_its_best_run(project) -> None:
    page = report.write_own_page(ProjectData(project.params, "own", project.paths))
    assert page == project.paths.page("own")
    text = page.read_text(encoding="utf-8")
    assert [e.text for e in Page(text).all("h1")] == ["own"]
    assert "More images" in text and "Confusions" in text
    records = {path: json.loads(path.read_text()) for path in project.paths.root.glob("own/*/*/metrics.json")}
    best = max((path for path in records if "closed" in records[path]), key=lambda path: records[path]["val_auc"])
    method, seed = best.parts[-3:-1]
    assert f"{method}, seed {seed}" in text


def test_a_data_set_without_a_run_is_an_error(project, tmp_path) -> None:
    with pytest.raises(UsageError, match="own has no trained run"):
        report.write_own_page(ProjectData(project.params, "own", ArtifactPaths(tmp_path)))


def test_a_run_on_other_labels_is_named_with_the_command_that_trains_it(project, tmp_path) -> None:
    shutil.copytree(project.folder, tmp_path / "copy")
    with inside(tmp_path / "copy"):
        labels = json.loads(project.paths.labels("own").read_text())
        labels["states"].append(labels["objects"][0])
        project.paths.labels("own").write_text(json.dumps(labels))
        with pytest.raises(DuplexError, match=r"no trained run .* matches params.yaml; .*`duplex train --dataset own"):
            report.write_own_page(ProjectData(project.params, "own", project.paths))


def test_the_report_leaves_out_data_sets_without_runs_and_metrics_alone(project) -> None:
    before = project.paths.metrics.read_bytes()
    run = project.params.run.model_copy(update={"datasets": ("shapes", "own")})
    params = project.params.model_copy(update={"run": run})
    text = report.report_stage(params, project.paths, write_metrics=False).read_text(encoding="utf-8")
    assert [e.text for e in Page(text).all("h2")] == ["own", "Claims of the paper", "Provenance"]
    assert "shapes" not in [e.text for e in Page(text).all("dd")]
    assert project.paths.metrics.read_bytes() == before
    report.report_stage(project.params, project.paths)
