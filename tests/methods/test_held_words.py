"""Methods without prompts against transcriptions of their published formulas (tests/methods/held.py)."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from duplex.methods import ade
from duplex.methods.ade import Ade, AdeOptions
from duplex.methods.canet import Canet, CanetOptions
from duplex.methods.cge import Cge, CgeOptions, CoCge
from duplex.methods.compcos import CompCos
from duplex.methods.ivr import Ivr
from duplex.methods.kg_sp import KgSp
from duplex.methods.scen import Scen, ScenOptions
from duplex.options import OptionError
from tests.methods.field import LABELS, SEEN, M, N, batch, build, scores, targets, words
from tests.methods.held import (
    Tensors,
    attention,
    batch_norm,
    cross_entropy,
    feed_forward,
    gelu,
    held,
    layer_norm,
    linear,
    perceptron,
    relu,
    same_scores,
    softmax,
    tensors_of,
    unit,
)
from tests.methods.test_ade import partner_by_hand

COLUMNS = np.array([1, 5, 6, 11])
STATES, OBJECTS = COLUMNS // N, COLUMNS % N


def composed(p: Tensors, pairs: Any) -> Tensor:
    """Unit rows of one linear map of both words of each pair."""
    pairs = np.asarray(pairs)
    words = torch.cat([p["words.states"][pairs // N], p["words.objects"][pairs % N]], 1)
    weight = torch.cat([p["composer.state.weight"], p["composer.object.weight"]], 1)
    return unit(words @ weight.T + p["composer.state.bias"])


def places(images: Any, pairs: Any) -> list[int]:
    return [list(pairs).index(c) for c in images.compositions.tolist()]


ADE: dict[str, Any] = {
    "form": "published", "unit_words": False, "train_words": True, "scale": 6.0, "regulariser": 0.4,
    "product": 0.7,
}  # fmt: skip


def ade_attended(p, name, x, y):
    """Published block: a norm shared by queries and keys, attention, MLP, a last norm, a perceptron."""
    normed = layer_norm(p, f"{name}.norm", x[:, :1]), layer_norm(p, f"{name}.norm", y)
    read, weights = attention(p, f"{name}.attend", 2, *normed)
    g = x[:, :1] + read
    g = layer_norm(p, f"{name}.last_norm", g + feed_forward(p, f"{name}.forward_part", g, gelu))
    return unit(perceptron(p, f"{name}.perceptron", g[:, 0], 1)), weights[:, 0, 1:]


def ade_tokens(p, images):
    return torch.cat([images.cls[:, None], images.inputs["patch"] @ p["tokens.project.weight"].T], 1)


@pytest.mark.parametrize("world", ["closed", "open"])
def test_ade(world, monkeypatch):
    monkeypatch.setattr(ade, "HEAD_WIDTH", 4)
    method, images = build(Ade, world, **ADE), batch(6)
    _, m, n = targets(images)
    y_s, y_o = ([partner_by_hand(i, *labels) for i in range(6)] for labels in ((m, n), (n, m)))
    pairs = LABELS.candidates(world, "train").tolist()

    def twin(p):
        x = ade_tokens(p, images)

        def crossed(name, partner, words, own):
            there, to_partner = ade_attended(p, name, x, x[partner])
            back, to_image = ade_attended(p, name, x[partner], x)
            loss = sum(cross_entropy(6 * v @ unit(words).T, own) for v in (there, back))
            return loss, (to_partner.sort(1).values - to_image.sort(1).values).abs().mean()

        states, objects = p["words.states"], p["words.objects"]
        loss_s, near_s = crossed("attend_s", y_s, states, m)
        loss_o, near_o = crossed("attend_o", y_o, objects, n)
        far = crossed("attend_s", y_o, states, m)[1] + crossed("attend_o", y_s, objects, n)[1]
        pair = 6 * ade_attended(p, "attend_c", x, x)[0] @ composed(p, pairs).T
        losses = {"composition": cross_entropy(pair, places(images, pairs)), "state": loss_s, "object": loss_o}
        return {**losses, "regulariser": 0.4 * (near_s + near_o - far)}

    parts = ["attend_c.attend.value.weight", "attend_s.attend.query.weight", "attend_o.perceptron.0.weight"]
    held(method, images, twin, [*parts, "attend_s.norm.weight", "composer.state.weight", "words.objects"])
    p = tensors_of(method)
    x = ade_tokens(p, images)
    c, s, o = (ade_attended(p, f"attend_{name}", x, x)[0] for name in "cso")
    words = s @ unit(p["words.states"][STATES]).T * (o @ unit(p["words.objects"][OBJECTS]).T)
    same_scores(scores(method, COLUMNS, images), c @ composed(p, COLUMNS).T + 0.7 * words)
    assert method.attend_o.perceptron[0].out_features == 1024
    with pytest.raises(OptionError, match="leave width out"):
        AdeOptions(width=5, form="published")


def graph_embeddings(p: Tensors, world: Any, layers: int, weights: dict[int, float] | None = None) -> Tensor:
    """Unit rows of all listed pairs: relu between `D^-1 (A + I) H W + b`, by a dense matrix."""
    pairs = LABELS.candidates(world, "train").tolist()
    words = torch.cat([p["words.states"], p["words.objects"]])
    h = torch.cat([words, torch.stack([(words[c // N] + words[M + c % N]) / 2 for c in pairs])])
    adjacency = torch.eye(len(h), dtype=h.dtype)
    for place, c in enumerate(pairs):
        state, object, node = c // N, M + c % N, M + N + place
        weight = 1.0 if weights is None else weights[c]
        adjacency[state, object] = adjacency[object, state] = weight
        adjacency[state, node] = adjacency[object, node] = weight
        adjacency[node, state] = adjacency[node, object] = 1.0
    means = adjacency / adjacency.sum(1, keepdim=True)
    for depth in range(layers):
        h = linear(p, f"network.weights.{depth}", means @ h)
        h = relu(h) if depth < layers - 1 else h
    return unit(h)


def listed_rows(p: Tensors, world: Any, layers: int, pairs: Any, weights: dict[int, float] | None = None) -> Tensor:
    listed = LABELS.candidates(world, "train").tolist()
    return graph_embeddings(p, world, layers, weights)[[M + N + listed.index(c) for c in pairs]]


@pytest.mark.parametrize("head", ["none", "rectified"])
def test_cge(head):
    own: dict[str, Any] = {} if head == "none" else {"out": 5}
    method, images = build(Cge, image_head=head, unit_words=False, width=6, **own), batch(5)

    def embedded(p):
        return images.cls if head == "none" else relu(linear(p, "head.0", images.cls))

    def twin(p):
        return {"composition": cross_entropy(embedded(p) @ listed_rows(p, "closed", 2, SEEN).T, targets(images)[0])}

    parts = ["network.weights.0.weight", "network.weights.1.bias", *(["head.0.weight"] if own else [])]
    held(method, images, twin, parts)
    p = tensors_of(method)
    columns = LABELS.candidates("closed", "test").tolist()
    same_scores(scores(method, columns, images), embedded(p) @ listed_rows(p, "closed", 2, columns).T)
    with pytest.raises(OptionError, match=f"image_head: {head} has no image_layers"):
        CgeOptions(image_head=head, image_layers=1)


def test_co_cge_in_the_open_world():
    row: dict[str, Any] = {"image_head": "none", "unit_words": False, "width": 6, "dropout_last": False}
    method, images = build(CoCge, "open", scale=9.0, margin=0.5, margin_epochs=4, **row), batch(5)
    everything = list(range(M * N))
    method.after_epoch(2)
    embedded = graph_embeddings(tensors_of(method), "open", 2, {c: float(c in SEEN) for c in everything}).detach()
    states, objects = (rows @ rows.T for rows in (embedded[:M], embedded[M : M + N]))

    def rho(c):  # of an unseen pair
        of_objects = [float(objects[c % N, o]) for o in range(N) if o != c % N and c // N * N + o in SEEN]
        of_states = [float(states[c // N, s]) for s in range(M) if s != c // N and s * N + c % N in SEEN]
        return (max([-1.0, *of_objects]) + max([-1.0, *of_states])) / 2

    found = {c: 1.0 if c in SEEN else rho(c) for c in everything}
    weights = {c: max(0.0, value) for c, value in found.items()}
    margins = torch.tensor([0.0 if c in SEEN else 0.5 * 2 / 4 * found[c] for c in everything])

    def logits(p, columns):
        return 9 * unit(images.cls) @ listed_rows(p, "open", 2, columns, weights).T

    def twin(p):
        return {"composition": cross_entropy(logits(p, everything) - 9 * margins, places(images, everything))}

    held(method, images, twin, ["network.weights.0.weight", "network.weights.1.weight"])
    same_scores(scores(method, COLUMNS, images), logits(tensors_of(method), COLUMNS.tolist()))


def test_only_the_convolutions_before_the_last_have_dropout():
    images = batch(5)
    for last, layers, random in ((True, 1, True), (False, 1, False), (False, 2, True)):
        row: dict[str, Any] = {"image_head": "none", "width": 6, "layers": layers, "dropout_last": last}
        method = build(Cge, **row).train()
        first, second = (method.losses(images, method.shared())["composition"] for _ in range(2))
        assert (first != second) == random


def test_compcos():
    method, images = build(CompCos, width=5, layers=1, scale=7.0, unit_words=False), batch(5)

    def logits(p, pairs):
        return 7 * unit(perceptron(p, "head", unit(images.cls), 1)) @ composed(p, pairs).T

    def twin(p):
        return {"composition": cross_entropy(logits(p, SEEN), targets(images)[0])}

    held(method, images, twin, ["head.0.weight", "composer.object.weight", "words.states"])
    same_scores(scores(method, COLUMNS, images), logits(tensors_of(method), COLUMNS))


def test_kg_sp():
    method, images = build(KgSp, width=6), batch(5)

    def logits(p):
        return [perceptron(p, name, unit(images.cls), 2) for name in ("states", "objects")]

    def twin(p):
        paths = zip(("state", "object"), logits(p), targets(images)[1:], strict=True)
        return {name: cross_entropy(*path) for name, *path in paths}

    held(method, images, twin, ["states.0.weight", "objects.8.weight"])
    s, o = logits(tensors_of(method))
    same_scores(scores(method, COLUMNS, images), softmax(s)[:, STATES] * softmax(o)[:, OBJECTS])


CANET: dict[str, Any] = {"form": "published", "dropout": 0.5, "unit_words": False, "scale": 4.0, "share": 0.3}


def canet_cosines(p, x, pairs):
    """Cosines of states, objects and pairs."""
    objects = unit(perceptron(p, "see_o", x, 1)) @ unit(p["words.objects"]).T
    best = p["words.objects"][objects.argmax(1)]
    beta = relu(perceptron(p, "join", torch.cat([best, x], 1), 1))
    hidden = linear(p, "learner.scale_first", beta)[:, None] * linear(p, "learner.first", p["words.states"])
    hidden = relu(layer_norm(p, "learner.between.0", hidden))
    embedded = linear(p, "learner.scale_second", beta)[:, None] * linear(p, "learner.second", hidden)
    states = torch.einsum("bw,bmw->bm", unit(perceptron(p, "see_s", x, 1)), unit(embedded))
    words = torch.cat([p["words.states"][pairs // N], p["words.objects"][pairs % N]], 1)
    both = unit(relu(perceptron(p, "compose", words, 1)))
    return states, objects, unit(perceptron(p, "see_c", x, 1)) @ both.T


def test_canet():
    method, images = build(Canet, **CANET), batch(5)
    place, m, n = targets(images)

    def twin(p):
        s, o, c = canet_cosines(p, images.cls, np.array(SEEN))
        return {
            "state": cross_entropy(4 * s, m) / 2,
            "object": cross_entropy(4 * o, n) / 2,
            "composition": cross_entropy(4 * c, place),
        }

    parts = ["see_s.0.weight", "see_o.4.weight", "join.0.weight", "learner.scale_first.weight", "words.states"]
    held(method, images, twin, [*parts, "learner.second.weight", "compose.0.weight"])
    s, o, c = canet_cosines(tensors_of(method), images.cls, COLUMNS)
    words = 0.3 * (1 + s)[:, STATES] / 2 * (1 + o)[:, OBJECTS] / 2
    same_scores(scores(method, COLUMNS, images), 0.7 * (1 + c) / 2 + words)


def test_canet_starts_as_its_code():
    method = build(Canet, shaken=False, **CANET)
    widths = [method.see_s[0].out_features, method.compose[0].out_features, method.learner.first.out_features]
    assert widths == [8, 12, 12] and method.join[0].out_features == 6
    weights = {
        name: float(value.detach().std()) for name, value in method.named_parameters() if name.endswith("weight")
    }
    drawn = {name for name, deviation in weights.items() if deviation > 0.1}
    assert drawn == {"learner.scale_first.weight", "learner.scale_second.weight"}
    assert 0.005 < method.words.states.detach().std() < 0.02
    assert 0.0005 < weights["see_s.0.weight"] < 0.0015
    with pytest.raises(OptionError, match="has no layers"):
        CanetOptions(form="published", layers=2)


IVR: dict[str, Any] = {
    "form": "published", "width": 6, "scale": 5.0, "discard": 0.34, "again": 0.7, "penalty": 0.5,
}  # fmt: skip


def ivr_head(p, side, f):
    return relu(batch_norm(p, f"{side}.head.1", linear(p, f"{side}.head.0", f)))


def ivr_side(p, side, f, own, domain):
    """`CE + CE'`, `L + L'`, `L_grad` and the partners; gradients of V and V' by automatic differentiation."""
    partners = []
    for i in range(len(f)):
        after = [(i + k) % len(f) for k in range(1, len(f))]
        partners += [(i, j) for j in after if own[j] == own[i] and domain[j] != domain[i]][:1]
    images, others = (list(row) for row in zip(*partners, strict=True))
    labels = [own[i] for i in images]
    h = ivr_head(p, side, f)
    plain = cross_entropy(linear(p, f"{side}.classify", h), own)
    plain = plain + cross_entropy(linear(p, f"{side}.classify_partner", h[others]), labels)
    apart = (p[f"{side}.classify.weight"] - p[f"{side}.classify_partner.weight"]).detach().abs()[labels]
    kept = apart < apart.sort(1).values[:, 6 - int(0.34 * 6)][:, None]
    again, gradients = [], []
    for name, rows in (("classify", h[images]), ("classify_partner", h[others])):
        loss = cross_entropy(linear(p, f"{side}.{name}", rows * kept), labels)
        again.append(loss)
        classifier = [p[f"{side}.{name}.weight"], p[f"{side}.{name}.bias"]]
        gradients.append(torch.autograd.grad(loss, classifier, create_graph=True))
    squares = [(ours - theirs).pow(2).sum() / 2 for ours, theirs in zip(*gradients, strict=True)]
    return plain, sum(again), sum(squares), others


