import math
from typing import Any

import torch

from duplex.encoders.prompt_tree import PromptTree
from duplex.labels import prompt_name
from duplex.methods.clear import Clear
from tests.methods.field import LABELS, N, batch, build, check_losses, scores, targets
from tests.methods.loops import close, cross_block, cross_entropy, dot, linear, products, softmax, unit

SMALL: dict[str, Any] = {"width": 5, "layers": 2, "heads": 2, "ratio": 0.6}


def reasoned(method, blocks, query, row, words, patches):
    """An image's logits of the words, of which `row` are those of the three paths."""
    likely = sorted(range(len(words)), key=lambda k: -row[k])[: math.ceil(0.6 * len(words))]
    y = [words[k] + method.types[0].detach() for k in likely]
    y += [linear(method.project, each) + method.types[1].detach() for each in patches]
    for block in blocks:
        query, _ = cross_block(block, query, y)
    return [value + method.paths.scale * dot(unit(query), word) for value, word in zip(row, words, strict=True)]


def logits_by_hand(method, images, t_c):
    z, scale = method.paths.adapt(images.cls), method.paths.scale
    z_s, z_o = method.paths.factors(z)
    _, t_s, t_o, (q_s, q_o) = (rows.detach() for rows in method.shared())
    s, o = products(z_s, t_s, scale), products(z_o, t_o, scale)
    for i in range(len(images)):
        patches = images.inputs["patch"][i]
        s[i] = reasoned(method, method.state, q_s, s[i], t_s, patches)
        o[i] = reasoned(method, method.object, q_o, o[i], t_o, patches)
    return products(z, t_c, scale), s, o


def test_losses_and_scores_by_loops():
    method, images = build(Clear, **SMALL), batch(3)
    paths = zip(logits_by_hand(method, images, method.shared()[0].detach()), targets(images), strict=True)
    semantic, state, object = (cross_entropy(*path) for path in paths)
    check_losses(method, images, semantic=semantic, state=state, object=object)
    candidates = [7, 11, 0]
    t_c = method.paths.prompts.encode(torch.tensor(candidates).numpy()).compositions
    for i, rows in enumerate(zip(*logits_by_hand(method, images, t_c), strict=True)):
        p, q, r = map(softmax, rows)
        expected = [value + q[k // N] + r[k % N] for value, k in zip(p, candidates, strict=True)]
        close(scores(method, candidates, images)[i], expected)


def test_a_query_starts_with_the_mean_word():
    method = build(Clear, **SMALL, shaken=False)
    prompts, tower = method.paths.prompts, method.context.tower
    for path, names, query in zip(("state", "object"), (LABELS.states, LABELS.objects), method.queries(), strict=True):
        tokens = [torch.tensor(tower.tokens(prompt_name(name))) for name in names]
        mean = torch.stack([tower.embedding(ids).mean(0) for ids in tokens]).mean(0)
        rows = torch.tensor([[0, *prompts.context_rows[path], len(prompts.lexicon()), 1]]).numpy()
        encoded = tower.encode(PromptTree.of(rows), torch.cat([prompts.lexicon(), mean[None]]))
        torch.testing.assert_close(query, unit(encoded[0].detach()))


def test_gradients_reach_every_parameter():
    method, images = build(Clear, **SMALL), batch(6)
    torch.stack(list(method.losses(images, method.shared()).values())).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in method.parameters())
