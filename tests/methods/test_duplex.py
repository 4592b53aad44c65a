"""Duplex against a literal twin of the paper's formulas: values and gradients in double precision."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.errors import UsageError
from duplex.methods.duplex import Duplex
from duplex.methods.duplex import DuplexOptions as Options
from duplex.parts.codebook import Codebook
from duplex.parts.graph import Nodes
from duplex.parts.prompts import Prototypes
from tests.methods import twin
from tests.methods.world import (
    DIM,
    batch_of,
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
    H = method.codebook.rows
    rows = [H[c] for c in target]
    if options.graph:
        fusion = method.fusion
        fuse = (
            twin.additive_fusion(z)
            if fusion is None
            else twin.learned_fusion(z_s, z_o, fusion.state.weight, fusion.object.weight)
        )
        refined = twin.refine(
            H, z_s, z_o, p_s, p_o, states, objects, set(target), n_objects,
            fuse, options.momentum, options.renormalise, options.messages,
        )  # fmt: skip
        rows = [refined.get(c, row) for c, row in zip(target, rows, strict=True)]
    negatives = labels.pairs["train"].tolist() if options.semantic_negatives == "seen" else target
    return {
        "s": twin.cross_entropy(z_s, t.states, states, scale),
        "o": twin.cross_entropy(z_o, t.objects, objects, scale),
        "ct": twin.cross_entropy(z, t.compositions, [negatives.index(c) for c in compositions], scale),
        "ch": twin.cross_entropy(z, torch.stack(rows), [target.index(c) for c in compositions], scale),
    }


rows_of_options = st.fixed_dictionaries(
    {
        "adapter": st.sampled_from(["none", "feature"]),
        "adapter_dropout": st.just(0.0),
        "disentangler": st.sampled_from(["plain", "residual"]),
        "codebook": st.sampled_from(["buffer", "trainable"]),
        "graph": st.sampled_from([True, True, False]),
        "messages": st.sampled_from([subset for k in (1, 2, 3) for subset in itertools.combinations(MESSAGES, k)]),
        "fusion": st.sampled_from(["learned", "learned", "additive"]),
        "momentum": st.sampled_from([0.0, 0.3, 0.9]),
        "renormalise": st.booleans(),
        "refine_over": st.sampled_from(["closed", "open"]),
        "semantic_negatives": st.sampled_from(["seen", "target"]),
        "unseen_rows": st.sampled_from(["compose", "random"]),
        "width": st.just(5),
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


@pytest.mark.parametrize(
    "compositions",
    [[SEEN[0]], [SEEN[0]] * 4, [SEEN[0], SEEN[1]], SEEN],
    ids=["one image", "duplicates", "one state", "all seen"],
)
def test_committed_rows_equal_the_twin(compositions):
    method = small_method(Options(width=5, adapter_dropout=0.0, adapter="none"))
    z, t = features(len(compositions), 3), method.shared()
    before = method.codebook.rows.clone()
    step_of(method, z, compositions, t)
    method.after_batch()
    after = method.codebook.rows
    with torch.no_grad():
        z = twin.unit(z)
        z_s, z_o = method.paths.factors(z)
        p_s, p_o = (
            twin.posteriors(z_s, t.states, method.paths.scale),
            twin.posteriors(z_o, t.objects, method.paths.scale),
        )
        n = len(method.labels.objects)
        refined = twin.refine(
            before, z_s, z_o, p_s, p_o, [c // n for c in compositions], [c % n for c in compositions],
            set(method.labels.target("closed", "train").tolist()), n,
            twin.learned_fusion(z_s, z_o, method.fusion.state.weight, method.fusion.object.weight),
            0.9, True, MESSAGES,
        )  # fmt: skip
    for c in range(len(before)):
        if c in refined:
            torch.testing.assert_close(after[c], refined[c], rtol=1e-10, atol=1e-10)
        else:
            assert torch.equal(after[c], before[c])


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
    refined = method.refine(Nodes(z, z_s, z_o, *p, compositions // 3, compositions % 3))
    (gradient,) = torch.autograd.grad(refined.rows.sum(), method.paths.prompts.learned_rows, allow_unused=True)
    assert gradient is None


def test_gradients_come_from_unseen_rows_through_shared_candidates():
    """`L_c^h` reaches unseen candidates' rows, and those rows alone reach both disentanglers and both projections."""
    method = small_method(Options(width=5, adapter="none", losses=("ch",)))
    step = step_of(method, features(3, 5), torch.tensor([0, 3, 5]))
    rows = step.refinement.rows
    unseen = ~torch.isin(step.refinement.compositions, torch.tensor(SEEN))
    assert unseen.any(), "the batch has an unseen candidate"
    (gradient,) = torch.autograd.grad(step.losses["ch"], rows, retain_graph=True)
    assert (gradient[unseen].abs().sum(1) > 0).all()
    parts = [f"{kind}.{layer}" for kind in ("state", "object") for layer in ("first", "second")]
    names = [*(f"paths.factors.{part}.weight" for part in parts), "fusion.state.weight", "fusion.object.weight"]
    weights = [method.get_parameter(name) for name in names]
    for name, found in zip(names, torch.autograd.grad(rows[unseen], weights, gradient[unseen]), strict=True):
        assert found.abs().sum() > 0, name


