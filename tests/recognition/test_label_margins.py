"""Wrong labels are found, and corrected in a copy of the list."""

import hashlib

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.data.tables import read_manifest
from duplex.errors import UsageError
from duplex.project.suspects import margins
from tests.subprocesses import duplex


def clusters(count: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    own = np.arange(count) % classes
    z = random.normal(size=(classes, 16))[own] + 0.3 * random.normal(size=(count, 16))
    return z / np.linalg.norm(z, axis=1, keepdims=True), own


def test_wrong_labels_have_the_lowest_margins():
    features, own = clusters(200, 5, 0)
    wrong = np.array([3, 50, 120, 199])
    given = own.copy()
    given[wrong] = (own[wrong] + 1) % 5
    result = margins(features, given)
    assert set(np.argsort(result.margin)[:4]) == set(wrong)
    assert (result.better[wrong] == own[wrong]).all()


@given(st.integers(0, 10_000), st.integers(0, 59))
@settings(max_examples=25, deadline=None)
def test_an_image_does_not_affect_its_own_scores(seed, row):
    """A naive twin: prototypes from the other folds only."""
    features, own = clusters(60, 3, seed)
    result = margins(features, own, seed=seed)
    fold = np.random.default_rng(seed).permutation(60) % 5
    rest = fold != fold[row]
    means = np.stack([features[rest & (own == k)].sum(0) for k in range(3)])
    scores = features[row] @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T
    others = np.delete(scores, own[row])
    assert result.margin[row] == pytest.approx(scores[own[row]] - others.max(), abs=1e-9)


def test_a_class_of_one_image_has_margin_zero():
    """So has an image whose other folds have no other class; its margin would be infinite."""
    for classes in (3, 1):
        features, own = clusters(60, classes, 1)
        own[7] = 9
        result = margins(features, own)
        assert np.isfinite(result.margin).all() and result.margin[7] == 0
        assert (result.margin != 0).sum() == (59 if classes == 3 else 48)


@pytest.mark.parametrize(("count", "classes", "message"), [(5, 2, "too few"), (40, 1, "the same label")])
def test_too_few_images_or_labels_are_reported(count, classes, message):
    with pytest.raises(UsageError, match=message):
        margins(*clusters(count, classes, 0))


@pytest.mark.slow
def test_the_list_the_page_and_the_corrected_copy(project, tmp_path):
    manifest = project.paths.manifest("own")
    before = hashlib.sha256(manifest.read_bytes()).hexdigest()
    done = duplex("suspects", "own", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "suspects.csv")
    assert sorted(table["image"]) == sorted(read_manifest(manifest)["image"])
    assert table["rank"].tolist() == list(range(1, len(table) + 1))
    page = (tmp_path / "suspects.html").read_text()
    assert page.count("data:image/jpeg") == min(200, len(table)) + 24 and "http" not in page

    first = table.iloc[0]
    edited = table.head(1).assign(state=first["better_state"], object="moon")
    edited.to_csv(tmp_path / "edited.csv", index=False)
    target = tmp_path / "corrected.csv"
    done = duplex("relabel", "own", tmp_path / "edited.csv", "--out", target)
    assert done.returncode == 0 and f"wrote {target} with 1 corrected labels;" in done.stderr, done.stderr
    assert " --encoder " in done.stderr
    new, old = read_manifest(target), read_manifest(manifest)
    changed = (new != old).any(axis=1)
    assert set(new["image"][changed]) <= {first["image"]}
    assert new.loc[new["image"] == first["image"], "object"].item() == "moon"
    assert hashlib.sha256(manifest.read_bytes()).hexdigest() == before
    assert duplex("relabel", "own", tmp_path / "edited.csv", "--out", target).returncode == 2
    edited.assign(split={"train": "val"}.get(first["split"], "train")).to_csv(tmp_path / "moved.csv", index=False)
    done = duplex("relabel", "own", tmp_path / "moved.csv", "--out", tmp_path / "moved-copy.csv")
    assert done.returncode == 2 and "and 'own' give " in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image,state,object\nstrange.png,red,star\n", "is not an image of 'own'"),
        ("image,state,object\n{image},red,star\n{image},red,star\n", "twice"),
        ("image,state,object,better_state\n{image},{state},{object},old\n", "changes no label of 'own'"),
    ],
)
def test_mistakes_in_an_edited_list_are_reported(project, command, tmp_path, text, message):
    (tmp_path / "edited.csv").write_text(text.format(**read_manifest(project.paths.manifest("own")).iloc[0]))
    assert command("relabel", "own", tmp_path / "edited.csv", "--out", "new.xlsx").refused("does not end in .csv")
    assert command("relabel", "own", tmp_path / "edited.csv", "--out", tmp_path / "new.csv").refused(message)
    assert not (tmp_path / "new.csv").exists()
