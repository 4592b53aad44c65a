"""Methods with prompts against transcriptions of their published formulas (tests/methods/held.py)."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from duplex.methods.base import Batch
from duplex.methods.dfsp import Dfsp, DfspOptions
from duplex.methods.families import start_like_torch
from duplex.methods.prompt_method import PromptMethod
from duplex.methods.troika import Troika
from duplex.options import OptionError
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
    with pytest.raises(OptionError, match="form: published is about the fusion"):
        DfspOptions(form="published", fusion="none")


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