def test_a_batch_without_unseen_candidates_refines_only_its_own_rows():
    method = small_method(Options(width=5))
    step = step_of(method, features(2, 1), torch.tensor([SEEN[0], SEEN[0]]))
    assert step.refinement.compositions.tolist() == [SEEN[0]]


@pytest.mark.parametrize("codebook", ["buffer"])
def test_momentum_one_freezes_the_codebook_and_zero_replaces_candidates(codebook):
    batch = torch.tensor(SEEN[:4])
    frozen = small_method(Options(width=5, momentum=1.0, codebook=codebook))
    before = frozen.codebook.rows.clone()
    step_of(frozen, features(4, 1), batch)
    frozen.after_batch()
    assert torch.equal(frozen.codebook.rows, before)

    replaced = small_method(Options(width=5, momentum=0.0, adapter="none"))
    other = small_method(Options(width=5, momentum=0.0, adapter="none"))
    torch.nn.init.normal_(other.codebook.rows)  # what the rows were has no part in what they become
    steps = [step_of(method, features(4, 1), batch) for method in (replaced, other)]
    torch.testing.assert_close(steps[0].refinement.rows, steps[1].refinement.rows, rtol=0, atol=0)


def test_scores_are_the_sum_of_the_named_posteriors():
    labels = small_labels()
    for terms in [("ch",), ("ct",), ("so",), ("ch", "ct", "so"), ("ct", "so")]:
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
                    want += twin.posteriors(zc, method.codebook.rows[torch.as_tensor(columns)], method.paths.scale)
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
    assert small_method(options).codebook.rows.shape[1] == DIM


def test_underflowing_posteriors_leave_rows_and_gradients_sound():
    """Logit gaps as large as CLIP's temperature allows: rows nothing reached stay, gradients stay finite."""
    for scale in (10.0, 100.0, 400.0):
        method = small_method(
            Options(width=5, adapter="none", fusion="additive", messages=("counterfactual",), momentum=0.0)
        )
        method.paths.scale = scale
        method.float()
        z, batch = features(4, 1).float(), torch.tensor(SEEN[:4])
        prototypes = Prototypes(*(-t.detach().float() for t in method.shared()))
        step = step_of(method, z, batch, prototypes)
        step.total.backward()
        norms = step.refinement.rows.norm(dim=-1)
        torch.testing.assert_close(norms, torch.ones_like(norms), rtol=1e-5, atol=1e-5)
        for name, parameter in method.named_parameters():
            assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name


