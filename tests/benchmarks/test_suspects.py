import numpy as np
import pytest

from benchmarks import suspects
from benchmarks.suspects import SEEDS, at, ceilings, copies_found, flip, table
from tests.methods.world import small_labels
from tests.recognition.drawn_folder import draw_folder

LABELS = small_labels()


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_a_flipped_image_gets_another_pair_of_its_split(share):
    split = np.array(["train", "test"] * 50)
    before = np.array([LABELS.pairs[name][place % len(LABELS.pairs[name])] for place, name in enumerate(split)])
    own = before.copy()
    wrong = flip(own, LABELS, split, share, np.random.default_rng(0))
    assert wrong.sum() == 100 * share
    assert ((own != before) == wrong).all()
    assert all(pair in LABELS.pairs[name] for pair, name in zip(own, split, strict=True))


def test_shares_among_the_first_of_a_list():
    perfect = np.minimum(np.arange(101) / 5, 1)  # five flipped among a hundred, all of them first
    assert (at(perfect, 0.05), at(perfect, 0.02)) == (1.0, 0.4)
    assert table(np.stack([perfect] * SEEDS)) == {"first_5%": [100.0, 100.0, 100.0], "first_20%": [100.0, 100.0, 100.0]}
    assert ceilings(0.2) == {"first_5%": 25.0, "first_20%": 100.0}


def test_copies_of_drawn_images_are_found(tmp_path, monkeypatch):
    draw_folder(tmp_path, 1)
    monkeypatch.setattr(suspects, "COPIES", 12)
    found = copies_found(tmp_path)
    assert found["images"] == 22 and found["found"] > 90 and found["false"] == 0
