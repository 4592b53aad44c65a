"""Duplex against a literal twin of the paper's formulas: values and gradients in double precision."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import UsageError
from duplex.layers.graph import Nodes
from duplex.layers.prompt_paths import Prototypes
from duplex.methods.duplex import Duplex
from duplex.methods.duplex import DuplexOptions as Options
from tests.methods import twin
from tests.methods.world import (
    DIM,
    every_row,
    features,
    random_labels,
    scores_of,
    small_labels,
    small_method,
    small_tower,
    step_of,
)

SEEN = small_labels().pairs["train"].tolist()
MESSAGES = ("state", "object", "counterfactual")


def twin_losses(method: Duplex, z: torch.Tensor, compositions: list[int], t: Prototypes) -> dict[str, torch.Tensor]:
    """Every loss of Eq. 20 by the formulas; the method's own weights, nothing of its code."""
    options, labels, scale = method.options, method.labels, method.paths.scale
    n_objects = len(labels.objects)
    states, objects = [c // n_objects for c in compositions], [c % n_objects for c in compositions]
    z = twin.unit(z)
    if method.paths.adapter is not None:
        a = method.paths.adapter
        z = twin.unit(z + a.scale * (torch.relu(z @ a.down.weight.T + a.down.bias) @ a.up.weight.T + a.up.bias))

    def disentangle(d):
        out = torch.relu(z @ d.first.weight.T + d.first.bias) @ d.second.weight.T + d.second.bias
        return twin.unit(z + out if options.disentangler == "residual" else out)

    z_s, z_o = disentangle(method.paths.factors.state), disentangle(method.paths.factors.object)
    p_s, p_o = twin.posteriors(z_s, t.states, scale), twin.posteriors(z_o, t.objects, scale)
    target = labels.target(options.refine_over, "train").tolist()
    H = every_row(method)
    rows = [H[c] for c in target]
    if options.graph:
        began = method.codebook.initial(np.arange(labels.size)) if options.blend == "anchored" else None
        nodes = (z_s, p_s, states), (z_o, p_o, objects)
        if options.nodes == "label":
            nodes = tuple(twin.by_label(*node) for node in nodes)
        (node_s, weigh_s, of_s), (node_o, weigh_o, of_o) = nodes
        fuse = (
            twin.additive_fusion(z)
            if method.fusion is None
            else twin.learned_fusion(node_s, node_o, *matrices(method.fusion), options.fusion == "learned")
        )
        refined = twin.refine(
            H, node_s, node_o, weigh_s, weigh_o, of_s, of_o, set(target), n_objects,
            fuse, options.momentum, options.renormalise, options.messages,
            options.weighing == "by_kind", began,
        )  # fmt: skip
        rows = [refined.get(c, row) for c, row in zip(target, rows, strict=True)]
    negatives = labels.pairs["train"].tolist() if options.semantic_negatives == "seen" else target
    return {
        "s": twin.cross_entropy(z_s, t.states, states, scale),
        "o": twin.cross_entropy(z_o, t.objects, objects, scale),
        "ct": twin.cross_entropy(z, t.compositions, [negatives.index(c) for c in compositions], scale),
        "ch": twin.cross_entropy(z, torch.stack(rows), [target.index(c) for c in compositions], scale),
    }


def matrices(fusion):
    """M_s and M_o [d, d], whatever they are a product of."""
    for projection in (fusion.state, fusion.object):
        layers = [projection] if isinstance(projection, torch.nn.Linear) else list(projection)
        product = layers[0].weight
        for layer in layers[1:]:
            product = layer.weight @ product
        yield product


JOINT = ("fusion_and_nodes", "rows")  # options that depend on one another
rows_of_options = st.fixed_dictionaries(
    {
        "adapter": st.sampled_from(["none", "feature"]),
        "adapter_dropout": st.just(0.0),
        "disentangler": st.sampled_from(["plain", "residual"]),
        "graph": st.sampled_from([True, True, False]),
        "messages": st.sampled_from([subset for k in (1, 2, 3) for subset in itertools.combinations(MESSAGES, k)]),
        "fusion_and_nodes": st.sampled_from(
            [
                *({"fusion": "learned"}, {"fusion": "linear"}, {"fusion": "additive"}),
                *({"nodes": "label"}, {"nodes": "label", "fusion": "linear", "fusion_rank": 3}),
            ]
        ),
        "weighing": st.sampled_from(["together", "by_kind"]),
        "rows": st.sampled_from([{}, {"codebook": "trainable"}, {"blend": "anchored"}, {"unseen_rows": "empty"}]),
        "momentum": st.sampled_from([0.0, 0.3, 0.9]),
        "renormalise": st.booleans(),
        "refine_over": st.sampled_from(["closed", "open"]),
        "semantic_negatives": st.sampled_from(["seen", "target"]),
        "unseen_rows": st.sampled_from(["compose", "random"]),
        "width": st.just(5),
    }
).map(
    lambda row: {
        **{k: v for k, v in row.items() if k not in JOINT},
        **{k: v for key in JOINT for k, v in row[key].items()},
    }
)


@settings(max_examples=60, deadline=None)
@given(
    rows_of_options,
    st.none() | st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.integers(1, 6),
    st.integers(0, 10**6),
)
def test_losses_and_gradients_equal_the_twin(row, sizes, batch, seed):
    """Over random options, vocabularies, target sets and batches, duplicates and single images among them."""
    random = np.random.default_rng(seed)
    labels = small_labels() if sizes is None else random_labels(*sizes, random)
    compositions = random.choice(labels.pairs["train"], batch).tolist()
    method = small_method(Options(**row), seed % 7, labels)
    if method.options.blend == "anchored":
        method.codebook.commit(np.arange(labels.size), twin.unit(features(labels.size, seed + 1)))
    z = features(len(compositions), seed)
    results = []
    for losses in (
        lambda t: step_of(method, z, compositions, t).losses,
        lambda t: twin_losses(method, z, compositions, t),
    ):
        method.zero_grad(set_to_none=True)
        values = losses(method.shared())
        sum(values.values()).backward()
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in method.named_parameters()}
        results.append((values, grads))
    (fast, fast_grads), (slow, slow_grads) = results
    for name, value in slow.items():
        torch.testing.assert_close(fast[name], value, rtol=1e-10, atol=1e-10)
    for name, grad in slow_grads.items():
        torch.testing.assert_close(fast_grads[name], grad, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_semantic_prototypes_receive_no_message():
    """A step and its write-back leave them bit for bit, and with the posteriors held they have no part in `h'`."""
    method, compositions = small_method(Options(width=5, adapter="none")), torch.tensor([0, 3, 5])
    t = method.shared()
    before = [tensor.detach().clone() for tensor in t]
    step_of(method, features(3, 5), compositions, t)
    method.after_batch()
    assert all(torch.equal(a, b) for a, b in zip(t, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(method.shared(), before, strict=True))

    z = twin.unit(features(3, 5))
    z_s, z_o = method.paths.factors(z)
    p = [torch.full((3, count), 0.25, dtype=z.dtype) for count in (4, 3)]
    refined = method.refine(Nodes(z, z_s, z_o, *p, compositions // 3, compositions % 3), compositions.numpy())
    (gradient,) = torch.autograd.grad(refined.rows.sum(), method.paths.prompts.learned_rows, allow_unused=True)
    assert gradient is None


def test_scores_are_the_sum_of_the_named_posteriors():
    labels = small_labels()
    every: list[Any] = [("ch",), ("ct",), ("so",), ("ch", "ct", "so"), ("ct", "so")]
    for terms in every:
        method = small_method(Options(width=5, inference=terms)).eval()
        for world, split in (("closed", "val"), ("closed", "test"), ("open", "test")):
            columns = labels.target(world, split)
            z = features(5, 2)
            got = scores_of(method, columns, z).double()
            with torch.no_grad():
                zc = method.paths.features(z.double())
                t = method.paths.prompts.encode(columns)
                z_s, z_o = method.paths.factors(zc)
                want = torch.zeros(5, len(columns), dtype=torch.float64)
                if "ch" in terms:
                    want += twin.posteriors(zc, every_row(method)[torch.as_tensor(columns)], method.paths.scale)
                if "ct" in terms:
                    want += twin.posteriors(zc, t.compositions, method.paths.scale)
                if "so" in terms:
                    p_s, p_o = (
                        twin.posteriors(f, p, method.paths.scale) for f, p in ((z_s, t.states), (z_o, t.objects))
                    )
                    want += p_s[:, labels.state_of(columns)] * p_o[:, labels.object_of(columns)]
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_scores_follow_their_columns():
    method = small_method(Options(width=5)).eval()
    columns = small_labels().target("closed", "test")
    shuffled = np.random.default_rng(0).permutation(len(columns))
    z = features(4, 9)
    torch.testing.assert_close(scores_of(method, columns, z)[:, shuffled], scores_of(method, columns[shuffled], z))


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"paths": "c"}, "paths: cso"),
        ({"codebook": "none"}, "codebook"),
        ({"context": "lerned"}, "context"),
        ({"momentum": "0.9"}, "momentum"),
        ({"losses": ("sh",)}, "losses"),
        ({"graph": True, "messages": ()}, "messages"),
        ({"inference": ()}, "inference"),
        ({"momentum": 1.5}, "momentum"),
        ({"losses": ("ct", "ct")}, "twice"),
        ({"losses": ("ch",), "graph": False, "adapter": "none"}, "trained"),
    ],
)
def test_contradicting_options_are_refused(row, word):
    with pytest.raises(UsageError, match=word):
        Options(**row)


