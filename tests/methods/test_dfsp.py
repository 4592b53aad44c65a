from typing import Any

import pytest
import torch

from duplex.errors import UsageError
from duplex.methods.dfsp import Dfsp, DfspOptions
from duplex.methods.prompt_method import PromptMethod
from tests.methods.field import SEEN, SOFT, N, batch, build, check_losses, context, primitive_means, scores, targets
from tests.methods.loops import close, cross_block, cross_entropy, dot, linear, products, softmax, unit

ROW: dict[str, Any] = {"heads": 2, "primitives": 0.2, "plain": 0.3, "keep": 0.7}
FUSIONS = ["t2i", "i2t", "bif"]


def fused_by_hand(method, images, columns, t, states, objects):
    fusion, rows = method.options.fusion, []
    for image, tokens in zip(images.cls, images.inputs["patch"], strict=True):
        x = z = unit(image)
        if fusion in ("t2i", "bif"):
            whole = [z, *(linear(method.project, y) for y in tokens)]
            h = [cross_block(method.to_image, row, [*states, *objects])[0] for row in whole]
            x = unit(0.7 * z + 0.3 * cross_block(method.to_itself, h[0], h)[0])
        pulled = t
        if fusion in ("i2t", "bif"):
            s, o = ([cross_block(method.to_text, row, tokens)[0] for row in part] for part in (states, objects))
            made = [linear(method.compose, s[c // N] * o[c % N]) for c in columns]
            pulled = [unit(0.7 * row + 0.3 * new) for row, new in zip(t, made, strict=True)]
        rows.append([method.scale * dot(x, r) for r in pulled])
    return rows


@pytest.mark.parametrize("fusion", FUSIONS)
def test_losses_and_scores_by_loops(fusion):
    method, images = build(Dfsp, fusion=fusion, **ROW), batch(3)
    t = list(method.shared().compositions.detach())
    states, objects = primitive_means(t)
    place, m, n = targets(images)
    z = [unit(row) for row in images.cls]
    primitives = zip((states, objects), (m, n), strict=True)
    check_losses(
        method,
        images,
        fused=cross_entropy(fused_by_hand(method, images, SEEN, t, states, objects), place),
        primitives=0.2 * sum(cross_entropy(products(z, rows, method.scale), own) for rows, own in primitives),
        plain=0.3 * cross_entropy(products(z, t, method.scale), place),
    )
    candidates = [3, 8, 0]
    states, objects = primitive_means(list(method.prompts.encode(torch.tensor(SEEN).numpy()).compositions))
    t = list(method.prompts.encode(torch.tensor(candidates).numpy()).compositions)
    fused = fused_by_hand(method, images, candidates, t, states, objects)
    close(scores(method, candidates, images), [softmax(row) for row in fused])


@pytest.mark.parametrize("fusion", FUSIONS)
def test_before_training_it_equals_its_soft_prompt(fusion):
    method, soft, images = build(Dfsp, fusion=fusion, shaken=False, **ROW), build(PromptMethod, **SOFT), batch(4)
    with torch.no_grad():
        method.prompts.learned_rows.copy_(soft.paths.prompts.learned_rows)
    close(method.losses(images, method.shared())["fused"].item(), soft.losses(images, soft.shared())["semantic"].item())
    torch.testing.assert_close(scores(method, range(12), images).float(), scores(soft, range(12), images))


def test_patch_tokens_are_needed_and_heads_divide_the_width():
    assert "patch" in Dfsp.needs(DfspOptions())
    with pytest.raises(UsageError, match="heads is 3"):
        Dfsp(context(), DfspOptions(heads=3))
