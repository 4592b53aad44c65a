"""Layers that several methods use, by loops."""

import numpy as np
import pytest
import torch

from duplex.methods.families import CrossAttention, WordTable, next_partner_in_batch
from duplex.methods.layers import Bottleneck, CompositionIndex, Mlp, copy_to_device, mean_over, unit
from tests.methods.loops import attend, close, mlp
from tests.methods.world import features
from tests.pretended import Pretended

DIM, INSIDE, HEADS = 8, 7, 2


def rows(count: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


@pytest.mark.parametrize("batched_x", [False, True])
@pytest.mark.parametrize("batched_y", [False, True])
def test_attention_equals_loops(batched_x, batched_y):
    torch.manual_seed(0)
    part = CrossAttention(DIM, INSIDE, HEADS, zero_output=False).double()
    x, y = rows(1, *[3] * batched_x, 5, DIM), rows(2, *[3] * batched_y, 4, INSIDE)
    read, weights = part(x, y)
    if not batched_x and not batched_y:
        x, y, read, weights = x[None], y[None], read[None], weights[None]
    for i in range(len(read)):
        queries, keys = x[i if batched_x else ...].reshape(5, DIM), y[i if batched_y else ...].reshape(4, INSIDE)
        expected, shares = zip(*(attend(part, query, keys) for query in queries), strict=True)
        close(read[i].detach(), torch.stack(expected))
        close(weights[i].detach(), shares)


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


def test_a_bottleneck_treats_each_cell_alike_in_maps_and_in_lists_of_tokens():
    torch.manual_seed(0)
    layer = Bottleneck(4, 3, 0.5).eval()
    torch.nn.init.normal_(layer.up.weight)
    tokens = torch.randn(2, 6, 4)
    expected = torch.stack([layer.up(torch.relu(layer.down(row))) for image in tokens for row in image]).view(2, 6, 4)
    torch.testing.assert_close(layer(tokens), expected)
    maps = tokens.view(2, 2, 3, 4).movedim(-1, 1)  # [B, C, h, w]
    torch.testing.assert_close(layer(maps), expected.view(2, 2, 3, 4).movedim(-1, 1))


@pytest.mark.parametrize("shape", [(), (5,), (2, 5)])
def test_means_are_by_state_and_by_object(shape):
    columns = CompositionIndex(np.array([0, 1, 2, 5]), 3)  # of state 2 there are none
    rows = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    by_state, by_object = columns.means(rows, 3, 3)
    close(by_state, torch.stack([rows[:3].mean(0), rows[3], torch.zeros(shape)]))
    close(by_object, torch.stack([rows[0], rows[1], rows[2:].mean(0)]))
    close(mean_over(rows, columns.objects, 3), by_object)


def test_index_arrays_are_copied_to_a_device_unchanged(pretended: Pretended) -> None:
    lists = np.array([3, 1]), np.empty(0, dtype=np.int64), np.array([7, 8, 9])
    for device in map(torch.device, ("cpu", pretended.name, "meta")):
        copies = copy_to_device(device, *lists)
        assert [(tensor.device.type, len(tensor)) for tensor in copies] == [(device.type, n) for n in (2, 0, 3)]
        if device.type != "meta":  # without pinned memory, and without values
            assert [tensor.cpu().tolist() for tensor in copies] == [array.tolist() for array in lists]


@pytest.mark.parametrize("trained", [True, False])
def test_word_tables_start_at_the_normalised_vectors(trained):
    states, objects = features(4, 1), features(3, 2)
    table = WordTable(states, objects, trained=trained)
    assert table.width == 8 and len(list(table.parameters())) == (2 if trained else 0)
    assert set(table.state_dict()) == {"states", "objects"}
    for rows, vectors in ((table.states, states), (table.objects, objects)):
        torch.testing.assert_close(rows.detach(), (vectors / vectors.norm(dim=1, keepdim=True)).float())


@pytest.mark.parametrize("seed", range(1, 5))
def test_the_next_allowed_partner_equals_loops(seed):
    count = seed
    allowed = torch.rand(count, count, generator=torch.Generator().manual_seed(seed)) < 0.4
    partner, has = next_partner_in_batch(allowed)
    for i in range(count):
        after = [(i + step) % count for step in range(1, count) if allowed[i, (i + step) % count]]
        assert (int(partner[i]), bool(has[i])) == ((after[0], True) if after else (i, False))