def test_options_survive_json():
    options = Options(messages=("state",), momentum=0.5)
    assert Options.from_dict(options.to_dict()) == options
    assert every_row(small_method(options)).shape[1] == DIM


def test_visual_prototypes_alone_need_no_prompt():
    method = small_method(Options(paths="c", graph=False, losses=("ch",), inference=("ch",)))
    step = step_of(method, features(3, 0), torch.tensor(SEEN[:3]))
    assert set(step.losses) == {"ch"}
    columns = small_labels().target("open", "test")
    assert scores_of(method, columns, features(2, 0)).shape == (2, len(columns))


def test_fixed_prompts_are_the_words_and_learned_ones_start_at_their_means():
    """`a photo of S O` through the plain tower; a learned word is one vector, the mean of its tokens' embeddings."""
    tower, labels = small_tower(), small_labels()
    words = {name: tower.tokens(name.replace(".", " ").lower()) for name in (*labels.states, *labels.objects)}
    assert len(words["Faux.Fur"]) > 1, "a name of several tokens"
    template, table = tower.tokens("a photo of"), tower.embedding(torch.arange(49408))
    means = torch.stack([tower.embedding(words[name]).mean(0) for name in words])
    lexicon, place = torch.cat([table, means]), {name: [len(table) + i] for i, name in enumerate(words)}
    pairs = [(s, o) for s in labels.states for o in labels.objects]
    for context, vocabulary, spelled in [("fixed", "fixed", words), ("learned", "fixed", words),
                                         ("fixed", "learned", place), ("learned", "learned", place)]:  # fmt: skip
        method = small_method(Options.from_dict({"width": 5, "context": context, "vocabulary": vocabulary}))
        found = method.paths.prompts.encode(np.arange(labels.size))
        for got, names in (
            (found.compositions, pairs),
            (found.states, [(s,) for s in labels.states]),
            (found.objects, [(o,) for o in labels.objects]),
        ):
            rows = [[tower.start, *template, *(i for word in name for i in spelled[word]), tower.end] for name in names]
            torch.testing.assert_close(got, twin.unit(tower.encode_plain(rows, lexicon)), rtol=1e-8, atol=1e-8)


