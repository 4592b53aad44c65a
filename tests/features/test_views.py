"""Views of training images: their crops, their cache, and the random views drawn from it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from zlib import crc32

import numpy as np
import open_clip
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.functional import to_tensor

from duplex.errors import DuplexError
from duplex.features.augmentation import Augmentation, box
from duplex.features.examples import SplitViews
from duplex.features.inspection import verify
from duplex.features.store import open_features
from duplex.features.tokens import DiskTokens, read_tokens

TWICE = Augmentation(2, flip=True)


def test_a_view_equals_open_clips_training_transform_of_the_same_crop(encoder, monkeypatch) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 130, 3), dtype=np.uint8))
    size = encoder.image_transform(picture).shape[-2:]
    left, upper, right, lower = box(np.random.default_rng([crc32(b"a.png"), 3]), *picture.size)
    monkeypatch.setattr(RandomResizedCrop, "get_params", lambda *_: (upper, left, lower - upper, right - left))
    theirs = open_clip.image_transform(size[0], is_train=True, mean=(0, 0, 0), std=(1, 1, 1))(picture)
    view = Augmentation(4, flip=False).view(picture, "a.png", 3, size)
    assert torch.equal(to_tensor(view), theirs)
    assert torch.equal(encoder.image_transform(view), (255 * theirs).round().to(torch.uint8))  # resized no more


def test_every_view_of_every_image_has_its_row(run, images: list[str], encoder, tmp_path: Path) -> None:
    """A naive twin: each image read, cropped and encoded by itself."""
    found = open_features(run(augmentation=TWICE).path)
    assert found.identity["views"] == "2" and found.identity["flip"] == "true" and len(found.cls) == 80
    for row in (0, 1, 37, 78):
        name = images[row // 2]
        picture = Image.open(tmp_path / "pictures" / name).convert("RGB")
        size = encoder.image_transform(picture).shape[-2:]
        pixels = encoder.image_transform(TWICE.view(picture, name, row % 2, size))
        with torch.no_grad():
            again = encoder.encode_images(pixels[None])[0].numpy()
        np.testing.assert_allclose(found.cls[row], again, rtol=2e-3, atol=2e-3)  # float16
    assert len(np.unique(found.cls, axis=0)) > 70  # two boxes of a small picture may be the same


def test_the_order_of_images_changes_no_view(run, images: list[str], tmp_path: Path) -> None:
    whole = run(tmp_path / "whole.h5", augmentation=TWICE).path
    turned = open_features(run(tmp_path / "turned.h5", augmentation=TWICE, images=images[::-1]).path)
    np.testing.assert_allclose(
        turned.cls.reshape(40, 2, -1)[::-1].reshape(80, -1), open_features(whole).cls, rtol=1e-2, atol=1e-3
    )


def test_a_cache_of_other_views_or_of_plain_images_is_refused(run) -> None:
    path = run(augmentation=TWICE).path
    with pytest.raises(DuplexError, match="holds views of training images, not the images"):
        open_features(path, {"manifest": "m" * 64})
    for other, word in ((Augmentation(3, flip=True), "number of views"), (Augmentation(2, flip=False), "mirrored")):
        with pytest.raises(DuplexError, match=f"another .*{word}"):
            open_features(path, {"manifest": "m" * 64, **other.identity})


def test_verify_compares_rows_with_their_views(run, images: list[str], encoder, tmp_path: Path) -> None:
    path, where = run(augmentation=TWICE).path, (tmp_path / "pictures", "m" * 64)
    assert verify(path, encoder, images, *where, TWICE, sample=80)["worst_cosine"] > 0.999
    with pytest.raises(DuplexError, match="is not"):  # the first half of the rows are not the first pictures'
        verify(path, encoder, images[::-1], *where, TWICE, sample=80)


def test_an_unreadable_image_is_bad_in_each_of_its_views(run, images: list[str], tmp_path: Path) -> None:
    (tmp_path / "pictures" / images[5]).write_bytes(b"no image")
    found = open_features(run(augmentation=TWICE, max_bad=0.1).path)
    assert np.flatnonzero(found.bad).tolist() == [10, 11]


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**32))
def test_a_draw_has_one_view_of_every_image(images: int, count: int, seed: int) -> None:
    rows = torch.arange(images * count, dtype=torch.float32)[:, None]
    drawn = SplitViews(count, {"cls": rows}).draw(torch.Generator().manual_seed(seed))["cls"][:, 0]
    assert (drawn.long() // count).tolist() == list(range(images))


def test_draws_follow_the_generator_and_reach_every_view() -> None:
    views, order = SplitViews(3, {"cls": torch.arange(12.0)[:, None]}), torch.Generator().manual_seed(1)
    draws = [tuple(views.draw(order)["cls"][:, 0].tolist()) for _ in range(60)]
    assert len(set(draws)) > 20 and len(Counter(one[2] for one in draws)) == 3
    again = torch.Generator().manual_seed(1)
    assert [tuple(views.draw(again)["cls"][:, 0].tolist()) for _ in range(60)] == draws


def test_views_on_the_disk_are_drawn_like_those_in_memory(run, encoder) -> None:
    path = run(augmentation=TWICE, block_inputs=1).path
    held, streamed = read_tokens(path, "block_inputs"), read_tokens(path, "block_inputs", limit=0)
    assert isinstance(streamed, DiskTokens)
    cls = torch.from_numpy(open_features(path).cls)
    one, other = (
        SplitViews(2, {"cls": cls, "block_inputs": deep}).draw(torch.Generator().manual_seed(4))
        for deep in (torch.from_numpy(held), streamed)
    )
    assert isinstance(other["block_inputs"], DiskTokens), "nothing is read before it is asked for"
    assert torch.equal(one["block_inputs"], other["block_inputs"][torch.arange(40)]) and torch.equal(
        one["cls"], other["cls"]
    )
    mixed = SplitViews(2, {"cls": cls, "block_inputs": streamed}).to(torch.device("cpu")).inputs["block_inputs"]
    assert isinstance(mixed, DiskTokens) and len(mixed) == 80
