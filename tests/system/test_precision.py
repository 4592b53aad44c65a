from typing import Any

import pytest
import torch

from duplex.encoders.base import load_encoder
from duplex.encoders.prompt_tree import PromptTree
from duplex.encoders.text import ClipTextTower
from duplex.system.threads import float32_arithmetic
from tests.encoders.small import write_folder
from tests.encoders.towers import small_model


def rounds() -> tuple[bool, bool]:
    """Whether convolutions and matrix products may round to TF32."""
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize(("precision", "rounded"), [("fp32", False), ("bf16", False), ("tf32", True)])
def test_tf32_is_set_inside_the_block_and_restored(precision: str, rounded: bool) -> None:
    before = rounds()
    with pytest.raises(ZeroDivisionError), float32_arithmetic(precision):
        assert rounds() == (rounded, rounded)
        _ = 1 / 0
    assert rounds() == before


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_both_towers_use_the_given_precision(precision: str, tmp_path: Any) -> None:
    encoder = load_encoder(write_folder(tmp_path), precision=precision)
    seen = []
    hooks = [
        encoder.visual.register_forward_hook(lambda *_: seen.append(rounds())),
        encoder.text.blocks[0].register_forward_hook(lambda *_: seen.append(rounds())),
        encoder.text.blocks[0].ln_1.register_forward_hook(lambda *_: seen.append(rounds())),
    ]
    encoder.encode_images(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    encoder.text.encode(PromptTree.of([[0, 1]]), torch.zeros(2, 16))
    encoder.text.encode_plain([[0, 1]], torch.zeros(2, 16))
    assert seen and set(seen) == {(precision == "tf32",) * 2}
    for hook in hooks:
        hook.remove()


def test_tf32_is_float32_where_there_is_no_gpu() -> None:
    model = small_model().float()
    lexicon, tree = model.token_embedding.weight.detach(), PromptTree.of([[1, 2, 3], [1, 2, 4]])
    exact, rounded = (ClipTextTower(model, precision=precision).encode(tree, lexicon) for precision in ("fp32", "tf32"))
    assert torch.equal(exact, rounded)