def test_the_adapter_drops_in_training_alone():
    method = small_method(Options(width=5, adapter_dropout=0.5))
    z = features(4, 0)
    torch.manual_seed(0)
    trained = [method.train().paths.features(z) for _ in range(2)]
    scored = [method.eval().paths.features(z) for _ in range(2)]
    assert not torch.equal(*trained)
    assert torch.equal(*scored)


def test_the_temperature_is_the_exponential_of_logit_scale():
    assert small_method(Options(width=5)).paths.scale == pytest.approx(np.exp(small_tower().logit_scale))


def test_scores_keep_no_gradient():
    method = small_method(Options(width=5))
    assert not scores_of(method, small_labels().target("open", "test"), features(3, 0)).requires_grad


def test_each_path_has_a_context_of_its_own():
    """A step on `L_s` alone moves the state path's context and words, and no other context."""
    method = small_method(Options(width=5, adapter="none", losses=("s",), graph=False))
    prompts = method.paths.prompts
    frozen = len(prompts.frozen_rows)
    rows = {path: [row - frozen for row in prompts.context_rows[path]] for path in "cso"}
    assert len({row for path in rows.values() for row in path}) == 3 * len(rows["c"])
    step_of(method, features(4, 1), torch.tensor(SEEN[:4])).total.backward()
    moved = prompts.learned_rows.grad.abs().sum(-1) > 0
    assert moved[rows["s"]].all() and not moved[rows["c"]].any() and not moved[rows["o"]].any()


def test_the_world_is_the_target_set():
    """C_tgt of training: what any split lists, or all; `refine_over` says otherwise where it is asked to."""
    labels = small_labels()
    listed, every = labels.target("closed", "train").tolist(), list(range(labels.size))
    for world, over, expected in [("closed", "world", listed), ("open", "world", every), ("open", "closed", listed),
                                  ("closed", "open", every)]:  # fmt: skip
        found = small_method(Options.from_dict({"width": 5, "refine_over": over}), world=world).target
        assert found.places(np.array(expected)).tolist() == list(range(len(found))) == list(range(len(expected)))
        assert found.holds(np.arange(labels.size)).nonzero()[0].tolist() == expected
