from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from duplex import options
from duplex.methods.registry import find_method, parse_options
from duplex.options import OptionError
from tests.methods.world import KINDS

SMALL = 1e-6
INTERVALS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {  # accepted, refused
    "Count": ((1, 2), (0, -1)),
    "Natural": ((0, 1), (-1,)),
    "Positive": ((SMALL, 1.5), (0.0, -SMALL)),
    "NonNegative": ((0.0, 1.5), (-SMALL,)),
    "Rate": ((0.0, 1 - SMALL), (1.0, -SMALL, 1 + SMALL)),
    "Share": ((0.0, 1.0), (-SMALL, 1 + SMALL)),
}
UNBOUNDED = {"adapter_scale", "start"}


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
    numbers = {name for name, options in types.items() if options.split(" | ")[0] in ("int", "float")}
    for name in numbers - UNBOUNDED:
        with pytest.raises(OptionError, match=rf"\b{name}\b"):
            parse_options(kind, {name: -1 if "int" in types[name] else -1.0})
    if "template" in types:
        assert parse_options(kind, {"template": "x"})
        with pytest.raises(OptionError, match=r"template.* empty"):
            parse_options(kind, {"template": " "})
