import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from duplex.data import shapes
from duplex.data.shapes import ABSENT, OBJECTS, SEEN, STATES, UNSEEN, draw, render_images, shapes_manifest
from duplex.data.tables import COLUMNS, read_manifest, write_manifest
from duplex.errors import DuplexError
from tests.data.makers import encoded
from tests.data.test_split import pairs_of

seeds = st.integers(0, 2**32)
POWERS = {  # mean squares of the pixels of drawn images, over 255
    "red": 32.740, "green": 31.150, "blue": 30.505, "yellow": 38.044, "dark": 3.535, "faded": 41.401,
    "striped": 31.344, "dotted": 29.360, "checkered": 34.090, "hollow": 40.499, "blurry": 30.436, "tiny": 43.582,
    "broken": 27.166, "glossy": 32.796, "furry": 37.806, "melted": 35.176,
}  # fmt: skip


@settings(max_examples=8, deadline=None)
@given(seeds)
def test_splits_are_what_the_benchmark_promises(seed):
    frame = shapes_manifest(seed)
    train, val, test = (pairs_of(frame)[split] for split in ("train", "val", "test"))
    assert list(frame.columns) == COLUMNS
    assert len(val - train) == len(test - train) == UNSEEN
    assert len(val & train) == len(test & train) == SEEN
    assert not (val - train) & (test - train)
    assert len(STATES) * len(OBJECTS) - len(train | val | test) == ABSENT == len(STATES) * len(OBJECTS) // 4
    assert not frame["image"].duplicated().any()
    for position, names in enumerate((STATES, OBJECTS)):
        assert all(sum(pair[position] == name for pair in train) >= 2 for name in names)
    rows = frame[frame["split"] == "train"]
    counts = rows.groupby(["state", "object"]).size().sort_values(ascending=False).to_numpy()
    assert 2000 <= len(rows) <= 4000
    assert counts[0] >= 10 * counts[-1] > 0
    assert counts[: len(counts) // 5].sum() > 0.5 * counts.sum(), "a long tail"
    assert all(1000 <= (frame["split"] == split).sum() <= 1500 for split in ("val", "test"))


def test_the_same_seed_gives_the_same_file(tmp_path):
    for name in ("one.csv", "two.csv"):
        write_manifest(shapes_manifest(3), tmp_path / name)
    assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "two.csv").read_bytes()
    pd.testing.assert_frame_equal(read_manifest(tmp_path / "one.csv"), shapes_manifest(3), check_dtype=False)
    assert not shapes_manifest(3).equals(shapes_manifest(4))


def test_a_smaller_benchmark_keeps_its_pairs():
    whole, small = shapes_manifest(), shapes_manifest(scale=0.05)
    assert len(small) < 0.1 * len(whole)
    assert pairs_of(small) == pairs_of(whole)


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(STATES), st.sampled_from(OBJECTS), st.integers(0, 9999), seeds)
def test_an_image_depends_on_seed_and_name_alone(state, kind, number, seed):
    name = f"{state}_{kind}/{number:04d}.png"
    first = encoded(draw(name, seed))
    np.random.default_rng(0).random()
    draw("red_star/0000.png", seed)
    assert encoded(draw(name, seed)) == first
    assert encoded(draw(name, seed + 1)) != first
    assert encoded(draw(f"{state}_{kind}/{number + 1:04d}.png", seed)) != first


@pytest.mark.parametrize("state", STATES)
def test_images_are_drawn_as_those_of_the_published_tables(state):
    """Changed drawings would be another benchmark: three images of each object."""
    images = [draw(f"{state}_{kind}/{number:04d}.png") for kind in OBJECTS for number in (1, 2, 3)]
    assert np.square(np.asarray(images, np.float64)).mean() / 255 == pytest.approx(POWERS[state], abs=0.003)


@pytest.mark.parametrize("name", ["red_dog/0001.png", "wet_star/0001.png", "0001.png", "redstar/0001.png"])
def test_a_name_outside_the_benchmark_is_refused(name):
    with pytest.raises(DuplexError, match="the data set shapes has no image"):
        draw(name)


def test_rendering_writes_what_is_missing_in_any_order(tmp_path):
    frame = shapes_manifest(scale=0.02).sample(12, random_state=0)
    assert render_images(frame, tmp_path / "a") == 12
    assert render_images(frame.iloc[::-1], tmp_path / "b") == 12
    for name in frame["image"]:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert np.array_equal(np.asarray(Image.open(tmp_path / "a" / name)), np.asarray(draw(name)))
    (tmp_path / "a" / frame["image"].iloc[3]).unlink()
    assert render_images(frame, tmp_path / "a") == 1
    assert (tmp_path / "a" / frame["image"].iloc[3]).is_file()
    assert not list(tmp_path.rglob("*.partial"))


def test_images_of_another_seed_or_drawing_are_redrawn(tmp_path, monkeypatch):
    frame = shapes_manifest(scale=0.02).sample(4, random_state=0)
    name = frame["image"].iloc[0]
    assert [render_images(frame, tmp_path, seed) for seed in (1, 1, 2)] == [4, 0, 4]
    assert np.array_equal(np.asarray(Image.open(tmp_path / name)), np.asarray(draw(name, 2)))
    monkeypatch.setattr(shapes, "_stamp", lambda seed: f"another drawing, seed {seed}")
    assert [render_images(frame, tmp_path, 2) for _ in range(2)] == [4, 0]


def test_a_killed_redraw_is_not_believed(tmp_path, monkeypatch):
    frame = shapes_manifest(scale=0.02).sample(4, random_state=0)
    render_images(frame, tmp_path, 1)

    def killed(names, *_):
        yield names[0]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shapes, "track", killed)
        render_images(frame, tmp_path, 2)
    assert render_images(frame, tmp_path, 1) == 4
    for name in frame["image"]:
        assert np.array_equal(np.asarray(Image.open(tmp_path / name)), np.asarray(draw(name, 1)))
