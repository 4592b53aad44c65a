"""Wrong arguments of the building blocks are one line, not an error of torch or Python."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from duplex.encoders.base import load_encoder
from duplex.errors import UsageError
from duplex.features.tokens import Examples
from duplex.methods.base import MethodContext, PrimitiveVectors
from duplex.methods.kg_sp import KgSp, KgSpOptions
from duplex.methods.paths import Prompts, unit
from duplex.options import TrainingOptions
from duplex.training.loop import train
from duplex.training.scoring import validation_auc
from tests.methods.world import features, small_context, small_labels

LABELS: Any = small_labels()
SETTINGS = TrainingOptions(learning_rate=0.01, batch_size=8, epochs=1)


def images(width: int, composition: int | None = None, split: str = "train") -> Examples:
    compositions = torch.as_tensor(np.resize(LABELS.pairs[split], 20))
    if composition is not None:
        compositions[3] = composition
    return Examples(np.arange(20), {"cls": features(20, 0)[:, :width].float()}, compositions)


WIDTH = small_context().dim


def kg_sp() -> KgSp:
    return KgSp(small_context(), KgSpOptions())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: MethodContext(LABELS, {"cls": (5,)}, words=PrimitiveVectors(torch.ones(1, 4), torch.ones(2, 4))),
            r"words has vectors of \[1, 2\] states and objects; expected",
        ),
        (
            lambda: train(kg_sp(), images(WIDTH - 1), SETTINGS, 0, lambda _: 0.5),
            rf"the images' input 'cls' has the shape \[{WIDTH - 1}\] per image and KgSp was built for \[{WIDTH}\]",
        ),
        (
            lambda: validation_auc(kg_sp(), images(WIDTH - 1, split="val"), LABELS),
            rf"the images' input 'cls' has the shape \[{WIDTH - 1}\] per image",
        ),
        (
            lambda: train(kg_sp(), images(WIDTH, 99), SETTINGS, 0, lambda _: 0.5),
            "training image 3 has the composition 99; expected a number from 0 to",
        ),
        (
            lambda: train(kg_sp(), images(WIDTH, -1), SETTINGS, 0, lambda _: 0.5),
            "training image 3 has the composition -1",
        ),
    ],
)
def test_wrong_arguments_are_one_line(call, message):
    with pytest.raises(UsageError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def context() -> MethodContext:
    tower = load_encoder("tiny", towers="text").text
    words = [("red", "star"), ("blue", "heart"), ("blue", "star")]
    labels = type(LABELS).from_pairs({"train": words[:2], "val": words[2:], "test": words[2:]})
    return MethodContext(labels, {"cls": (128,)}, tower)


def test_prompts_of_compositions_states_and_objects_are_encoded_in_one_call(context):
    chosen = context.labels.candidates("closed", "val")
    found = context.encode_prompts(chosen)
    expected = Prompts(context.labels, context.text).encode(chosen)
    for own, direct in zip(found, expected, strict=True):
        torch.testing.assert_close(own, direct)
    assert [len(part) for part in found] == [len(chosen), 2, 2]


def test_features_of_several_templates_are_averaged(context):
    templates = ["a photo of", "an image of", "a picture of"]
    chosen = np.arange(context.labels.size)
    found = context.encode_prompts(chosen, templates)
    for place, part in enumerate(found):
        singly = [Prompts(context.labels, context.text, template=words).encode(chosen)[place] for words in templates]
        torch.testing.assert_close(part, unit(torch.stack(singly).mean(0)))
        torch.testing.assert_close(part.norm(dim=1), torch.ones(len(part)))
    assert not torch.allclose(found.compositions, context.encode_prompts(chosen, templates[0]).compositions)


def test_prompts_without_a_text_tower_are_one_line(context):
    with pytest.raises(UsageError, match='add "text" to the result of needs'):
        dataclasses.replace(context, text=None).encode_prompts(np.arange(2))