def test_gradients_leave_trainable_rows_on_the_unit_sphere():
    method = small_method(Options(width=5, codebook="trainable"))
    with torch.no_grad():
        method.codebook.rows.mul_(1.3)
    method.after_step()
    norms = method.codebook.rows.norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms))


def test_visual_prototypes_alone_need_no_prompt():
    method = small_method(Options(paths="c", graph=False, losses=("ch",), inference=("ch",)))
    step = step_of(method, features(3, 0), torch.tensor(SEEN[:3]))
    assert set(step.losses) == {"ch"}
    columns = small_labels().target("open", "test")
    assert scores_of(method, columns, features(2, 0)).shape == (2, len(columns))


@settings(max_examples=30, deadline=None)
@given(st.tuples(st.integers(1, 4), st.integers(1, 4)), st.sampled_from(["compose", "random"]), st.integers(0, 10**6))
def test_initial_rows_by_loops(sizes, unseen, seed):
    """A seen pair's row is the mean of its images; composed rows are made of the means of state, object and all."""
    random = np.random.default_rng(seed)
    labels = random_labels(*sizes, random)
    compositions = random.choice(labels.pairs["train"], 9)
    z = twin.unit(features(9, seed))
    book = Codebook(labels, DIM, trainable=False, random_seen=False).double()
    book.start(z, torch.as_tensor(compositions), seen=True, unseen=unseen == "compose")
    rows = book.rows
    n, everything = len(labels.objects), sum(z) / len(z)

    def mean_where(chosen: list[bool]) -> torch.Tensor:
        kept = [row for row, keep in zip(z, chosen, strict=True) if keep]
        return sum(kept) / len(kept) if kept else everything

    for c in range(labels.size):
        own = [int(x) == c for x in compositions]
        if any(own):
            expected = twin.unit(mean_where(own))
        elif unseen == "compose":
            state, other = ([int(x) // n == c // n for x in compositions], [int(x) % n == c % n for x in compositions])
            expected = twin.unit(mean_where(state) + mean_where(other) - everything)
        else:
            assert float(rows[c].norm()) == pytest.approx(1.0)
            continue
        torch.testing.assert_close(rows[c], expected, rtol=1e-10, atol=1e-10)


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
        method = small_method(Options(width=5, context=context, vocabulary=vocabulary))
        found = method.paths.prompts.encode(np.arange(labels.size))
        for got, names in (
            (found.compositions, pairs),
            (found.states, [(s,) for s in labels.states]),
            (found.objects, [(o,) for o in labels.objects]),
        ):
            rows = [[tower.start, *template, *(i for word in name for i in spelled[word]), tower.end] for name in names]
            torch.testing.assert_close(got, twin.unit(tower.encode_plain(rows, lexicon)), rtol=1e-8, atol=1e-8)


# -- what can be left out without a number looking odd ----------------------------------------------------------------


def test_random_seen_rows_are_not_the_data():
    given, drawn = (small_method(Options(width=5, seen_rows=rows)).codebook.rows for rows in ("data", "random"))
    distance = (given[SEEN] - drawn[SEEN]).norm(dim=-1)
    assert (distance > 0.1).all()
    norms = drawn.norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms))


def test_a_write_back_keeps_no_gradient():
    method = small_method(Options(width=5))
    step_of(method, features(3, 1), torch.tensor(SEEN[:3])).total.backward()
    method.after_batch()
    assert not method.codebook.rows.requires_grad
    step_of(method, features(3, 2), torch.tensor(SEEN[:3])).total.backward()  # not through the step before


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


def test_refined_rows_are_written_back():
    method = small_method(Options(width=5))
    before = method.codebook.rows.clone()
    step = step_of(method, features(4, 1), torch.tensor(SEEN[:4]))
    method.after_batch()
    changed = (method.codebook.rows != before).any(-1).nonzero()[:, 0]
    assert changed.tolist() == step.refinement.compositions.tolist()


