"""Prompts that a method encodes by its context; compositions beyond the label space."""

import numpy as np
import pytest
import torch

from duplex.encoders.base import load_encoder
from duplex.labels import LabelSpace
from duplex.methods.base import MethodContext
from duplex.methods.layers import unit
from duplex.methods.prompts import Prompts
from duplex.options import TrainingOptions

SETTINGS = TrainingOptions(learning_rate=0.01, batch_size=8, epochs=1)


@pytest.fixture(scope="module")
def context() -> MethodContext:
    tower = load_encoder("tiny", towers="text").text
    words = [("red", "star"), ("blue", "heart"), ("blue", "star")]
    labels = LabelSpace.from_pairs({"train": words[:2], "val": words[2:], "test": words[2:]})
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
