"""Methods with prompts against transcriptions of their published formulas (tests/methods/held.py)."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from duplex.methods.base import Batch
from duplex.methods.caila import Caila
from duplex.methods.cluspro import ClusPro
from duplex.methods.dfsp import Dfsp, DfspOptions
from duplex.methods.families import start_like_torch
from duplex.methods.plid import Plid
from duplex.methods.prompt_method import PromptMethod
from duplex.methods.troika import Troika
from duplex.methods.vp_cmjl import VpCmjl
from tests.methods.field import SEEN, SOFT, M, N, batch, build, scores, targets
from tests.methods.held import (
    Tensors,
    attention,
    batch_norm,
    cross_block,
    cross_entropy,
    feed_forward,
    held,
    layer_norm,
    linear,
    quick_gelu,
    relu,
    same_scores,
    softmax,
    tensors_of,
    unit,
)
from tests.methods.test_cluspro import clusters_by_hand

COLUMNS = np.array([1, 5, 6, 11])
STATES, OBJECTS = torch.tensor(COLUMNS // N), torch.tensor(COLUMNS % N)
PROMPTS = "paths.prompts.learned_rows"


def group_means(rows: Tensor, pairs: Any) -> tuple[Tensor, Tensor]:
    """Means [M, d] and [N, d] of the pairs' rows, 0 where there is none."""
    pairs = np.asarray(pairs)
    zero = rows[:1].sum(0) * 0
    states = [rows[pairs // N == m].mean(0) if (pairs // N == m).any() else zero for m in range(M)]
    objects = [rows[pairs % N == n].mean(0) if (pairs % N == n).any() else zero for n in range(N)]
    return torch.stack(states), torch.stack(objects)


def disentangled(p: Tensors, name: str, x: Tensor) -> Tensor:
    return unit(relu(batch_norm(p, f"{name}.layers.1", linear(p, f"{name}.layers.0", x))))


def three_losses(logits: Any, images: Batch, weight: float = 1.0) -> Tensors:
    names = zip(("semantic", "state", "object"), (1, weight, weight), logits, targets(images), strict=True)
    return {name: share * cross_entropy(*row) for name, share, *row in names}


def test_csp():
    method, images = build(PromptMethod, **{**SOFT, "context": "fixed", "score": "logit"}), batch(5)

    def twin(p):
        return {"semantic": cross_entropy(100 * unit(images.cls) @ method.shared().compositions.T, targets(images)[0])}

    method.paths.scale = 100.0
    held(method, images, twin, [PROMPTS])
    assert PROMPTS in dict(method.named_parameters()) and len(method.paths.prompts.learned_rows) == M + N
    t = method.paths.prompts.encode(COLUMNS).compositions
    same_scores(scores(method, COLUMNS, images), 100 * unit(images.cls) @ t.T)


TROIKA: dict[str, Any] = {
    "form": "published", "adapter": "none", "disentangler": "batch_norm", "score": "logit", "layers": 2, "heads": 2,
    "inner": 2, "start": 0.4, "primitives": 0.1,
}  # fmt: skip


def troika_logits(method, images, p, t):
    x = images.cls
    features = [unit(x), *(disentangled(p, f"paths.factors.{name}", x) for name in ("state", "object"))]
    tokens = torch.cat([x[:, None], images.inputs["patch"] @ p["tokens.project.weight"].T], 1)
    logits = []
    for feature, texts in zip(features, t, strict=True):
        tokens = layer_norm(p, "traction.norm", tokens)  # of the tokens that the path before has normalised
        h = texts.expand(len(x), *texts.shape)
        for depth in range(2):
            name = f"traction.layers.{depth}"
            h = h + attention(p, f"{name}.attend", 2, h, tokens)[0]
            h = h + feed_forward(p, f"{name}.forward_part", h, quick_gelu)
        pulled = unit(texts + p["traction.strength"] * h)
        logits.append(method.paths.scale * torch.einsum("bd,bcd->bc", feature, pulled))
    return logits


def test_troika():
    method, images = build(Troika, **TROIKA), batch(4)
    for name in ("state", "object"):
        getattr(method.paths.factors, name).layers[1].running_var.fill_(1.7)
    assert not any("attend" in name and "bias" in name and "out" not in name for name, _ in method.named_parameters())

    def twin(p):
        return three_losses(troika_logits(method, images, p, method.shared()), images, 0.1)

    parts = [PROMPTS, "traction.norm.weight", "traction.layers.0.attend.key.weight", "traction.strength"]
    parts += ["traction.layers.1.forward_part.1.weight", "paths.factors.object.layers.0.weight"]
    held(method, images, twin, parts)
    t = method.paths.encode(COLUMNS, ("semantic", "state", "object"))
    c, s, o = troika_logits(method, images, tensors_of(method), t)
    same_scores(scores(method, COLUMNS, images), c + softmax(s)[:, STATES] * softmax(o)[:, OBJECTS])


def test_troika_trains_as_in_evaluation_after_its_first_epoch():
    method, images = build(Troika, **TROIKA, dropout=0.5), batch(4)
    norm = method.train().paths.factors.state.layers[1]
    before = norm.running_mean.clone()
    first, second = (method.losses(images, method.shared())["state"] for _ in range(2))
    assert first != second and not torch.equal(norm.running_mean, before)
    method.after_epoch(1)
    loaded = build(Troika, **TROIKA, dropout=0.5)
    loaded.load_state_dict(method.state_dict())
    for each in (method.train(), loaded.train()):
        norm = each.paths.factors.state.layers[1]
        before = norm.running_mean.clone()
        first, second = (each.losses(images, each.shared())["state"] for _ in range(2))
        assert first == second and torch.equal(norm.running_mean, before)


DFSP: dict[str, Any] = {"form": "published", "score": "logit", "heads": 2, "primitives": 0.2, "plain": 0.3, "keep": 0.7}


def self_block(p, name, x):
    y = layer_norm(p, f"{name}.norm_x", x)
    g = x + attention(p, f"{name}.attend", 2, y, y)[0]
    return g + feed_forward(p, f"{name}.forward_part", g, quick_gelu)


def dfsp_logits(method, images, p, t, pairs):
    fusion = method.options.fusion
    z = images.cls
    primitives = torch.cat(group_means(t, pairs))
    x = torch.cat([z[:, None], images.inputs["patch"] @ p["published.tokens.project.weight"].T], 1)
    seen = x
    if fusion in ("t2i", "bif"):
        y = linear(p, "published.mix_texts", linear(p, "published.map_texts", primitives).T).T
        seen = cross_block(p, "published.to_image", 2, x, y)[0]
    image = unit(0.7 * z + 0.3 * self_block(p, "published.images", seen)[:, 0])
    rows = []
    for place, feature in enumerate(image):
        made = torch.stack([self_block(p, "published.texts", row[None])[0] for row in t])
        if fusion in ("i2t", "bif"):
            y = linear(p, "published.mix_images", linear(p, "published.map_images", x[place]).T).T  # [M + N, d]
            both = zip(primitives, y, strict=True)
            fused = [cross_block(p, "published.to_text", 2, one[None], other[None])[0] for one, other in both]
            of_words = [self_block(p, "published.texts", one)[0] for one in fused]
            made = torch.stack([of_words[c // N] * of_words[M + c % N] for c in pairs])
            made = linear(p, "published.compose", made)
        rows.append(method.scale * unit(0.7 * t + 0.3 * made) @ feature)
    return torch.stack(rows)


@pytest.mark.parametrize("fusion", ["t2i", "i2t", "bif"])
def test_dfsp(fusion):
    method, images = build(Dfsp, fusion=fusion, **DFSP), batch(3)
    place, m, n = targets(images)

    def twin(p):
        t = method.shared().compositions
        plain = method.scale * unit(images.cls) @ t.T
        of_states, of_objects = group_means(plain.T, SEEN)  # the code averages logits
        return {
            "fused": cross_entropy(dfsp_logits(method, images, p, t, SEEN), place),
            "primitives": 0.2 * (cross_entropy(of_states.T, m) + cross_entropy(of_objects.T, n)),
            "plain": 0.3 * cross_entropy(plain, place),
        }

    parts = ["prompts.learned_rows", "published.images.attend.value.weight", "published.texts.forward_part.1.weight"]
    parts += ["published.mix_texts.weight", "published.to_image.attend.query.weight"] if fusion != "i2t" else []
    parts += ["published.mix_images.weight", "published.compose.bias"] if fusion != "t2i" else []
    held(method, images, twin, parts)
    t = method.prompts.encode(COLUMNS).compositions
    expected = dfsp_logits(method, images, tensors_of(method), t, COLUMNS)
    same_scores(scores(method, COLUMNS, images), expected)


def test_dfsp_drops_out_in_training_alone_and_knows_no_new_words():
    method, images = build(Dfsp, **DFSP).train(), batch(3)
    assert method.losses(images, method.shared())["fused"] != method.losses(images, method.shared())["fused"]
    assert Dfsp.scores_new_words(DfspOptions()) and not Dfsp.scores_new_words(DfspOptions(form="published"))


def test_published_blocks_start_like_torchs_attention():
    method = build(Dfsp, shaken=False, **DFSP)
    part = method.published.to_image.attend
    torch.manual_seed(5)
    own = torch.nn.MultiheadAttention(8, 2)
    torch.manual_seed(5)
    start_like_torch(part)
    assert not any(layer.bias.any() for layer in (part.query, part.key, part.value, part.out))
    largest = max(float(layer.weight.detach().abs().max()) for layer in (part.query, part.key, part.value))
    assert abs(largest - float(own.in_proj_weight.detach().abs().max())) < 0.1 * largest


def test_caila():
    method, images = build(Caila, form="published", shift=False, width=4, scale=0.5, state_end="object"), batch(5)

    def adapted(p, name, x):
        return x + 0.5 * linear(p, f"{name}.up", relu(linear(p, f"{name}.down", x)))

    def texts(p, t, pairs):
        pairs = np.asarray(pairs)
        states, objects = adapted(p, "texts.state", t.states), adapted(p, "texts.object", t.objects)
        whole = (adapted(p, "texts.whole", t.compositions) + states[pairs // N] + objects[pairs % N]) / 3
        return unit(whole), unit(states), unit(objects)

    def features(p):
        x = unit(images.cls)
        parts = [adapted(p, f"images.{name}", x) for name in ("whole", "state", "object")]
        return unit(sum(parts[1:], parts[0])), unit(parts[1]), unit(parts[2])

    def twin(p):
        paths = zip(features(p), texts(p, method.prompts(np.array(SEEN)), SEEN), strict=True)
        losses = three_losses([method.scale * z @ t.T for z, t in paths], images)
        return {"composition": losses.pop("semantic"), **losses}

    lengths = method.prompts(np.array(SEEN)).compositions.norm(dim=-1)
    assert lengths.max() > 1.1 * lengths.min(), "text features keep their length"
    parts = ["texts.whole.up.weight", "texts.state.down.weight", "images.object.up.weight", "images.whole.down.bias"]
    held(method, images, twin, parts)
    p = tensors_of(method)
    t = texts(p, method.prompts.encode(COLUMNS), COLUMNS)[0]
    same_scores(scores(method, COLUMNS, images), softmax(method.scale * features(p)[0] @ t.T))


def enriched(p, t, described):
    """`t + Attention(t, D)` with one head."""
    q = linear(p, "enrich.query", t)
    keys, values = (linear(p, f"enrich.{name}", described) for name in ("key", "value"))
    weights = softmax(torch.einsum("cd,ckd->ck", q, keys) / t.shape[-1] ** 0.5)
    return t + linear(p, "enrich.out", torch.einsum("ck,ckd->cd", weights, values))


def plid_factors(p, x):
    hidden = {name: relu(linear(p, f"factors.{name}.first", x)) for name in ("state", "object")}
    return [unit(linear(p, f"factors.{name}.second", rows)) for name, rows in hidden.items()]


def test_plid():
    method, images = build(Plid, width=5, score="logit", primitives=0.3), batch(4)
    described = method.described.double()
    pairs = np.array(SEEN)
    s, o = torch.tensor(pairs // N), torch.tensor(pairs % N)

    def margins(x, mean, rows, own):
        samples = unit(mean[:, None] + rows)  # [C, D, d]
        apart = samples - samples.mean(1, keepdim=True)
        covariance = torch.einsum("ckd,ekd->ced", apart, apart) / (samples.shape[1] - 1)
        own = torch.as_tensor(own)
        both = covariance.diagonal(dim1=0, dim2=1).T
        quadratic = both[None] + both[own][:, None] - 2 * covariance[own]  # [B, C, d]
        return method.scale**2 / 2 * torch.einsum("bd,bcd->bc", x.pow(2), quadratic)

    def twin(p):
        mean = enriched(p, method.prompts(pairs).compositions, described)
        means = (mean, *group_means(mean, pairs))
        rows = (described, *group_means(described, pairs))
        z = (unit(images.cls), *plid_factors(p, unit(images.cls)))
        logits = [method.scale * f @ unit(t).T for f, t in zip(z, means, strict=True)]
        logits[0] = 0.9 * logits[0] + 0.1 * (logits[1][:, s] + logits[2][:, o])
        paths = zip(z, means, rows, targets(images), strict=True)
        logits = [path + margins(*row) for path, row in zip(logits, paths, strict=True)]
        losses = three_losses(logits, images, 0.3)
        return {"composition": losses.pop("semantic"), **losses}

    parts = ["prompts.learned_rows", "enrich.key.weight", "enrich.out.weight", "factors.state.first.weight"]
    held(method, images, twin, parts)
    p = tensors_of(method)
    x = unit(images.cls)
    seen = enriched(p, method.prompts.encode(pairs).compositions, described)
    t = unit(enriched(p, method.prompts.encode(COLUMNS).compositions, method.describe(COLUMNS).double()))
    words = zip(plid_factors(p, x), group_means(seen, pairs), (STATES, OBJECTS), strict=True)
    of_words = [method.scale * f @ unit(mean).T[:, own] for f, mean, own in words]
    same_scores(scores(method, COLUMNS, images), 0.9 * method.scale * x @ t.T + 0.1 * (of_words[0] + of_words[1]))


CLUSPRO: dict[str, Any] = {
    "form": "published", "adapter": "none", "disentangler": "batch_norm", "score": "logit", "clusters": 3,
    "temperature": 0.4, "contrast": 0.7, "decorrelation": 0.3,
}  # fmt: skip


def test_cluspro():
    method, images = build(ClusPro, **CLUSPRO), batch(9)
    _, m, n = targets(images)

    def twice(p, name):
        first = disentangled(p, f"paths.factors.{name}", images.cls)
        return first, disentangled(p, f"second.{name}", first)

    def logits(p, t):
        features = (unit(images.cls), twice(p, "state")[1], twice(p, "object")[1])
        return [method.paths.scale * z @ rows.T for z, rows in zip(features, t, strict=True)]

    def dependence(x, y):
        a, b = x - x.mean(0), y - y.mean(0)
        return ((a.T @ b) / (len(a) - 1)).pow(2).sum()

    def twin(p):
        (first_s, z_s), (first_o, z_o) = twice(p, "state"), twice(p, "object")
        k_s = torch.tensor(clusters_by_hand(first_s.detach(), m, p["states"]))
        k_o = torch.tensor(clusters_by_hand(first_o.detach(), n, p["objects"]))
        states, objects = p["states"].flatten(0, 1), p["objects"].flatten(0, 1)
        every = torch.cat([disentangled(p, "second.state", states), disentangled(p, "second.object", objects)])
        own_s, own_o = torch.tensor(m) * 3 + k_s, 3 * M + torch.tensor(n) * 3 + k_o
        contrast = cross_entropy(z_s @ every.T / 0.4, own_s) + cross_entropy(z_o @ every.T / 0.4, own_o)
        apart = dependence(z_s, p["objects"][n, k_o]) + dependence(z_o, p["states"][m, k_s])
        losses = three_losses(logits(p, method.shared()), images)
        return {**losses, "contrast": 0.7 * contrast, "decorrelation": 0.3 * apart}

    parts = [PROMPTS, "paths.factors.state.layers.0.weight", "second.object.layers.0.weight"]
    held(method, images, twin, [*parts, "second.state.layers.1.bias"])
    t = method.paths.encode(COLUMNS, ("semantic", "state", "object"))
    c, s, o = logits(tensors_of(method), t)
    same_scores(scores(method, COLUMNS, images), c + softmax(s)[:, STATES] * softmax(o)[:, OBJECTS])


VP_CMJL: dict[str, Any] = {
    "form": "published", "adapter": "none", "disentangler": "batch_norm", "score": "logit", "joined": "sum",
    "heads": 2, "blend": 0.3,
}  # fmt: skip


def vp_cmjl_logits(method, images, p, t, pairs):
    pairs = np.asarray(pairs)
    scale, x = method.paths.scale, images.cls
    text = [scale * unit(x) @ t.compositions.T]
    for name, rows in (("read_s", t.states), ("read_o", t.objects)):
        read, weights = cross_block(p, name, 2, x, rows)
        text.append(scale * (unit(read) @ rows.T + weights))
    proxies = linear(p, "join", torch.cat([p["states"][pairs // N], p["objects"][pairs % N]], 1))
    visual = [scale * unit(x) @ unit(proxies).T]
    for name, rows in (("state", p["states"]), ("object", p["objects"])):
        visual.append(scale * disentangled(p, f"paths.factors.{name}", x) @ unit(rows).T)
    return text, visual


def test_vp_cmjl():
    method, images = build(VpCmjl, **VP_CMJL), batch(4)

    def twin(p):
        text, visual = vp_cmjl_logits(method, images, p, method.shared(), SEEN)
        by_proxy = three_losses(visual, images)
        p_t, p_v = softmax(text[0]), softmax(visual[0])
        found = three_losses(text, images) | {"composition_proxy": by_proxy["semantic"]}
        found |= {f"{name}_proxy": by_proxy[name] for name in ("state", "object")}
        return found | {"joint": (p_t * (p_t / p_v).log()).sum() / len(p_t)}

    parts = [PROMPTS, "read_s.attend.key.weight", "read_o.forward_part.3.weight", "join.weight", "objects"]
    held(method, images, twin, [*parts, "paths.factors.state.layers.0.weight"])
    t = method.paths.encode(COLUMNS, ("semantic", "state", "object"))
    both = zip(*vp_cmjl_logits(method, images, tensors_of(method), t, COLUMNS), strict=True)
    c, s, o = (0.7 * text + 0.3 * visual for text, visual in both)
    same_scores(scores(method, COLUMNS, images), c + softmax(s)[:, STATES] + softmax(o)[:, OBJECTS])
