"""The activations that a plan counts are those that autograd keeps."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from duplex.options import FinetuneOptions, TrainingOptions
from duplex.project.estimate import BlockCosts, kept_bytes
from tests.encoders.test_image_blocks import tower


def test_each_kept_storage_counts_once_and_weights_do_not() -> None:
    frozen = nn.Linear(8, 4).requires_grad_(False)
    x = torch.randn(5, 8, requires_grad=True)
    with kept_bytes(frozen) as count:
        y = frozen(x)  # keeps its weight alone
        assert count() == 0
        z = y.sigmoid()  # keeps its output, 5 x 4 numbers
        (z * z).sum()  # keeps the same output twice
    assert count() == 4 * 5 * 4
    with kept_bytes() as count:
        frozen(x)
    assert count() == 4 * 8 * 4


@pytest.mark.parametrize("adapter", ["parallel", "full"])
def test_activations_of_blocks_grow_with_the_batch_and_halve_in_bf16(adapter: Any) -> None:
    encoder, _ = tower("OpenAI ViT")
    encoder.device = torch.device("cpu")
    encoder.image_transform = lambda _: torch.zeros(3, 32, 32)
    encoder.encode_images = encoder.visual
    costs = BlockCosts(encoder)

    def counted(batch: int, precision: Any) -> int:
        training = TrainingOptions(learning_rate=1.0e-3, batch_size=batch, epochs=1, precision=precision)
        spec: Any = SimpleNamespace(finetune=FinetuneOptions(2, adapter), training=training)
        return costs.activations(spec)

    one, two, many = (counted(batch, "fp32") for batch in (1, 2, 9))
    assert 0 < one < two and many - two == 7 * (two - one)
    saved = (counted(9, "bf16") - counted(1, "bf16")) / (many - one)
    assert 0.3 < saved < 0.9, "residuals stay float32"
    spec: Any = SimpleNamespace(finetune=None)
    assert costs.activations(spec) == 0
