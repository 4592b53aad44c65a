"""Ranges of numeric options: the ends are accepted, values beyond them refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from duplex import options
from duplex.methods.registry import find_method, installed_methods, parse_options
from duplex.options import OptionError

SMALL = 1e-6
INTERVALS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {  # accepted, refused
    "Count": ((1, 2), (0, -1)),
    "Natural": ((0, 1), (-1,)),
    "Positive": ((SMALL, 1.5), (0.0, -SMALL)),
    "NonNegative": ((0.0, 1.5), (-SMALL,)),
    "Rate": ((0.0, 1 - SMALL), (1.0, -SMALL, 1 + SMALL)),
    "Share": ((0.0, 1.0), (-SMALL, 1 + SMALL)),
    "between 0 and 1": ((SMALL, 1 - SMALL), (0.0, 1.0)),
}
PATHS = {"adapter_width": "Count", "adapter_dropout": "Rate", "width": "Count"}
RANGES = {
    "prompts": PATHS,
    "closed_form": {**PATHS, "ridge": "Positive", "shrinkage": "Positive", "interactions": "NonNegative"},
    "duplex": {**PATHS, "momentum": "Share"},
    "plid": {"mix": "between 0 and 1"},
}
UNBOUNDED = {"adapter_scale", "start"}
KINDS = sorted(kind for kind, source in installed_methods().items() if source.module.startswith("duplex."))


@pytest.mark.parametrize("name", [name for name in INTERVALS if name.isidentifier()])
def test_a_type_of_options_accepts_the_ends_of_its_range_only(name):
    accepted, refused = INTERVALS[name]
    adapter = TypeAdapter(getattr(options, name))
    assert [adapter.validate_python(value) for value in accepted] == list(accepted)
    for value in refused:
        with pytest.raises(ValidationError):
            adapter.validate_python(value)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, ranges in RANGES.items() for name in ranges])
def test_an_option_accepts_the_ends_of_its_range_only(kind, name):
    accepted, refused = INTERVALS[RANGES[kind][name]]
    for value in accepted:
        assert getattr(parse_options(kind, {name: value}), name) == value
    for value in refused:
        with pytest.raises(OptionError, match=rf"\b{name}\b"):
            parse_options(kind, {name: value})


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_checked_and_templates_have_a_word(kind):
    types = find_method(kind).Options.describe_types()
    numbers = {name for name, options in types.items() if options.split(" | ")[0] in ("int", "float")}
    for name in numbers - UNBOUNDED:
        with pytest.raises(OptionError, match=rf"\b{name}\b"):
            parse_options(kind, {name: -1 if "int" in types[name] else -1.0})
    if "template" in types:
        assert parse_options(kind, {"template": "x"})
        with pytest.raises(OptionError, match=r"template.* empty"):
            parse_options(kind, {"template": " "})
