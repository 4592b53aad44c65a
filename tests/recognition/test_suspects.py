"""Labels that were made wrong are found, and corrected without touching the original."""

from __future__ import annotations

import hashlib
from itertools import product
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.data.manifest import read_manifest
from duplex.errors import UsageError
from duplex.recognition.suspects import Way, margins
from tests.subprocesses import duplex


def clusters(count: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit features around a direction for each class."""
    random = np.random.default_rng(seed)
    own = np.arange(count) % classes
    z = random.normal(size=(classes, 16))[own] + 0.3 * random.normal(size=(count, 16))
    return z / np.linalg.norm(z, axis=1, keepdims=True), own


@pytest.mark.parametrize("way", ["run", "knn"])
def test_flipped_labels_come_first(way):
    features, own = clusters(200, 5, 0)
    wrong = np.array([3, 50, 120, 199])
    given = own.copy()
    given[wrong] = (own[wrong] + 1) % 5
    found = margins(features, given, way)
    assert set(np.argsort(found.margin)[:4]) == set(wrong)
    assert (found.better[wrong] == own[wrong]).all()


@given(st.integers(0, 10_000), st.integers(0, 59))
@settings(max_examples=25, deadline=None)
def test_an_image_never_speaks_for_itself(seed, row):
    """Whatever an image looks like, the scores of others' prototypes that judge it stay what they are: a twin."""
    features, own = clusters(60, 3, seed)
    found = margins(features, own, "run", seed=seed)
    fold = np.random.default_rng(seed).permutation(60) % 5
    rest = fold != fold[row]
    means = np.stack([features[rest & (own == k)].sum(0) for k in range(3)])
    scores = features[row] @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T
    others = np.delete(scores, own[row])
    assert found.margin[row] == pytest.approx(scores[own[row]] - others.max(), abs=1e-9)


def test_a_class_of_one_image_is_not_accused_by_the_lack_of_others():
    """Nor is one in a fold where it stands against nothing but such a class, which would be infinitely sure."""
    ways: tuple[Way, ...] = ("run", "knn")
    for way, classes in product(ways, (3, 1)):
        features, own = clusters(60, classes, 1)
        own[7] = 9
        found = margins(features, own, way)
        assert np.isfinite(found.margin).all() and found.margin[7] == 0
        assert (found.margin != 0).sum() == (59 if classes == 3 else 48)


@pytest.mark.parametrize(("count", "classes", "said"), [(5, 2, "too few"), (40, 1, "one label")])
def test_what_cannot_be_judged(count, classes, said):
    with pytest.raises(UsageError, match=said):
        margins(*clusters(count, classes, 0), "run")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["run", "knn"])
def test_the_list_the_page_and_back(project, tmp_path, way):
    manifest = project.paths.manifest("own")
    before = hashlib.sha256(manifest.read_bytes()).hexdigest()
    done = duplex("data", "suspects", "own", "--method", way, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "suspects.csv")
    assert sorted(table["image"]) == sorted(read_manifest(manifest)["image"])
    assert table["rank"].tolist() == list(range(1, len(table) + 1))
    page = (tmp_path / "suspects.html").read_text()
    assert page.count("data:image/jpeg") == min(200, len(table)) and "http" not in page

    first = table.iloc[0]
    edited = table.head(1).assign(state=first["better_state"], object="moon")
    edited.to_csv(tmp_path / "edited.csv", index=False)
    target = tmp_path / "corrected.csv"
    done = duplex("data", "relabel", "own", tmp_path / "edited.csv", "--out", target)
    assert done.returncode == 0, done.stderr
    new, old = read_manifest(target), read_manifest(manifest)
    changed = (new != old).any(axis=1)
    assert set(new["image"][changed]) <= {first["image"]}
    assert new.loc[new["image"] == first["image"], "object"].item() == "moon"
    assert hashlib.sha256(manifest.read_bytes()).hexdigest() == before
    assert duplex("data", "relabel", "own", tmp_path / "edited.csv", "--out", target).returncode == 2


def identify(cache: Path, key: str, value: bytes) -> bytes:
    """Change what a cache says of its encoder; what it said before."""
    with h5py.File(cache, "r+") as file:
        before = file["identity"].attrs[key]
        file["identity"].attrs[key] = np.bytes_(value)
    return before


def test_a_run_of_another_encoder(project, tmp_path):
    """Its features would say nothing, whatever their width."""
    path = project.paths.features("own")
    right = identify(path, "weights", b"0" * 64)
    try:
        done = duplex("data", "suspects", "own", "--run", project.run(), "--out", tmp_path)
    finally:
        identify(path, "weights", right)
    assert done.returncode == 2 and "another weights file" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("image,state\na,b\n", "no column 'object'"),
        ("image,state,object\nstrange.png,red,star\n", "is no image of own"),
        ("image,state,object\n{image},,star\n", "no state or no object"),
        ("image,state,object\n{image},red,star\n{image},red,star\n", "twice"),
    ],
)
def test_a_list_with_mistakes(project, tmp_path, text, said):
    image = read_manifest(project.paths.manifest("own"))["image"][0]
    (tmp_path / "edited.csv").write_text(text.format(image=image))
    done = duplex("data", "relabel", "own", tmp_path / "edited.csv", "--out", tmp_path / "new.csv")
    assert done.returncode == 2 and said in done.stderr
    assert not (tmp_path / "new.csv").exists()
