"""DFSP against loops; before training it is its soft prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from duplex.errors import UsageError
from duplex.methods.dfsp import Dfsp, DfspOptions
from duplex.methods.prompts import PromptMethod
from tests.methods.field import SEEN, M, N, batch, build, close, cross_entropy, dot, linear, scores, task, unit
from tests.methods.test_troika import attend_by_hand, normed

ROW: dict[str, Any] = {"heads": 2, "primitives": 0.2, "plain": 0.3, "keep": 0.7}
FUSIONS = ["t2i", "i2t", "bif", "none"]
SOFT: dict[str, Any] = {"paths": "composition", "adapter": "none", "losses": ("semantic",), "inference": ("semantic",)}


def decomposed_by_hand(t):
    def mean(chosen):
        return sum(chosen) / len(chosen)

    states = [mean([row for row, c in zip(t, SEEN, strict=True) if c // N == m]) for m in range(M)]
    return states, [mean([row for row, c in zip(t, SEEN, strict=True) if c % N == n]) for n in range(N)]


def block_by_hand(block, x, y):
    norm, first, gelu, second = block.forward_part
    g = x + attend_by_hand(block.attend, normed(block.norm_x, x), [normed(block.norm_y, row) for row in y])
    return g + linear(second, gelu(linear(first, normed(norm, g))))


def fused_by_hand(method, images, columns, t, states, objects):
    fusion, rows = method.options.fusion, []
    for image, tokens in zip(images.cls, images.inputs["patch"], strict=True):
        x = z = unit(image)
        if fusion in ("t2i", "bif"):
            whole = [z, *(linear(method.project, y) for y in tokens)]
            h = [block_by_hand(method.to_image, row, [*states, *objects]) for row in whole]
            x = unit(0.7 * z + 0.3 * block_by_hand(method.to_itself, h[0], h))
        pulled = t
        if fusion in ("i2t", "bif"):
            s, o = ([block_by_hand(method.to_text, row, tokens) for row in part] for part in (states, objects))
            made = [linear(method.compose, s[c // N] * o[c % N]) for c in columns]
            pulled = [unit(0.7 * row + 0.3 * new) for row, new in zip(t, made, strict=True)]
        rows.append([method.scale * dot(x, r) for r in pulled])
    return rows


@pytest.mark.parametrize("fusion", FUSIONS)
def test_losses_and_scores_by_loops(fusion):
    method, images = build(Dfsp, fusion=fusion, **ROW), batch(3)
    shared = method.shared()
    t = list(shared.compositions.detach())
    states, objects = decomposed_by_hand(t)
    own = images.compositions.tolist()
    losses = method.losses(images, shared)
    fused = fused_by_hand(method, images, SEEN, t, states, objects)
    close(losses["fused"].item(), cross_entropy(fused, map(SEEN.index, own)))
    z = [unit(row) for row in images.cls]

    def plain(rows):
        return [[method.scale * dot(x, r) for r in rows] for x in z]

    both = cross_entropy(plain(states), [c // N for c in own]) + cross_entropy(plain(objects), [c % N for c in own])
    close(losses["primitives"].item(), 0.2 * both)
    close(losses["plain"].item(), 0.3 * cross_entropy(plain(t), map(SEEN.index, own)))
    candidates = [3, 8, 0]
    seen = method.prompts.encode(torch.tensor(SEEN).numpy()).compositions
    states, objects = decomposed_by_hand(list(seen))
    t = list(method.prompts.encode(torch.tensor(candidates).numpy()).compositions)
    close(
        scores(method, candidates, images),
        torch.tensor(fused_by_hand(method, images, candidates, t, states, objects), dtype=torch.float64).softmax(-1),
    )


@pytest.mark.parametrize("fusion", FUSIONS)
def test_before_training_it_equals_its_soft_prompt(fusion):
    method, soft, images = build(Dfsp, fusion=fusion, shaken=False, **ROW), build(PromptMethod, **SOFT), batch(4)
    with torch.no_grad():
        method.prompts.learned_rows.copy_(soft.paths.prompts.learned_rows)
    close(method.losses(images, method.shared())["fused"].item(), soft.losses(images, soft.shared())["semantic"].item())
    torch.testing.assert_close(scores(method, range(12), images).float(), scores(soft, range(12), images))


def test_without_fusion_no_patch_tokens_are_needed():
    assert "patch" not in Dfsp.needs(DfspOptions(fusion="none"))
    assert "patch" in Dfsp.needs(DfspOptions(fusion="t2i"))
    with pytest.raises(UsageError, match="heads is 3"):
        Dfsp(task(), DfspOptions(heads=3))
    assert Dfsp(task(), DfspOptions(heads=3, fusion="none")).options.heads == 3