def test_ivr():
    method, images = build(Ivr, **IVR), batch(7)
    place, m, n = targets(images)

    def twin(p):
        f = perceptron(p, "embed", images.cls, 1)
        pairs = 5 * unit(f) @ composed(p, SEEN).T
        plain_s, again_s, apart_s, with_state = ivr_side(p, "of_states", f, m, n)
        plain_o, again_o, apart_o, with_object = ivr_side(p, "of_objects", f, n, m)
        of_states = linear(p, "of_states.classify", ivr_head(p, "of_states", f))
        of_objects = linear(p, "of_objects.classify", ivr_head(p, "of_objects", f))
        whole = [cross_entropy(pairs[rows], [place[i] for i in rows]) for rows in (with_state, with_object)]
        words = cross_entropy(of_states[with_object], [m[i] for i in with_object])
        words = words + cross_entropy(of_objects[with_state], [n[i] for i in with_state])
        return {
            "composition": cross_entropy(pairs, place),
            "state": plain_s,
            "object": plain_o,
            "again": 0.7 * (again_s + again_o),
            "penalty": 0.5 * (apart_s + apart_o),
            "partner_composition": sum(whole),
            "partner_words": words,
        }

    parts = ["embed.0.weight", "of_states.head.0.weight", "of_objects.classify_partner.weight", "words.states"]
    held(method, images, twin, [*parts, "of_states.classify.weight", "composer.state.weight"])
    p = tensors_of(method)
    f = perceptron(p, "embed", images.cls, 1)
    s, o = (softmax(linear(p, f"{side}.classify", ivr_head(p, side, f))) for side in ("of_states", "of_objects"))
    same_scores(scores(method, COLUMNS, images), s[:, STATES] * o[:, OBJECTS] + unit(f) @ composed(p, COLUMNS).T)
    assert method.embed[0].out_features == 1024 and method.words.width == 6
    assert not torch.equal(build(Ivr, shaken=False, **IVR).words.states.detach(), words().states)


