"""What frozen blocks compute once for all images is what they compute in each step, rounded to float16."""

import numpy as np
import pytest
import torch

from duplex.encoders.base import load_encoder
from duplex.encoders.image_blocks import capture_block_input
from duplex.training import frozen_blocks
from duplex.training.frozen_blocks import advanced_inputs, advanced_pixels

PIXELS = torch.randint(0, 256, (5, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()


def test_frozen_blocks_run_once_from_pixels_and_from_earlier_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_blocks, "AT_ONCE", 2)
    tower = load_encoder("tiny", towers="image")
    stored = {}
    for blocks in (2, 4):
        with capture_block_input(tower, blocks) as inputs:
            tower.encode_images(torch.from_numpy(PIXELS))
        stored[blocks] = inputs[0].half().numpy()
    found = advanced_pixels(PIXELS, tower, 2, "fp32", 1e9)
    assert found is not None and found.dtype == np.float16
    np.testing.assert_allclose(found.astype(np.float32), stored[2], rtol=2e-3, atol=1e-3)
    later = advanced_inputs(stored[4], tower, 4, 2, "fp32")
    np.testing.assert_allclose(later.astype(np.float32), stored[2], rtol=1e-2, atol=2e-2)
    rounded = advanced_pixels(PIXELS, tower, 2, "bf16", 1e9)
    assert rounded is not None and not np.array_equal(rounded, found)
    np.testing.assert_allclose(rounded.astype(np.float32), stored[2], atol=0.1 * np.abs(stored[2]).max())


def test_inputs_that_memory_or_float16_cannot_hold_are_left_to_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = load_encoder("tiny", towers="image")
    found = advanced_pixels(PIXELS, tower, 2, "fp32", 1e9)
    assert found is not None
    assert advanced_pixels(PIXELS, tower, 2, "fp32", found.nbytes - 1) is None
    assert advanced_pixels(PIXELS, tower, 2, "fp32", found.nbytes) is not None
    monkeypatch.setattr(
        frozen_blocks, "stem", lambda _: lambda pixels: torch.full((len(pixels), 48, 16, 16), torch.inf)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frozen_blocks, "last_blocks", lambda *_: type("Cut", (), {"blocks": [torch.nn.Identity()] * 4}))
        assert advanced_pixels(PIXELS, tower, 2, "fp32", 1e9) is None
