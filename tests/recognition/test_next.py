"""`duplex next`: unlabelled images, those first whose labels help most; labelled, they update the model."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex import Recognizer, fit, load_dataset
from duplex.errors import UsageError
from duplex.features import shared
from duplex.project.suspects import in_labelling_order, rank_unlabelled
from duplex.recognition import fit as fitting
from duplex.system.files import sha256
from tests.recognition.drawn_folder import draw_folder, draw_pair
from tests.recognition.searches import only_the_first
from tests.subprocesses import duplex

ANSWERS = st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1, width=16), st.booleans()), min_size=1, max_size=12)


@given(ANSWERS)
def test_one_image_of_each_answer_comes_before_the_second_of_any(rows):
    """A naive twin: take the first of each answer, least certain first, then the second of each."""
    table = in_labelling_order(pd.DataFrame(rows, columns=["answer", "margin", "in_distribution"]))
    left = sorted(rows, key=lambda row: row[1] if row[2] else 0.0)
    wanted = []
    while left:
        first = [row for place, row in enumerate(left) if row[0] not in {each[0] for each in left[:place]}]
        wanted += first
        for row in first:
            left.remove(row)
    np.testing.assert_allclose(table["margin"], [row[1] for row in wanted], atol=1e-6)
    assert table["answer"].tolist() == [row[0] for row in wanted]
    assert table["rank"].tolist() == list(range(1, len(rows) + 1))


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unlabelled") / "box"
    for state, thing in (("red", "star"), ("blue", "heart"), ("green", "cloud")):
        draw_pair(folder, state, thing, range(50, 56))
    return folder


@pytest.mark.slow
def test_features_are_cached_and_answers_are_the_models(drawn, unlabelled, tmp_path, monkeypatch):
    run = fit(load_dataset(drawn, encoder="tiny", block_inputs=2), "dual", epochs=1, finetune=2)
    recognizer = Recognizer.load(run.save(tmp_path / "run"), device="cpu", exact=True)
    first = rank_unlabelled(recognizer, unlabelled)
    monkeypatch.setattr(shared, "extract", None)  # nothing is encoded again
    excluded = {sha256(unlabelled / image) for image in first["image"][:3]}
    assert len(first) == 18
    assert set(rank_unlabelled(recognizer, unlabelled, excluded)["image"]) == set(first["image"][3:])
    for row, answer in zip(
        first.to_dict("records"), recognizer([unlabelled / image for image in first["image"]]), strict=True
    ):
        assert row["answer"] == answer.best.name and row["in_distribution"] == answer.in_distribution
        assert row["margin"] == pytest.approx(answer.top[0].probability - answer.top[1].probability, abs=1e-3)


@pytest.mark.slow
def test_listed_images_are_labelled_and_update_the_model(unlabelled, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting.FolderFit, "search", only_the_first)
    drawn = draw_folder(tmp_path / "shop", images=6)
    model = fitting.fit_folder(drawn, tmp_path / "model", encoder="tiny", say=lambda _: None)
    (unlabelled / "copy.png").write_bytes(next(drawn.glob("*/*/*.png")).read_bytes())
    (unlabelled / "broken.png").write_bytes(b"nothing")
    done = duplex("next", model, unlabelled, "--count", 5, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 of 19 files cannot be used, such as broken.png (not an image)" in done.stderr
    table = tmp_path / "box-next.csv"
    listed = pd.read_csv(table, dtype=str, keep_default_na=False)
    assert [line.split()[0] for line in done.stdout.splitlines()] == listed["rank"].tolist() == list("12345")
    assert listed["answer"].nunique() >= 4 and "copy.png" not in set(listed["image"])
    again = duplex("next", model, unlabelled, cwd=tmp_path)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1) and "--force" in again.stderr
    forgotten = duplex("update", model, table, "--images", unlabelled, cwd=tmp_path)
    assert (forgotten.returncode, forgotten.stderr.count("\n")) == (2, 1) and "state is empty" in forgotten.stderr
    words = listed["image"].str.split("/", expand=True)
    listed.assign(state=words[0], object=words[1]).to_csv(table, index=False)
    updated = duplex("update", model, table, "--images", unlabelled, cwd=tmp_path)
    assert updated.returncode == 0, updated.stderr
    assert "images added: 5" in updated.stderr


def test_folders_without_new_images_are_refused_in_one_line(trained, tmp_path):
    recognizer = Recognizer.load(trained.run(), device="cpu")
    with pytest.raises(UsageError, match="holds no images; give a folder of unlabelled images"):
        rank_unlabelled(recognizer, tmp_path)
    (tmp_path / "broken.png").write_bytes(b"nothing")
    with pytest.raises(
        UsageError, match=r"1 of 1 files cannot be used, such as broken\.png .*; give a folder of readable images"
    ):
        rank_unlabelled(recognizer, tmp_path)
    done = duplex("next", trained.run(), tmp_path / "none", cwd=trained.folder)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "there is no folder" in done.stderr
