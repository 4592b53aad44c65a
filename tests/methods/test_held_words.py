"""Methods without prompts against transcriptions of their published formulas (tests/methods/held.py)."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from duplex.methods import ade
from duplex.methods.ade import Ade, AdeOptions
from duplex.methods.cge import Cge, CgeOptions, CoCge
from duplex.options import OptionError
from tests.methods.field import LABELS, SEEN, M, N, batch, build, scores, targets
from tests.methods.held import (
    Tensors,
    attention,
    cross_entropy,
    feed_forward,
    gelu,
    held,
    layer_norm,
    linear,
    perceptron,
    relu,
    same_scores,
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
