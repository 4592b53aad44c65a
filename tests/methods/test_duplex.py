"""Duplex against a literal twin of the paper's formulas: values and gradients in double precision."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import UsageError
from duplex.methods.duplex import Duplex, MessageNodes, refine
from duplex.methods.duplex import DuplexOptions as Options
from duplex.methods.prompts import Prototypes
from tests.methods import twin
from tests.methods.world import (
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
GRAPH = ("edges", "factors", "counterfactuals", "diagonal", "normalise", "unseen")  # readings of the local graph


def twin_features(method: Duplex, z: torch.Tensor, t: Prototypes) -> tuple[torch.Tensor, ...]:
    """Return `z^c`, z^s, z^o, p(s|x) and p(o|x) by the formulas, with the method's weights and none of its code."""
    z = twin.unit(z)
    if method.paths.adapter is not None:
        a = method.paths.adapter
        z = twin.unit(z + a.scale * (torch.relu(z @ a.down.weight.T + a.down.bias) @ a.up.weight.T + a.up.bias))

    def disentangle(d):
        out = torch.relu(z @ d.first.weight.T + d.first.bias) @ d.second.weight.T + d.second.bias
        return twin.unit(out)

    def posteriors(f, rows, trained):  # a word without training images has the probability 0
        kept, p = np.flatnonzero(trained), f.new_zeros(len(f), len(rows))
        p[:, kept] = twin.posteriors(f, rows[kept], method.paths.scale)
        return p

    z_s, z_o = disentangle(method.paths.factors.state), disentangle(method.paths.factors.object)
    states, objects = method.labels.trained_words
    return z, z_s, z_o, posteriors(z_s, t.states, states), posteriors(z_o, t.objects, objects)


