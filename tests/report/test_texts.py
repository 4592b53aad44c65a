"""Image-to-text retrieval equals plain loops over the prototypes, and is shown on the page."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from duplex.features.tokens import Examples
from duplex.methods.base import Inspectable
from duplex.methods.registry import make_method, parse_options
from duplex.project.run import ProjectRun
from duplex.project.runs import load_run
from duplex.report.images import RetrievalContext, RetrievedTexts, nearest_texts, prototype_hits, retrieve_texts
from tests.methods.world import DIM, batch_of, features, small_context, small_labels
from tests.report.reading import Page, cited

LABELS = small_labels()
CLOSED = LABELS.candidates("closed", "test").tolist()
OWN = np.resize(LABELS.pairs["test"], 9)
BOOK = features(LABELS.size, 3).float()  # a text of every composition


def context_of(method: Inspectable, z: Tensor) -> RetrievalContext:
    """Nine test images, at rows of the manifest from 20."""
    test = Examples(np.arange(20, 20 + len(OWN)), {"cls": z}, torch.from_numpy(OWN))
    return RetrievalContext(method, LABELS, test, [f"{row}.png" for row in test.rows], lambda image: None)


def plain_texts(z: Any, rows: Any, columns: list[int]) -> list[list[tuple[float, int]]]:
    """Every cosine by hand, sorted."""
    found = []
    for image in np.asarray(z, dtype=float):
        scored = []
        for composition, row in zip(columns, np.asarray(rows, dtype=float), strict=True):
            lengths = math.sqrt(sum(v * v for v in image)) * math.sqrt(sum(v * v for v in row))
            scored.append((sum(a * b for a, b in zip(image, row, strict=True)) / lengths, composition))
        found.append(sorted(scored, key=lambda pair: -pair[0])[:3])
    return found


def reader(scale: float = 1.0, **more: Any) -> Inspectable:
    return Inspectable(lambda inputs: scale * inputs["cls"], lambda compositions: BOOK[compositions], **more)


@given(st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_the_nearest_texts_equal_sorting_by_cosine(seed: int) -> None:
    z = features(len(OWN), seed).float()
    found = nearest_texts(context_of(reader(scale=2.5), z))
    assert found is not None
    expected = plain_texts(z, BOOK[CLOSED], CLOSED)
    assert found[0].tolist() == [[composition for _, composition in line] for line in expected]
    np.testing.assert_allclose(found[1], [[cosine for cosine, _ in line] for line in expected], atol=1e-6)


def test_lines_and_shares_equal_plain_loops() -> None:
    z = BOOK[OWN] + 1.5 * features(len(OWN), 8).float()
    texts = retrieve_texts(context_of(reader(), z), "some.json")
    expected = plain_texts(z, BOOK[CLOSED], CLOSED)
    assert sorted(texts.lines) == list(range(20, 29))
    for i, line in enumerate(expected):
        said = [(one.text, one.right) for one in texts.lines[20 + i]]
        assert said == [(f"{cosine:.3f} {LABELS.name(c)}", c == OWN[i]) for cosine, c in line]
    among = [own in [c for _, c in line] for own, line in zip(OWN, expected, strict=True)]
    first = [own == line[0][1] for own, line in zip(OWN, expected, strict=True)]
    assert 0 < sum(first) < sum(among)
    for name, right in (("first", first), ("among_three", among)):
        for kind, seen in (("seen", (True,)), ("unseen", (False,)), ("all", (True, False))):
            some = [hit for hit, own in zip(right, OWN, strict=True) if bool(LABELS.seen[own]) in seen]
            assert texts.numbers["texts"][name][kind] == pytest.approx(100 * sum(some) / len(some))


def test_texts_are_compared_in_the_text_space_of_the_method() -> None:
    """Visual prototypes are compared in another space, where the features have the opposite sign."""
    z = BOOK[OWN]
    method = reader(
        scale=-1.0, visual=lambda compositions: -BOOK[compositions], text_space_features=lambda inputs: inputs["cls"]
    )
    viewing = context_of(method, z)
    found = nearest_texts(viewing)
    assert found is not None
    assert (found[0][:, 0] == OWN).all()
    for hits in prototype_hits(viewing, int(OWN[2]), 1).values():
        assert hits[0].right and hits[0].cosine == pytest.approx(1)


@pytest.mark.parametrize(
    ("kind", "row"), [("closed_form", {"losses": [], "inference": ["gaussian"], "adapter": "none"}), ("plid", {})]
)
def test_kinds_without_semantic_prototypes_have_no_texts(kind: str, row: dict[str, Any]) -> None:
    method = make_method(kind, parse_options(kind, row), small_context())
    method.start(batch_of(features(30, 5).float(), np.resize(LABELS.pairs["train"], 30)))
    viewing = context_of(method.inspectable(), features(len(OWN), 1).float())
    assert viewing.features.z is not None and viewing.features.z.shape == (len(OWN), DIM)
    assert retrieve_texts(viewing, "some.json") == RetrievedTexts()


def test_the_page_shows_the_nearest_texts_of_its_examples(project) -> None:
    page = Page(project.page.read_text(encoding="utf-8"))
    source = load_run(ProjectRun("own", "duplex", 0, project.params, project.paths))
    method, labels, test = source.method.inspectable(), source.inputs.labels, source.inputs.examples["test"]
    columns = labels.candidates("closed", "test")
    expected = plain_texts(method.features(test.inputs), method.semantic(columns), columns.tolist())
    lists = {
        (labels.name(own), *(f"{cosine:.3f} {labels.name(c)}" for cosine, c in line))
        for own, line in zip(test.compositions.tolist(), expected, strict=True)
    }
    shown = 0
    for thumb in (e for e in page.all("li") if e.attributes.get("class") == "thumb"):
        inside = [e for e in page.all("span") if e.parents[-1] is thumb]
        lines = [e.text for e in inside if e.attributes["class"].startswith("thumb-line")]
        if "text alone:" in lines:
            label = next(e.text for e in inside if e.attributes["class"] == "thumb-name")
            marked = (line.split("\xa0")[0].split(" ✓")[0] for line in lines[lines.index("text alone:") + 1 :])
            assert (label, *marked) in lists
            shown += 1
    assert shown > 8
    cells = [e for e in page.all("td") if "#/texts/" in e.attributes.get("data-from", "")]
    assert len(cells) == 6
    right = [line[0][1] == own for own, line in zip(test.compositions.tolist(), expected, strict=True)]
    assert cited("artifacts/report/retrieval-own.json#/texts/first/all") == pytest.approx(100 * np.mean(right))
