import json
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import torch

from duplex.config.params import ReportParams
from duplex.errors import UsageError
from duplex.evaluation.intervals import NAMES
from duplex.evaluation.vectors import nearest
from duplex.labels import LabelSpace
from duplex.project import report, runs
from duplex.project.maps import maps_stage
from duplex.project.run import ProjectData
from duplex.report.blocks import Note
from duplex.report.figures import Scene, compute_tsne_maps, map_figures
from duplex.report.images import swap_parts

pytestmark = pytest.mark.slow


def test_report_prints_the_page(command):
    done = command("report")
    assert done.out.strip() == "artifacts/report/index.html", done.err


def test_report_of_one_data_set_prints_its_page(command, project):
    assert command("report", "--dataset", "own").out.strip() == "artifacts/pages/own.html"
    assert "<h1>own</h1>" in project.paths.page("own").read_text(encoding="utf-8")
    assert command("report", "--dataset", "none").refused("unknown data set 'none'")


def test_retrieve_lists_images_of_both_prototypes(command, project):
    found = json.loads(command("retrieve", "red star", "--dataset", "own", "--json", "--top", "3").out)
    assert list(found) == ["semantic", "visual"]
    for hits in found.values():
        assert len(hits) == 3
        cosines = [hit["cosine"] for hit in hits]
        assert cosines == sorted(cosines, reverse=True)
        assert all((project.folder / "pictures" / hit["image"]).is_file() for hit in hits)
        assert all(hit["right"] == (hit["label"] == "red star") for hit in hits)
    done = command("retrieve", "Red  Star", "--dataset", "own", "--top", "3")
    said = done.out.splitlines()
    assert said, done
    assert len(said) == 4 and said[0].split() == ["semantic", "prototype", "visual", "prototype"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            ["retrieve", "red", "--dataset", "own"],
            2,
            "'red' is not a state and an object of this data set; use those in labels.json, such as '",
        ),
        (["retrieve", "red star", "--dataset", "none"], 2, "unknown data set 'none'"),
        (["retrieve", "red star", "--dataset", "own", "--method", "csp"], 1, "does not exist; run `duplex train`"),
    ],
)
def test_errors_are_one_line(command, project, words, code, said):
    done = command(*words)
    assert done.code == code, done.err
    assert said in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_pairs_are_found_by_their_prompt_text():
    labels = LabelSpace.from_pairs({"train": [("Faux.Fur", "Boots.Mid-Calf"), ("new", "car"), ("new car", "shop")]})
    for composition in range(labels.size):
        assert labels.name(runs.find_pair(labels, labels.name(composition))) == labels.name(composition)
    assert labels.name(runs.find_pair(labels, "faux fur boots mid-calf")) == "faux fur boots mid-calf"
    with pytest.raises(UsageError, match="not a state and an object"):
        runs.find_pair(labels, "fur")


def test_maps_are_repeatable(project):
    before = project.paths.maps("own").read_bytes()
    maps_stage(ProjectData(project.params, "own"))
    assert project.paths.maps("own").read_bytes() == before
    assert b"semantic" in before and b"star" in before


def test_the_maps_draw_all_kinds_of_points(project):
    """Figure 9 of the paper has squares, triangles and circles; figure 4 has three maps; figure 10 has stars."""
    table = pd.read_csv(project.paths.maps("own"))
    drawn = {}
    for name in ("prototypes", "before", "after", "semantic", "visual", "combined"):
        svg = ElementTree.parse(project.folder / f"artifacts/plots/figures/own-map-{name}.svg").getroot()
        shapes = [shape for shape in svg.iter() if shape.attrib.get("class") in ("cloud", "proto")]
        dots = sum(shape.attrib["d"].count("M") for shape in shapes if shape.attrib["class"] == "cloud")
        corners = [shape.attrib.get("d", "").count("L") for shape in shapes if shape.attrib["class"] == "proto"]
        drawn[name] = {"circles": dots, "squares": corners.count(0), "triangles": corners.count(2)}
        drawn[name]["stars"] = corners.count(9)
        counts = table[table["map"] == name]["kind"].value_counts()
        assert sum(drawn[name].values()) == counts.sum()
        assert drawn[name]["circles"] == counts.get("image", 0)
    classes = drawn["prototypes"]["squares"]
    assert classes == drawn["prototypes"]["triangles"] == drawn["before"]["stars"] == drawn["after"]["stars"] > 8
    pairs = drawn["semantic"]["squares"]
    assert pairs == drawn["visual"]["triangles"] == drawn["combined"]["squares"] > classes


