"""Images are encoded to a model's inputs only if the encoder returns usable features."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from duplex.encoders.base import Encoder, load_encoder
from duplex.errors import UsageError
from duplex.features.encode import OutputSpec
from duplex.recognition.recognizer import encode
from tests.features.conftest import Wrapped


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda cls: cls * 0, UsageError, "image 0 cannot be used: features all zero"),
        (lambda cls: cls / 0, UsageError, "image 0 cannot be used: features not finite"),
    ],
)
def test_unusable_features_are_an_error(change, error, message) -> None:
    tiny = load_encoder("tiny", towers="image")
    pixels = torch.randint(0, 256, (2, *tiny._pixel_shape), dtype=torch.uint8)  # type: ignore[attr-defined]
    wrong = Wrapped(tiny, lambda batch: change(tiny.encode_images(batch)))
    with pytest.raises(error, match=message):
        encode(cast(Encoder, wrong), pixels, outputs=OutputSpec())
