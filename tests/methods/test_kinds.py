"""What holds for every built-in kind: modes of training and evaluation, parameters, ranges of options."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from duplex import options
from duplex.methods.duplex import PaperReading
from duplex.methods.registry import find_method, make_method, parse_options
from duplex.options import OptionError
from tests.methods.field import batch, build, context, scores
from tests.methods.world import KINDS

TRAINED = [kind for kind in KINDS if kind not in ("lde", "linear", "product")]
NARROW = {"width": 6, "out": 5, "factor_width": 6, "context_width": 6, "heads": 2, "inner": 2}


def made(kind: str, rate: float) -> Any:
    types = find_method(kind).Options.describe_types()
    rates = {"dropout": rate, "adapter_dropout": rate}
    row: dict[str, Any] = {name: value for name, value in {**NARROW, **rates}.items() if name in types}
    return build(find_method(kind), **row)


def losses_of(method: Any, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.stack(list(method.losses(batch(6), method.shared()).values())).detach()


@pytest.mark.parametrize("kind", [kind for kind in TRAINED if kind not in ("plid", "flow")])
def test_without_dropout_both_modes_give_the_same_losses(kind):
    method = made(kind, 0.0)
    used, learned = losses_of(method, 0), losses_of(method.train(), 1)
    adapter = getattr(getattr(method, "paths", None), "adapter", None)
    if adapter is not None and adapter.rate > 0:  # a separate dropout rate of the adapter
        adapter.rate = 0.0
        used, learned = losses_of(method.eval(), 0), losses_of(method.train(), 1)
    torch.testing.assert_close(learned, used, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "kind", [kind for kind in TRAINED if "dropout" in " ".join(find_method(kind).Options.describe_types())]
)
def test_dropout_is_random_in_training_only(kind):
    method = made(kind, 0.6)
    assert torch.equal(losses_of(method, 0), losses_of(method, 1))
    first, second = (losses_of(method.train(), seed) for seed in (0, 1))
    assert not torch.allclose(first, second)
    assert torch.equal(scores(method, range(12), batch(3)), scores(method, range(12), batch(3)))


@pytest.mark.parametrize("kind", TRAINED)
def test_the_optimiser_gets_every_parameter_once(kind):
    method = made(kind, 0.0)
    grouped = [parameter for group in method.groups() for parameter in group["params"]]
    assert {id(one) for one in grouped} == {id(one) for one in method.parameters() if one.requires_grad}
    assert len(grouped) == len(set(map(id, grouped))) > 0
    assert method.summary()["parameters"] == sum(one.numel() for one in grouped)


ROWS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in KINDS if kind not in ("flow", "product")),
    ("kg_sp", {"pseudo_labels": True}),
    ("closed_form", {"inference": ["gaussian"], "interactions": 0.0, "losses": []}),
]


@pytest.mark.parametrize(("kind", "row"), ROWS)
def test_a_kind_trains_with_the_inputs_that_it_needs_alone(kind, row):
    options, whole, images = parse_options(kind, row), context(), batch(30)
    needs = find_method(kind).needs(options)
    inputs = {name: shape for name, shape in whole.inputs.items() if name in needs}
    text, words = (getattr(whole, name) if name in needs else None for name in ("text", "words"))
    there = replace(whole, inputs=inputs, text=text, words=words)
    method = make_method(kind, options, there).double()
    given = replace(images, inputs={name: images.inputs[name] for name in inputs})
    method.start(given)
    assert scores(method, range(7), given).shape == (30, 7)
    if method.groups():
        sum(method.train().losses(given, method.shared()).values()).backward()
    assert all(each.grad is not None for each in method.parameters() if each.requires_grad), "each has a gradient"


def test_few_kinds_train_their_word_vectors():
    named = {kind: " ".join(dict(made(kind, 0.0).named_parameters())) for kind in TRAINED}
    assert [kind for kind, names in named.items() if "words.states" in names] == ["canet", "compcos", "ivr"]


@pytest.mark.parametrize("kind", ["prompts", "duplex", "closed_form"])
def test_a_method_without_losses_trains_nothing(kind):
    method = build(find_method(kind), width=6, losses=())
    assert method.groups() == [] and method.summary()["parameters"] == 0
    rows = {"duplex": method.labels.size, "closed_form": len(method.labels.pairs["train"])}
    assert method.summary().get("codebook_rows") == rows.get(kind)


@pytest.mark.parametrize("codebook", ["buffer", "trained"])
def test_a_codebook_counts_once_in_the_sizes(codebook):
    by_refinement = build(find_method("duplex"), width=6).summary()
    method = build(find_method("duplex"), width=6, reading=PaperReading(codebook=codebook)).summary()
    assert by_refinement["codebook_values"] > 0
    assert (method["codebook_values"] == 0) == (codebook == "trained")
    both = method["parameters"] + method["codebook_values"]
    assert both == by_refinement["parameters"] + by_refinement["codebook_values"]


@pytest.mark.parametrize("kind", ["compcos", "co_cge"])
def test_a_margin_grows_up_to_its_value(kind):
    types = find_method(kind).Options.describe_types()
    row: dict[str, Any] = {name: value for name, value in NARROW.items() if name in types}

    def margins(epoch: int, train: bool = False) -> torch.Tensor:
        method = build(find_method(kind), "open", margin=0.4, margin_epochs=4, dropout=0.6, **row).train(train)
        method.after_epoch(epoch)
        assert all(part.training is train for part in method.modules())
        return method.margins

    assert build(find_method(kind), **row).margins is None, "training in the closed world has none"
    first, unseen = margins(1), ~torch.as_tensor(build(find_method(kind)).labels.seen)
    assert not first[~unseen].any() and first[unseen].any()
    torch.testing.assert_close(2 * first, margins(2))
    torch.testing.assert_close(4 * first, margins(4))
    assert torch.equal(margins(4), margins(5)) and torch.equal(margins(4), margins(20))
    assert torch.equal(margins(1, train=True), first), "compositions are compared without dropout"


@pytest.mark.parametrize(
    ("kind", "off", "gone"),
    [("caila", {"shift": False}, {"shift"}), ("cds", {"specificity": 0.0}, {"specificity"}),
     ("cge_visual", {"graph": False}, {"visual"}), ("dfsp", {"primitives": 0.0}, {"primitives"}),
     ("dfsp", {"plain": 0.0}, {"plain"}),
     ("logiczsl", {"rules_weight": 0.0}, {"composition_rules", "primitive_rules"})],
)  # fmt: skip
def test_a_loss_that_is_switched_off_is_absent(kind: str, off: dict[str, Any], gone: set[str]) -> None:
    images, with_it, without = batch(6), build(find_method(kind)), build(find_method(kind), **off)
    every, fewer = (set(method.losses(images, method.shared())) for method in (with_it, without))
    assert gone <= every and fewer == every - gone


SMALL = 1e-6
INTERVALS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {  # accepted, refused
    "Count": ((1, 2), (0, -1)),
    "Natural": ((0, 1), (-1,)),
    "Positive": ((SMALL, 1.5), (0.0, -SMALL)),
    "NonNegative": ((0.0, 1.5), (-SMALL,)),
    "Rate": ((0.0, 1 - SMALL), (1.0, -SMALL, 1 + SMALL)),
    "Share": ((0.0, 1.0), (-SMALL, 1 + SMALL)),
}
UNBOUNDED = {"start"}


@pytest.mark.parametrize("name", INTERVALS)
def test_a_type_of_options_accepts_the_ends_of_its_range_only(name):
    accepted, refused = INTERVALS[name]
    adapter = TypeAdapter(getattr(options, name))
    assert [adapter.validate_python(value) for value in accepted] == list(accepted)
    for value in refused:
        with pytest.raises(ValidationError):
            adapter.validate_python(value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_checked_and_templates_have_a_word(kind):
    types = find_method(kind).Options.describe_types()
    numbers = {name for name, form in types.items() if form.split(" | ")[0] in ("int", "float")}
    for name in numbers - UNBOUNDED:
        with pytest.raises(OptionError, match=rf"\b{name}\b"):
            parse_options(kind, {name: -1 if "int" in types[name] else -1.0})
    if "template" in types:
        assert parse_options(kind, {"template": "x"})
        with pytest.raises(OptionError, match=r"template.* empty"):
            parse_options(kind, {"template": " "})
