"""States and objects without training images: which methods score them, and that added words have the same scores."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from duplex.errors import UsageError
from duplex.features.tokens import Examples
from duplex.labels import LabelSpace
from duplex.methods import portable
from duplex.methods.base import PrimitiveVectors
from duplex.methods.closed_form import ClosedFormMethod, ClosedFormOptions
from duplex.methods.paths import Paths
from duplex.methods.prompt_method import PromptOptions
from duplex.methods.registry import find_method
from duplex.options import TrainingOptions
from duplex.recognition.added import are_words_trained, with_rows
from duplex.training.logs import TrainingHooks
from duplex.training.loop import make_optimiser
from duplex.training.run import initialised_method
from tests.methods.world import OBJECTS, STATES, batch_of, features, small_context, small_tower

TRAIN = [("red", "circle"), ("red", "heart"), ("striped", "circle"), ("striped", "heart"), ("striped", "star")]
HEADS: dict[str, Any] = {"inference": ("linear", "gaussian"), "losses": ("state", "object")}
NEW = [("hollow", "circle"), ("hollow", "star")]
FIXED: dict[str, Any] = {"context": "fixed", "vocabulary": "fixed", "paths": "composition", "adapter": "none"}
TABLES = {"vp_cmjl": ("states", "objects")}


def labels_with(new: list[tuple[str, str]]) -> LabelSpace:
    return LabelSpace.from_pairs({"train": TRAIN, "val": [("red", "star")], "test": new})


@pytest.mark.parametrize(
    ("kind", "options", "able"),
    [("prompts", {}, True), ("duplex", {}, True), ("compcos", {}, True), ("lde", {}, True),
     ("closed_form", {}, True),
     ("closed_form", {"inference": ("gaussian",), "losses": ()}, False),
     ("closed_form", {"inference": ("gaussian",), "losses": (), "interactions": None}, True),
     ("closed_form", {**HEADS, "interactions": None}, False), ("linear", {}, False),
     ("kg_sp", {"pseudo_labels": True}, False), ("ivr", {}, False)],
)  # fmt: skip
def test_kinds_say_whether_they_score_new_words(kind: str, options: dict[str, Any], able: bool) -> None:
    method = find_method(kind)
    assert method.scores_new_words(method.Options(**options)) is able


@pytest.mark.parametrize(("kind", "chosen"), [("linear", {"l2": 1.0}), ("kg_sp", {})])
def test_kinds_that_cannot_are_refused_unless_images_show_the_word_alone(kind: str, chosen: dict[str, Any]) -> None:
    labels, options = labels_with(NEW), find_method(kind).Options(**chosen)

    def initialise(*alone: int) -> Any:
        compositions = torch.tensor([*labels.pairs["train"], *alone])
        train = Examples(np.arange(len(compositions)), {"cls": features(len(compositions), 1)}, compositions)
        inputs: Any = SimpleNamespace(examples={"train": train})
        return initialised_method(kind, options, small_context(labels), inputs, 0, torch.device("cpu"))

    with pytest.raises(UsageError, match=f"{kind} .* no training images of 'hollow'; choose a method") as refused:
        initialise()
    assert "\n" not in str(refused.value)
    assert initialise(-1 - labels.states.index("hollow")).labels is labels


@pytest.mark.parametrize("own", [None, partial(torch.optim.NAdam, weight_decay=0.5)], ids=["adam", "own"])
@pytest.mark.parametrize("kind", ["prompts", "gipcol", "compcos", "vp_cmjl"])
def test_vectors_of_new_words_do_not_decay(kind: str, own: Any) -> None:
    labels, method_class, vectors = labels_with(NEW), find_method(kind), torch.eye(3)
    context = small_context(labels, torch.float32, words=PrimitiveVectors(vectors, vectors))
    method = method_class(context, method_class.Options())
    names = TABLES.get(kind, ("learned_rows", "words.states", "words.objects"))
    tables = list[torch.Tensor](table for name, table in method.named_parameters() if name.endswith(names))
    before, known = torch.cat(tables).detach().clone(), np.concatenate(labels.trained_words)
    settings = TrainingOptions(learning_rate=0.1, batch_size=8, epochs=1, weight_decay=0.5)
    optimiser = make_optimiser(method, settings, TrainingHooks(optimiser=own))
    for parameter in method.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    changed = (torch.cat(tables) != before).any(1)
    assert changed[-len(known) :].tolist() == known.tolist()


def test_a_product_scores_new_words_if_each_member_does() -> None:
    product = find_method("product")
    members = [{"needs": ["cls", "text"]}, {"needs": ["cls"]}]
    for listed, able in ((members[:1], True), (members, False)):
        assert product.scores_new_words(product.Options(of=("a", "b"), members=tuple(listed))) is able


def test_losses_equal_those_without_new_words() -> None:
    """A word without training images is a negative in no loss of states and objects, but has a posterior in scores."""
    z, own = features(20, 1), np.resize(np.arange(len(TRAIN)), 20)
    found, tower = [], small_tower()
    for labels in (labels_with(NEW), labels_with([])):
        torch.manual_seed(0)
        paths = Paths(labels, tower, PromptOptions(width=5), "closed").double()
        compositions = labels.index([TRAIN[i][0] for i in own], [TRAIN[i][1] for i in own])
        t = paths.prototypes(("state", "object"), False)
        losses, _ = paths.losses(z, torch.as_tensor(compositions), t, ("state", "object"))
        found.append(losses)
        states = torch.arange(len(labels.states))
        ((_, posteriors),) = paths.score_terms(z, t, states, torch.zeros_like(states), ("factors",))
        assert (posteriors > 0).all()
    for name in ("state", "object"):
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-10, atol=1e-10)


def test_a_new_word_and_an_added_one_have_the_same_scores() -> None:
    names: Any = ("semantic", "gaussian_factors", "gaussian")
    options = ClosedFormOptions(**FIXED, losses=(), inference=names, weights=(0.3, 0.2, 0.5))
    images = features(40, 1).float()

    def fitted(labels: LabelSpace) -> ClosedFormMethod:
        method = ClosedFormMethod(small_context(labels, torch.float32), options)
        own = [TRAIN[i] for i in np.resize(np.arange(len(TRAIN)), 40)]
        method.start(batch_of(images, labels.index([s for s, _ in own], [o for _, o in own])))
        return method.eval()

    full, part = labels_with(NEW), labels_with([])
    listed = sorted([*TRAIN, ("red", "star")])
    both = [*listed, *NEW]
    order = np.argsort(full.index([s for s, _ in both], [o for _, o in both]))
    compositions = full.index([both[i][0] for i in order], [both[i][1] for i in order])
    expected = fitted(full).scorer(compositions)({"cls": images[:7]})

    tensors = fitted(part).portable(part.index([s for s, _ in listed], [o for _, o in listed]))
    assert (part.states, part.objects) == (("red", "striped"), tuple(OBJECTS)) and STATES[2] == "hollow"
    rows = np.array([(2, part.objects.index(thing)) for _, thing in NEW])
    tower = small_tower(dtype=torch.float32)
    more = with_rows(tensors, part, ([*part.states, "hollow"], list(part.objects)), rows, tower)
    scores = sum(term for _, term in portable.score_terms(more, images[:7]))
    torch.testing.assert_close(scores[:, order], expected, rtol=1e-4, atol=1e-4)
    assert not are_words_trained(("hollow", "star"), full).state and are_words_trained(("red", "star"), full).state
