"""Options of single methods by which they follow their published code; off by default."""

import torch

from duplex.methods.caila import Caila
from duplex.methods.compcos import CompCos
from duplex.methods.gipcol import Gipcol
from duplex.methods.layers import unit as unit_rows
from duplex.methods.plid import Plid
from duplex.options import TrainingOptions
from duplex.training.loop import make_optimiser
from tests.methods.field import LABELS, SEEN, M, N, batch, build, targets, words
from tests.methods.loops import close, convolved, cross_entropy, products, softmax


def test_the_graphs_output_replaces_fixed_words():
    method = build(Gipcol, width=6, words="replaced")
    prompts = method.prompts
    starts = build(Gipcol, width=6, shaken=False).prompts.learned_rows[-(M + N) :].detach()
    target = LABELS.candidates("closed", "train").tolist()
    states, objects, _ = convolved(prompts.network.weights, starts[:M], starts[M:], target)
    close(prompts.lexicon()[-(M + N) :].detach(), torch.cat([states, objects]))
    method.losses(batch(3), method.shared())["semantic"].backward()
    assert not prompts.learned_rows.grad[-(M + N) :].any() and prompts.learned_rows.grad[: -(M + N)].any()


def test_the_graph_has_a_rate_and_a_decay_of_its_own():
    method = build(Gipcol, network_rate=5e-5, network_decay=5e-5)
    settings = TrainingOptions(learning_rate=5e-4, batch_size=4, epochs=1, weight_decay=1e-5)
    prompts, network = make_optimiser(method, settings).param_groups
    assert (prompts["lr"], prompts["weight_decay"]) == (5e-4, 1e-5)
    assert (network["lr"], network["weight_decay"]) == (5e-5, 5e-5)
    assert {id(p) for p in network["params"]} == {id(p) for p in method.prompts.network.parameters()}
    assert len(prompts["params"]) + len(network["params"]) == len(list(method.parameters()))


def test_the_graphs_output_is_dropped_and_not_its_fixed_input():
    prompts = build(Gipcol, width=6, words="replaced", dropout=0.0).prompts.train()
    plain = prompts.lexicon().detach()
    prompts.word_dropout = 0.5
    torch.manual_seed(3)
    mask = torch.nn.functional.dropout(torch.ones_like(plain[-(M + N) :]), 0.5)
    torch.manual_seed(3)
    found = prompts.lexicon().detach()
    close(found[-(M + N) :], plain[-(M + N) :] * mask)
    close(found[: -(M + N)], plain[: -(M + N)])


def test_only_features_for_compositions_are_dropped_after_they_are_normalised():
    method, images = build(Caila, shift=False, dropout=0.0, feature_dropout=0.5).train(), batch(4)
    torch.manual_seed(1)
    found = method.losses(images, method.shared())
    torch.manual_seed(1)
    z_c, *others = method.images.images(unit_rows(images.cls))
    z = (torch.nn.functional.dropout(z_c, 0.5), *others)
    for name, f, t, own in zip(("composition", "state", "object"), z, method.shared(), targets(images), strict=True):
        close(found[name].item(), cross_entropy(products(f, t.detach(), method.scale), own))


def test_smoothed_labels_by_loops():
    method, images = build(Plid, smoothing=0.2, margin=False), batch(4)
    target = [SEEN.index(c) for c in images.compositions.tolist()]
    expected = []
    for own in images.compositions.tolist():
        related = [c // N == own // N and c % N != own % N for c in SEEN]
        row = [0.2 * r / sum(related) if any(related) else 0.0 for r in related]
        row[SEEN.index(own)] = 1 - sum(row)
        expected.append(row)
    close(method.smoothed(torch.tensor(target)), expected)
    shared = method.shared()
    c, s, o = method.path_logits((unit_rows(images.cls), *method.factors(unit_rows(images.cls))), shared[:3])
    mixed = 0.9 * c + 0.1 * (s[:, method.train_candidates.states] + o[:, method.train_candidates.objects])
    logs = [torch.tensor(softmax(row.detach()), dtype=torch.float64).log().tolist() for row in mixed]
    loss = -sum(w * p for row, ps in zip(expected, logs, strict=True) for w, p in zip(row, ps, strict=True)) / 4
    close(method.losses(images, shared)["composition"].item(), loss)


def test_words_as_they_are():
    raw = build(CompCos, unit_words=False, shaken=False).words
    close(raw.states.detach(), words().states.float())
