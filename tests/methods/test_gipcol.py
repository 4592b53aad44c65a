import numpy as np
import pytest
import torch

from duplex.encoders.prompt_tree import PromptTree
from duplex.methods.gipcol import Gipcol
from duplex.methods.layers import unit as unit_rows
from duplex.methods.prompt_method import PromptMethod
from tests.methods.field import LABELS, SEEN, SOFT, M, N, batch, build, check_losses, scores, targets
from tests.methods.loops import close, convolved, cross_entropy, products, softmax, unit


def lexicon_by_hand(method):
    """The primitives' vectors after two convolutions over one dense matrix."""
    prompts, target = method.prompts, LABELS.candidates("closed", "train").tolist()
    context, names = prompts.learned_rows[: -(M + N)].detach(), prompts.learned_rows[-(M + N) :].detach()
    states, objects, _ = convolved(prompts.network.weights, names[:M], names[M:], target)
    return torch.cat([prompts.frozen_rows, context, names + torch.cat([states, objects])])


@pytest.mark.parametrize("context", ["learned", "fixed"])
def test_losses_and_scores_by_loops(context):
    method, images = build(Gipcol, width=6, context=context), batch(3)
    lexicon, tower = lexicon_by_hand(method), method.context.tower
    close(method.prompts.lexicon(), lexicon)

    def logits(columns):
        tree = PromptTree.of(method.prompts.all_sequences(np.asarray(columns))[0][1])
        return products(map(unit, images.cls), map(unit, tower.encode(tree, lexicon)), method.scale)

    check_losses(method, images, semantic=cross_entropy(logits(SEEN), targets(images)[0]))
    candidates = [2, 6, 0]
    close(scores(method, candidates, images), [softmax(row) for row in logits(candidates)])


CSP = {**SOFT, "context": "fixed"}


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_before_training_its_prompts_are_those_of_csp(layers):
    """Only the graph's last layer starts at zero."""
    row = {"context": "fixed", "layers": layers, "width": 6}
    method, csp = build(Gipcol, shaken=False, **row), build(PromptMethod, shaken=False, **CSP)
    assert [bool(layer.weight.any()) for layer in method.prompts.network.weights] == [True] * (layers - 1) + [False]
    close(method.shared().compositions, csp.shared().compositions)
    assert unit_rows(method.shared().compositions).requires_grad