def test_a_caption_names_what_the_map_draws(project):
    table = pd.read_csv(project.paths.maps("own"))
    with_squares = map_figures(table, "own")[0].caption
    without = map_figures(table[table["kind"] != "semantic"], "own")[0].caption
    assert "□" in with_squares and "△" in with_squares and "○" in with_squares
    assert "□" not in without and "△" in without


def test_swaps_compare_factors_joined_by_the_equation(project):
    run = runs.load_run_or_default(project.params, "own", None, None)
    context = run.retrieval_context()
    fusion = run.method.fusion
    states, objects = (torch.from_numpy(part) for part in (context.features.states, context.features.objects))

    @torch.no_grad()
    def phi(state, thing):
        return torch.relu(fusion.state.weight @ state + fusion.object.weight @ thing)

    swapped = phi(states[3], objects[8])
    expected = [float(torch.cosine_similarity(swapped, phi(*one), dim=0)) for one in zip(states, objects, strict=True)]
    assert swap_parts(context, "file.json")[1]["swap"]["questions"] > 0
    gallery = context.joined(states.numpy(), objects.numpy())
    _, cosines = nearest(context.joined(states[3:4].numpy(), objects[8:9].numpy()), gallery, 5)
    assert cosines[0].tolist() == pytest.approx(sorted(expected, reverse=True)[:5], abs=1e-5)


@pytest.mark.parametrize(
    ("featured", "chosen"), [(None, "duplex"), ("clip", "clip"), ("duplex_open", "duplex_open"), ("dual", "duplex")]
)
def test_the_featured_run_is_that_of_the_parameter(project, featured, chosen):
    """`dual` has no run: the rule for null applies, and the page says so."""
    params = project.params.model_copy(update={"report": ReportParams(featured=featured)})
    run = runs.featured_run(ProjectData(params, "own", project.paths))
    assert (run.method, run.seed) == (chosen, 0)
    assert ProjectData(params, "own").settings("inventory")["featured"] == featured
    parts, _ = report.image_parts(ProjectData(params, "own", project.paths))
    notes = [block.text for part in parts for block in part.blocks if isinstance(block, Note)]
    said = next(text for text in notes if "Everything below" in text)
    assert f"from {chosen}, seed 0" in said
    assert ("has no finished run" in said) == (featured == "dual")


def test_two_images_are_enough_for_maps():
    labels = LabelSpace.from_pairs({"train": [("red", "star")], "test": [("red", "moon")]})
    z = np.eye(2, 4, dtype=np.float32)
    book = np.ones((labels.size, 4), dtype=np.float32)
    rows = book.__getitem__
    scene = Scene(labels, np.array([0, 1]), z, z, rows, rows, rows)
    table = compute_tsne_maps(scene, lambda step: None)
    assert set(table["map"]) == {"prototypes", "before", "after", "semantic", "visual", "combined"}
    assert np.isfinite(table[["x", "y"]].to_numpy()).all()


def test_maps_leave_out_prototypes_that_are_still_empty():
    labels = LabelSpace.from_pairs({"train": [("red", "star")], "test": [("red", "star"), ("red", "moon")]})
    z = np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32)
    book = np.ones((labels.size, 4), dtype=np.float32)
    empty = book.copy()
    unseen = int(labels.index(["red"], ["moon"])[0])
    empty[unseen] = 0
    full = book.__getitem__
    scene = Scene(labels, np.resize(labels.pairs["test"], 12), z, z, full, empty.__getitem__, empty.__getitem__)
    table = compute_tsne_maps(scene, lambda step: None)
    shown = table[table["kind"].isin(["visual", "star"])]
    assert set(shown["label"]) == {"red star"} and np.isfinite(table[["x", "y"]].to_numpy()).all()
    assert set(table[table["kind"] == "semantic"]["label"]) == {"red star", "red moon"}


@pytest.mark.parametrize("world", ["closed", "open"])
def test_compare_equals_the_difference_of_metrics(command, project, world):
    words = ("compare", "--dataset", "own", "--methods", "clip", "duplex", "--world", world, "--json")
    found = json.loads(command(*words).out)
    assert found["seeds"] == [0, 1]
    rows = ("clip", {"closed": "duplex", "open": "duplex_open"}[world])  # shown as duplex in the open world
    records = [
        [json.loads(project.paths.run("own", row, seed).metrics.read_text())[world] for seed in (0, 1)] for row in rows
    ]
    before, after = ({name: np.mean([one[name] for one in both]) for name in NAMES} for both in records)
    assert tuple(found["difference"]) == NAMES
    for name, gain in found["difference"].items():
        assert gain["value"] == pytest.approx(after[name] - before[name], abs=1e-6)
        assert gain["interval"][0] <= gain["value"] <= gain["interval"][1]
    assert command("compare", "--dataset", "own", "--methods", "clip", "csp").code == 1
