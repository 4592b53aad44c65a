from __future__ import annotations

import pytest
import torch

from duplex.methods.paths import Bottleneck, Fusion, Mlp, unit
from tests.methods.loops import close, mlp
from tests.methods.world import features


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_unit_features_are_at_least_float32(dtype: torch.dtype) -> None:
    z = (100 * features(5, 3)).to(dtype)
    found = unit(z)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), z.double() / z.double().norm(dim=1, keepdim=True), rtol=0, atol=1e-6)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_a_perceptron_has_the_given_number_of_hidden_layers(layers):
    perceptron, z = Mlp(8, 6, 4, layers, 0.5).double().eval(), features(3, 0)
    assert len(perceptron) == 4 * layers + 1
    close(perceptron(z).detach(), torch.stack([mlp(perceptron, row).detach() for row in z]))


@pytest.mark.parametrize("rectified", [True, False])
def test_fusion_equals_loops(rectified):
    torch.manual_seed(0)
    fusion = Fusion(5, rectified=rectified).double() if not rectified else Fusion(5).double()
    z_s, z_o = torch.randn(3, 5).double(), torch.randn(3, 5).double()
    by_state, by_object = fusion.state.weight.tolist(), fusion.object.weight.tolist()
    for row, s, o in zip(fusion(z_s, z_o).detach(), z_s.tolist(), z_o.tolist(), strict=True):
        joined = [
            sum(a * x for a, x in zip(m, s, strict=True)) + sum(b * y for b, y in zip(n, o, strict=True))
            for m, n in zip(by_state, by_object, strict=True)
        ]
        kept = [max(0.0, value) for value in joined] if rectified else joined
        length = sum(value * value for value in kept) ** 0.5
        torch.testing.assert_close(row, torch.tensor([value / length for value in kept], dtype=torch.float64))


def test_a_bottleneck_treats_each_cell_alike_in_maps_and_in_lists_of_tokens():
    torch.manual_seed(0)
    layer = Bottleneck(4, 3, 0.5).eval()
    torch.nn.init.normal_(layer.up.weight)
    tokens = torch.randn(2, 6, 4)
    expected = torch.stack([layer.up(torch.relu(layer.down(row))) for image in tokens for row in image]).view(2, 6, 4)
    torch.testing.assert_close(layer(tokens), expected)
    maps = tokens.view(2, 2, 3, 4).movedim(-1, 1)  # [B, C, h, w]
    torch.testing.assert_close(layer(maps), expected.view(2, 2, 3, 4).movedim(-1, 1))
