"""Perceptrons, tables of words and lists of compositions, each by loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from duplex.layers.composition_index import CompositionIndex, copy_to_device, mean_over
from duplex.layers.factors import Mlp
from duplex.methods.head import Composer, WordTable
from tests.methods.field import close, linear, mlp, unit
from tests.methods.world import features
from tests.pretended import Pretended


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_a_perceptron_has_the_given_number_of_hidden_layers(layers):
    made, z = Mlp(8, 6, 4, layers, 0.5).double().eval(), features(3, 0)
    assert len(made) == 4 * layers + 1
    close(made(z).detach(), torch.stack([mlp(made, row).detach() for row in z]))


@pytest.mark.parametrize("trained", [True, False])
def test_word_tables_start_at_the_normalised_vectors(trained):
    states, objects = features(4, 1), features(3, 2)
    table = WordTable(states, objects, trained=trained)
    assert table.width == 8 and len(list(table.parameters())) == (2 if trained else 0)
    assert set(table.state_dict()) == {"states", "objects"}
    for found, given in ((table.states, states), (table.objects, objects)):
        torch.testing.assert_close(found.detach(), (given / given.norm(dim=1, keepdim=True)).float())


def test_a_composer_maps_the_concatenated_words():
    composer, words = Composer(8, 5).double(), WordTable(features(4, 1), features(3, 2), trained=False).double()
    assert sum(weight.numel() for weight in composer.parameters()) == 5 * (8 + 8) + 5  # W and one b
    candidates = CompositionIndex(np.array([2, 9, 11]), 3)
    for row, m, n in zip(composer(words, candidates).detach(), candidates.states, candidates.objects, strict=True):
        close(row, unit(linear(composer.state, words.states[m]) + linear(composer.object, words.objects[n])))


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
    for device in (torch.device("cpu"), torch.device(pretended.name)):
        copies = copy_to_device(device, *lists)
        assert [tensor.device.type for tensor in copies] == [device.type] * 3
        assert [tensor.cpu().tolist() for tensor in copies] == [array.tolist() for array in lists]


def test_an_index_has_states_objects_and_positions():
    columns = CompositionIndex(np.array([1, 4, 11]), 3)
    assert (columns.states.tolist(), columns.objects.tolist()) == ([0, 1, 3], [1, 1, 2])
    assert columns.places(torch.tensor([11, 1, 4])).tolist() == [2, 0, 1]
    assert not columns.state_dict() and columns.compositions_np.tolist() == columns.compositions.tolist()