def twin_refined(method: Duplex, compositions: list[int], *features: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the prototypes that a batch refines, by the formulas, given the result of `twin_features`."""
    options, labels, (z, z_s, z_o, p_s, p_o) = method.options, method.labels, features
    n = len(labels.objects)
    initial = method.codebook.initial.prototypes(np.arange(labels.size)) if options.blend == "anchored" else None
    fuse = twin.additive_fusion(z)
    if method.fusion is not None:
        matrices = [
            part.weight if options.reading.fusion_rank is None else part[1].weight @ part[0].weight
            for part in (method.fusion.state, method.fusion.object)
        ]
        fuse = twin.learned_fusion(z_s, z_o, *matrices, options.fusion == "learned")
    return twin.refine(
        every_row(method), z_s, z_o, p_s, p_o, [c // n for c in compositions], [c % n for c in compositions],
        set(labels.candidates(options.refine_over, "train").tolist()), n,
        fuse, options.momentum, options.messages if options.graph else (), initial,
        **{name: getattr(options.reading, name) for name in GRAPH},
    )  # fmt: skip


def twin_losses(method: Duplex, z: torch.Tensor, compositions: list[int], t: Prototypes) -> dict[str, torch.Tensor]:
    """Return every loss of Eq. 20 by the formulas."""
    options, labels, scale = method.options, method.labels, method.paths.scale
    states, objects = (part(np.array(compositions)).tolist() for part in (labels.state_of, labels.object_of))
    given, features = z, twin_features(method, z, t)
    z, z_s, z_o = features[:3]
    target = labels.candidates(options.refine_over, "train").tolist()
    H = every_row(method)
    if options.reading.anchors == "detached":
        fixed = t._replace(states=t.states.detach(), objects=t.objects.detach())
        features = (*features[:3], *twin_features(method, given, fixed)[3:])
    refined = twin_refined(method, compositions, *features) if options.graph or options.composes else {}
    negatives = labels.pairs["train"].tolist() if options.semantic_negatives == "seen" else target
    if options.reading.softmax == "all":
        target = negatives = list(range(labels.size))
    rows = [refined.get(c, H[c]) for c in target]
    kept = [np.flatnonzero(trained).tolist() for trained in labels.trained_words]  # others are in no loss
    return {
        "state": twin.cross_entropy(z_s, t.states[kept[0]], [kept[0].index(m) for m in states], scale),
        "object": twin.cross_entropy(z_o, t.objects[kept[1]], [kept[1].index(n) for n in objects], scale),
        "semantic": twin.cross_entropy(z, t.compositions, [negatives.index(c) for c in compositions], scale),
        "visual": twin.cross_entropy(z, torch.stack(rows), [target.index(c) for c in compositions], scale),
    }


options_of_duplex = st.fixed_dictionaries(
    {
        "adapter": st.sampled_from(["none", "feature"]),
        "adapter_dropout": st.just(0.0),
        "graph": st.sampled_from([True, True, False]),
        "messages": st.sampled_from([subset for k in (1, 2, 3) for subset in itertools.combinations(MESSAGES, k)]),
        "fusion": st.sampled_from(["learned", "linear", "additive"]),
        "blend": st.sampled_from(["recursive", "anchored"]),
        "momentum": st.sampled_from([0.0, 0.3, 0.9]),
        "refine_over": st.sampled_from(["closed", "open"]),
        "semantic_negatives": st.sampled_from(["seen", "target"]),
        "unseen_rows": st.sampled_from(["compose", "random"]),
        "width": st.just(5),
        "reading": st.fixed_dictionaries(
            {},
            optional={
                "softmax": st.just("all"), "edges": st.just("label"), "counterfactuals": st.just("labels"),
                "diagonal": st.just(False), "normalise": st.just("by_kind"), "anchors": st.just("detached"),
                "factors": st.just("labels"), "unseen": st.sampled_from(["batch", "batch", "empty"]),
                "codebook": st.just("no parameter to train"), "fusion_rank": st.just(3),
            },
        ),
    }
)  # fmt: skip


def consistent(row: dict[str, Any]) -> dict[str, Any]:
    """The options without readings that contradict the others."""
    reading: dict[str, Any] = {}
    for key, value in row["reading"].items():
        try:
            Options.from_dict({**row, "reading": {**reading, key: value}})
            reading[key] = value
        except UsageError:
            pass
    return {**row, "reading": reading}


@settings(max_examples=40, deadline=None)
@given(
    options_of_duplex.map(consistent), st.none() | st.tuples(st.integers(1, 5), st.integers(1, 5)), st.integers(1, 6),
    st.integers(0, 10**6)
)  # fmt: skip
def test_losses_and_gradients_equal_the_twin(row, sizes, batch, seed):
    random = np.random.default_rng(seed)
    labels = small_labels() if sizes is None else random_labels(*sizes, random)
    compositions = random.choice(labels.pairs["train"], batch).tolist()
    method = small_method(Options(**row), seed % 7, labels)
    if method.options.blend == "anchored" and method.options.reading.codebook == "buffer":
        method.codebook.write_back(np.arange(labels.size), twin.unit(features(labels.size, seed + 1)))
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
        torch.testing.assert_close(fast[name], value, rtol=1e-12, atol=1e-12)
    for name, grad in slow_grads.items():
        torch.testing.assert_close(fast_grads[name], grad, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_semantic_prototypes_receive_no_message():
    """A step leaves them unchanged bit for bit, and with fixed posteriors `h'` does not depend on them."""
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
    nodes, own = MessageNodes(z, z_s, z_o, *p, compositions // 3, compositions % 3), compositions.numpy()
    refined = refine(nodes, own, method.candidates, method.codebook, method.fusion, method.options.messages, 0.9)
    (gradient,) = torch.autograd.grad(refined.rows.sum(), method.paths.prompts.learned_rows, allow_unused=True)
    assert gradient is None


@pytest.mark.parametrize(("messages", "fuses"), [(("state", "object"), False), (("counterfactual",), True)])
def test_factors_are_fused_for_counterfactuals_alone(messages, fuses):
    assert (small_method(Options(messages=messages)).fusion is not None) == fuses


@pytest.mark.parametrize(
    "terms", [("visual",), ("semantic",), ("factors",), ("visual", "semantic", "factors"), ("semantic", "factors")]
)
@pytest.mark.parametrize(("world", "split"), [("closed", "val"), ("closed", "test"), ("open", "test")])
def test_scores_are_the_sum_of_the_named_posteriors(terms, world, split):
    method, z = small_method(Options.from_dict({"width": 5, "inference": terms})).eval(), features(5, 2)
    labels, scale = method.labels, method.paths.scale
    columns = labels.candidates(world, split)
    with torch.no_grad():
        zc, t = method.paths.adapt(z), method.paths.prompts.encode(columns)
        p_s, p_o = (twin.posteriors(f, p, scale) for f, p in zip(method.paths.factors(zc), t[1:], strict=True))
        want = {
            "visual": twin.posteriors(zc, every_row(method)[torch.as_tensor(columns)], scale),
            "semantic": twin.posteriors(zc, t.compositions, scale),
            "factors": p_s[:, labels.state_of(columns)] * p_o[:, labels.object_of(columns)],
        }
    total = sum(want[term] for term in terms)
    torch.testing.assert_close(scores_of(method, columns, z).double(), total, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"paths": "composition"}, "paths: three"),
        ({"messages": ("state", "object", "state")}, "messages lists a kind twice"),
        ({"losses": ("visual",), "graph": False, "adapter": "none"}, "no parameter to train"),
    ],
)
def test_contradicting_options_are_refused(row, word):
    with pytest.raises(UsageError, match=word):
        Options(**row)


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


def test_each_path_has_a_context_of_its_own():
    """A step on `L_s` alone moves the state path's context and words, and no other context."""
    method = small_method(Options(width=5, adapter="none", losses=("state",), graph=False))
    prompts = method.paths.prompts
    frozen = len(prompts.frozen_rows)
    rows = {path: [row - frozen for row in prompts.context_rows[path]] for path in prompts.paths}
    assert len({row for path in rows.values() for row in path}) == 3 * len(rows["composition"])
    step_of(method, features(4, 1), torch.tensor(SEEN[:4])).total.backward()
    moved = prompts.learned_rows.grad.abs().sum(-1) > 0
    assert moved[rows["state"]].all() and not moved[rows["composition"]].any() and not moved[rows["object"]].any()


def test_candidates_in_training_are_those_of_the_world():
    """The closed world has the pairs of any split, the open world all; `refine_over` overrides the world."""
    labels = small_labels()
    listed, every = labels.candidates("closed", "train").tolist(), list(range(labels.size))
    for world, over, expected in [("closed", "world", listed), ("open", "world", every), ("open", "closed", listed),
                                  ("closed", "open", every)]:  # fmt: skip
        found = small_method(Options.from_dict({"width": 5, "refine_over": over}), world=world).candidates
        assert found.positions(np.array(expected)).tolist() == list(range(len(found))) == list(range(len(expected)))
        assert found.contains(np.arange(labels.size)).nonzero()[0].tolist() == expected
