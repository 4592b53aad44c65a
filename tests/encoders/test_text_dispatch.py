"""What a step of the text pass asks of a device, in the sizes of two benchmarks: counts, on a pretended one."""

from __future__ import annotations

import pytest
import torch

from benchmarks.text import SIZES, Names, made_up, random_tower
from duplex.encoders.prompt_tree import PromptTree
from tests.pretended import Pretended

ONE_BY_ONE = {"mit-states": 2412, "cgqa": 4540}  # operations where attention goes ancestor by ancestor
A_LAYER = 39  # 17 of them attention's, forward and backward


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_a_step_takes_few_operations_and_no_synchronisation(pretended: Pretended, name: str) -> None:
    states, objects, count, _ = SIZES[name]
    pairs = made_up(states, objects, count)
    tower = random_tower("ViT-L-14-quickgelu", width=64, device=pretended.name)
    names = Names.of(pairs, "learned", 3, tower)
    tree = PromptTree.of(names.pairs(pairs, 3) + names.alone(3))
    lexicon = (torch.randn(names.size, tower.width) * 0.02).to(pretended.name).requires_grad_()
    tower.encode(tree, lexicon)  # index tensors are made once
    layers = len(tower.parts.blocks)
    for checkpoint in (False, True):
        lexicon.grad = None
        pretended.reset()
        tower.encode(tree, lexicon, checkpoint=checkpoint).square().sum().backward()
        assert pretended.synchronisations == {}
        assert pretended.operations.total() <= ONE_BY_ONE[name] / 3
        assert pretended.operations.total() <= layers * A_LAYER * (1.5 if checkpoint else 1) + 20
        assert lexicon.grad is not None
        assert lexicon.grad.device == lexicon.device
