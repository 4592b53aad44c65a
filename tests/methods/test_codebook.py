"""The codebook, which stores few prototypes, against a dense twin that stores all."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.labels import LabelSpace
from duplex.methods import codebook as module
from duplex.methods.codebook import Codebook
from tests.methods.twin import unit
from tests.methods.world import DIM, features, random_labels, small_labels

UNSEEN = st.sampled_from(["compose", "random", "empty"])
SIZES = st.tuples(st.integers(1, 6), st.integers(1, 6))


def started(labels, seed: int = 0, *, unseen: Any = "compose", seen: bool = True, dtype=torch.float64) -> Codebook:
    torch.manual_seed(seed)
    book = Codebook(labels, DIM, unseen=unseen, random_seen=not seen).to(dtype)
    book.start(unit(features(20, seed)).to(dtype), torch.as_tensor(np.resize(labels.pairs["train"], 20)), seen=seen)
    return book


def dense(book: Codebook) -> torch.Tensor:
    """Return the twin: every prototype, one at a time."""
    return torch.cat([book.prototypes(np.array([c])) for c in range(book.labels.size)])


def refine(book: Codebook, random: np.random.Generator, rounds: int = 3) -> torch.Tensor:
    """Write random prototypes back into the codebook and into its twin, and return the twin."""
    twin = dense(book)
    for _ in range(rounds):
        chosen = random.permutation(book.labels.size)[: random.integers(1, book.labels.size + 1)]
        rows = unit(torch.as_tensor(random.standard_normal((len(chosen), DIM)))).to(twin.dtype)
        book.write_back(chosen, rows)
        twin[torch.as_tensor(chosen)] = rows
    return twin


@settings(max_examples=40, deadline=None)
@given(SIZES, UNSEEN, st.booleans(), st.integers(0, 3), st.integers(0, 10**6))
def test_prototypes_equal_the_dense_twins_bit_for_bit(sizes, unseen, seen, rounds, seed):
    random = np.random.default_rng(seed)
    labels = random_labels(*sizes, random)
    book = started(labels, seed, unseen=unseen, seen=seen)
    twin = refine(book, random, rounds)
    asked = random.integers(0, labels.size, 7)
    assert torch.equal(book.prototypes(asked), twin[torch.as_tensor(asked)])
    assert torch.equal(book.prototypes(np.arange(labels.size)), twin)
    again = Codebook(labels, DIM, unseen=unseen, random_seen=not seen).double()
    again.load_state_dict(copy.deepcopy(book.state_dict()))
    assert book.is_empty(asked).tolist() == (~twin.any(1))[torch.as_tensor(asked)].tolist()
    assert torch.equal(dense(again), twin) and again.stored_count == book.stored_count
    assert all(torch.equal(a, b) for a, b in zip(book.state_dict().values(), again.state_dict().values(), strict=True))


@settings(max_examples=40, deadline=None)
@given(SIZES, UNSEEN, st.sampled_from([torch.float32, torch.float64]), st.integers(0, 10**6))
def test_logits_by_sums_equal_the_dense_twins(sizes, unseen, dtype, seed):
    random = np.random.default_rng(seed)
    labels = random_labels(*sizes, random)
    book = started(labels, seed, unseen=unseen, dtype=dtype)
    twin = refine(book, random, 1)
    z = unit(features(4, seed + 1)).to(dtype)
    some = random.permutation(labels.size)[: random.integers(1, labels.size + 1)]
    expected = 7.0 * z.double() @ twin.double().T
    near: dict[str, Any] = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 1e-11}
    before = module.ROWS
    try:
        for module.ROWS in (0, before):
            torch.testing.assert_close(book.logits_over(None)(z, 7.0).double(), expected, **near)
            found = book.logits_over(some)(z, 7.0).double()
            torch.testing.assert_close(found, expected[:, torch.as_tensor(some)], **near)
    finally:
        module.ROWS = before


def test_gradients_reach_features_through_the_sums(monkeypatch):
    monkeypatch.setattr(module, "ROWS", 0)
    book, z = started(small_labels()), unit(features(3, 4)).requires_grad_()
    refine(book, np.random.default_rng(0), 1)
    weight = features(3, 5)[:, :1] * torch.arange(12)
    (found,) = torch.autograd.grad((book.logits_over(None)(z, 3.0) * weight).sum(), z)
    torch.testing.assert_close(found, 3.0 * weight @ dense(book), rtol=1e-10, atol=1e-10)


def test_the_state_holds_seen_and_refined_prototypes_alone():
    labels = small_labels()
    book, anchored = started(labels), Codebook(labels, DIM, unseen="compose", random_seen=False, anchored=True)
    assert anchored.initial is not None and book.initial is None
    assert book.state_dict()["known"].tolist() == labels.pairs["train"].tolist()
    book.write_back(np.array([0, 2]), torch.zeros(2, DIM))
    state = book.state_dict()
    assert state["known"].tolist() == sorted([*labels.pairs["train"].tolist(), 2])
    assert state["rows"].shape == (book.stored_count, DIM) and book.stored_count == 8
    assert not dense(book)[[0, 2]].any()


def test_a_write_back_leaves_an_earlier_state_dict_unchanged():
    book = started(small_labels())
    state = book.state_dict()
    before = state["rows"].clone()
    book.write_back(np.arange(12), torch.zeros(12, DIM))
    assert torch.equal(state["rows"], before)


def test_a_codebook_of_a_hundred_million_compositions_stores_few_vectors():
    names = [tuple(f"{kind}{i}" for i in range(count)) for kind, count in (("s", 5_000), ("o", 20_000))]
    labels = LabelSpace(names[0], names[1], {"train": np.arange(0, 10**8, 10**8 // 9)})
    book = Codebook(labels, 4, unseen="compose", random_seen=False)
    book.start(unit(torch.randn(10, 4)), torch.as_tensor(labels.pairs["train"]), seen=True)
    assert sum(tensor.numel() for tensor in book.state_dict().values()) == 25_001 * 4 + 10 * 5
    book.write_back(np.array([77_777_777]), torch.ones(1, 4))
    assert book.prototypes(np.array([77_777_777, 5]))[0].tolist() == [1.0] * 4


# -- random rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 5, 12])
def test_a_codebook_advances_the_generator_as_drawing_all_its_prototypes_does(block, monkeypatch):
    """Parameters that are drawn after a codebook do not depend on how it stores its prototypes."""
    monkeypatch.setattr(module, "BLOCK", block)
    labels, width = small_labels(), 16  # torch draws 16 numbers at a time
    torch.manual_seed(3)
    Codebook(labels, width, unseen="compose", random_seen=False)
    found = torch.rand(4)
    torch.manual_seed(3)
    torch.randn(labels.size, width)
    torch.randn(0, width)
    assert torch.equal(found, torch.rand(4))


def test_random_rows_are_unit_vectors_that_depend_on_the_seed_alone():
    labels = small_labels()
    book, same, other = (started(labels, seed, unseen="random", seen=False) for seed in (0, 0, 1))
    rows = dense(book)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(labels.size, dtype=rows.dtype))
    assert torch.equal(rows, dense(same)) and (rows - dense(other)).norm(dim=1).min() > 0.1


@pytest.mark.parametrize("name", ["known", "rows"])
def test_a_state_without_prototypes_is_refused_by_name(name):
    book = started(small_labels())
    state = {key: value for key, value in book.state_dict().items() if key != name}
    with pytest.raises(RuntimeError, match=f'Missing key.*"{name}"'):
        book.load_state_dict(state)