def test_the_world_is_the_target_set():
    """C_tgt of training: what any split lists, or all; `refine_over` says otherwise where it is asked to."""
    labels = small_labels()
    listed, every = labels.target("closed", "train").tolist(), list(range(labels.size))
    for world, over, expected in [("closed", "world", listed), ("open", "world", every), ("open", "closed", listed),
                                  ("closed", "open", every)]:  # fmt: skip
        assert small_method(Options(width=5, refine_over=over), world=world).target.tolist() == expected


def own_means(method: Duplex, z: torch.Tensor, own: torch.Tensor) -> dict[int, torch.Tensor]:
    """Mean z^c of each composition's images."""
    found = method.paths.features(z).detach()
    return {c: found[own == c].mean(0) for c in own.unique().tolist()}


def test_rows_drawn_to_a_batch_move_and_no_others():
    method = small_method(Options(width=5, graph=False, rows="ema", momentum=0.7)).eval()
    before, z, own = method.codebook.rows.clone(), features(6, 1), torch.tensor([*SEEN[:3], *SEEN[:3]])
    step_of(method, z, own)
    assert torch.equal(method.codebook.rows, before)
    method.after_batch()
    for c, mean in own_means(method, z, own).items():
        torch.testing.assert_close(method.codebook.rows[c], twin.unit(0.7 * before[c] + 0.3 * mean))
    others = [c for c in range(len(before)) if c not in SEEN[:3]]
    assert torch.equal(method.codebook.rows[others], before[others])


def test_unseen_rows_are_composed_of_rows_as_they_are():
    method = small_method(Options(width=5, graph=False, rows="ema")).eval()
    own = torch.tensor([*SEEN, *SEEN[:3]])
    with torch.no_grad():
        method.codebook.rows.copy_(twin.unit(torch.randn_like(method.codebook.rows)))
    before = method.codebook.rows.clone()
    method.follow(batch_of(features(len(own), 2), own))
    assert torch.equal(method.codebook.rows[SEEN], before[SEEN])
    unseen = next(
        c
        for c in range(len(before))
        if c not in SEEN and {c // 3, c % 3} <= {*(own // 3).tolist(), *(own % 3).tolist()}
    )
    state, object = before[own[own // 3 == unseen // 3]].mean(0), before[own[own % 3 == unseen % 3]].mean(0)
    torch.testing.assert_close(method.codebook.rows[unseen], twin.unit(state + object - before[own].mean(0)))


def test_recomputed_rows_are_the_means_of_features_as_they_are():
    method = small_method(Options(width=5, graph=False, rows="recomputed")).eval()
    z, own = features(20, 3), torch.tensor((SEEN * 3)[:20])
    before = method.codebook.rows.clone()
    method.follow(batch_of(z, own))
    for c, mean in own_means(method, z, own).items():
        torch.testing.assert_close(method.codebook.rows[c], twin.unit(mean))
        assert not torch.allclose(before[c], method.codebook.rows[c], atol=1e-3)
    fixed = small_method(Options(width=5, graph=False)).eval()
    before = fixed.codebook.rows.clone()
    fixed.follow(batch_of(z, own))
    assert torch.equal(fixed.codebook.rows, before)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows": "ema"}, "rows: ema undoes what graph: true refines"),
        ({"rows": "recomputed", "graph": False, "codebook": "trainable"}, "rows: recomputed needs codebook: buffer"),
        ({"rows": "ema", "graph": False, "unseen_rows": "random"}, "rows: ema needs codebook: buffer"),
        ({"rows": "ema", "graph": False, "losses": ("s", "o"), "inference": ("so",)}, "moves what neither"),
    ],
)
def test_rows_that_follow_ask_for_what_they_stand_on(options, said):
    with pytest.raises(UsageError, match=said):
        Options(**options)