SCEN: dict[str, Any] = {
    "form": "published", "unit_words": False, "train_words": True, "temperature": 0.5, "scale": 6.0, "contrast": 0.7,
    "auxiliary": 0.5,
}  # fmt: skip


def test_scen():
    method, images = build(Scen, seed=1, **SCEN), batch(8)  # whose relus leave no zero vector
    place, m, n = targets(images)

    def spaces(p):
        x = perceptron(p, "embed", images.cls, 1)
        states, objects = (relu(perceptron(p, name, x, 1)) for name in ("encode_s", "encode_o"))
        return unit(states), unit(objects), unit(linear(p, "fuse", torch.cat([states, objects], 1)))

    def contrast(h, same, other):
        terms = []
        for i in range(len(h)):
            after = [(i + k) % len(h) for k in range(1, len(h))]
            positives = [j for j in after if same[j] == same[i]]
            rivals = [j for j in after if other[j] == other[i] and same[j] != same[i]]
            if positives and rivals:
                similar = torch.exp(h @ h[i] / 0.5)
                own = similar[positives[0]]
                terms.append(-(own / (own + similar[rivals].sum())).log())
        return torch.stack(terms).mean()

    def twin(p):
        h_s, h_o, fused = spaces(p)
        return {
            "composition": cross_entropy(6 * fused @ composed(p, SEEN).T, place),
            "state": 0.5 * 0.4 * cross_entropy(6 * h_s @ p["words.states"].T, m),
            "object": 0.5 * 0.6 * cross_entropy(6 * h_o @ p["words.objects"].T, n),
            "state_contrast": 0.7 * contrast(h_s, m, n),
            "object_contrast": 0.7 * contrast(h_o, n, m),
        }

    parts = ["embed.0.weight", "encode_s.4.weight", "encode_o.0.weight", "fuse.weight", "words.objects"]
    held(method, images, twin, parts)
    p = tensors_of(method)
    same_scores(scores(method, COLUMNS, images), 6 * spaces(p)[2] @ composed(p, COLUMNS).T)
    assert [method.embed[0].out_features, method.encode_s[0].out_features] == [768, 1024]
    with pytest.raises(OptionError, match="leave width out"):
        ScenOptions(form="published", width=600)
