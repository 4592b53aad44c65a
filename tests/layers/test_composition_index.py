"""Perceptrons, tables of words and lists of compositions, each by loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from duplex.layers.composition_index import Columns, Composer, Mlp, WordTable, mean_over
from tests.methods.field import close, linear, mlp
from tests.methods.world import features


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_a_perceptron_has_so_many_hidden_layers(layers):
    made, z = Mlp(8, 6, 4, layers, 0.5).double().eval(), features(3, 0)
    assert len(made) == 4 * layers + 1
    close(made(z).detach(), torch.stack([mlp(made, row).detach() for row in z]))


@pytest.mark.parametrize("trained", [True, False])
def test_words_start_as_they_are_given_at_unit_length(trained):
    states, objects = features(4, 1), features(3, 2)
    table = WordTable(states, objects, trained=trained)
    assert table.width == 8 and len(list(table.parameters())) == (2 if trained else 0)
    assert set(table.state_dict()) == {"states", "objects"}
    for found, given in ((table.states, states), (table.objects, objects)):
        torch.testing.assert_close(found.detach(), (given / given.norm(dim=1, keepdim=True)).float())


def test_a_pair_is_a_map_of_both_words():
    composer, states, objects = Composer(8, 5).double(), features(4, 1), features(3, 2)
    assert sum(one.numel() for one in composer.parameters()) == 5 * (8 + 8) + 5  # W and one b
    m, n = torch.tensor([0, 3, 3]), torch.tensor([2, 0, 2])
    for row, a, b in zip(composer(states, objects, m, n).detach(), m, n, strict=True):
        close(row, linear(composer.state, states[a]) + linear(composer.object, objects[b]))


@pytest.mark.parametrize("shape", [(), (5,), (2, 5)])
def test_means_are_of_each_groups_rows(shape):
    columns = Columns(np.array([0, 1, 2, 5]), 3)  # state 0 with all objects, state 1 with the last, state 2 with none
    rows = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    by_state, by_object = columns.means(rows, 3, 3)
    close(by_state, torch.stack([rows[:3].mean(0), rows[3], torch.zeros(shape)]))
    close(by_object, torch.stack([rows[0], rows[1], rows[2:].mean(0)]))
    close(mean_over(rows, columns.objects, 3), by_object)


def test_columns_know_their_primitives_and_places():
    columns = Columns(np.array([1, 4, 11]), 3)
    assert (columns.states.tolist(), columns.objects.tolist()) == ([0, 1, 3], [1, 1, 2])
    assert columns.places(torch.tensor([11, 1, 4])).tolist() == [2, 0, 1]
    assert not columns.state_dict() and columns.host.tolist() == columns.compositions.tolist()
