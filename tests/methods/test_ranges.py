"""The range of every number of every built-in kind: its ends are taken or refused as its sentence says."""

from __future__ import annotations

from typing import Any

import pytest

from duplex.methods.registry import find, parse, sources
from duplex.options import OptionError

SMALL = 1e-6
INTERVALS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {  # what is taken, what is refused
    "any": ((-1.0, 0.0, 1.0), ()),
    "count": ((1, 2), (0, -1)),
    "count or 0": ((0, 1), (-1,)),
    "> 0": ((SMALL, 1.5), (0.0, -SMALL)),
    ">= 0": ((0.0, 1.5), (-SMALL,)),
    "(0, 1)": ((SMALL, 1 - SMALL), (0.0, 1.0, -SMALL, 1 + SMALL)),
    "[0, 1)": ((0.0, 1 - SMALL), (1.0, -SMALL, 1 + SMALL)),
    "[0, 1]": ((0.0, 1.0), (-SMALL, 1 + SMALL)),
}
PATHS = {"adapter_width": "count", "adapter_dropout": "[0, 1)", "adapter_scale": "any", "width": "count"}
GRAPH = {"layers": "count or 0", "width": "count", "out": "count", "image_layers": "count or 0", "image_width": "count",
         "dropout": "[0, 1)"}  # fmt: skip
HEAD = {"width": "count", "layers": "count or 0", "dropout": "[0, 1)"}
RANGES: dict[str, dict[str, str]] = {
    "ade": {"width": "count", "scale": "> 0", "regulariser": ">= 0", "product": ">= 0"},
    "caila": {"width": "count", "dropout": "[0, 1)", "scale": "> 0"},
    "canet": {**HEAD, "scale": "> 0", "share": "[0, 1]"},
    "cds": {"width": "count", "specificity": ">= 0", "context_width": "count"},
    "cge": GRAPH,
    "cge_visual": {**GRAPH, "momentum": "[0, 1]", "scale": "> 0", "factor_width": "count"},
    "closed_form": {**PATHS, "ridge": "> 0", "shrinkage": "> 0", "interactions": ">= 0"},
    "cluspro": {"width": "count", "clusters": "count", "momentum": "[0, 1]", "temperature": "> 0", "contrast": ">= 0",
                "decorrelation": ">= 0"},
    "co_cge": {**GRAPH, "scale": "> 0", "margin": ">= 0", "margin_epochs": "count"},
    "compcos": {**HEAD, "scale": "> 0", "margin": ">= 0", "margin_epochs": "count"},
    "dfsp": {"heads": "count", "primitives": ">= 0", "plain": ">= 0", "keep": "[0, 1]"},
    "duplex": {**PATHS, "fusion_rank": "count", "momentum": "[0, 1]"},
    "gipcol": {"layers": "count", "width": "count", "dropout": "[0, 1)"},
    "ivr": {**HEAD, "scale": "> 0", "discard": "[0, 1)", "again": ">= 0", "penalty": ">= 0"},
    "kg_sp": HEAD,
    "lde": {},
    "logiczsl": {"width": "count", "rules_weight": ">= 0"},
    "plid": {"mix": "(0, 1)", "primitives": ">= 0", "width": "count"},
    "prompts": PATHS,
    "scen": {**HEAD, "temperature": "> 0", "scale": "> 0", "contrast": ">= 0"},
    "troika": {"width": "count", "layers": "count", "heads": "count", "inner": "count", "start": "any"},
    "vp_cmjl": {"width": "count", "blend": "[0, 1]", "heads": "count"},
}  # fmt: skip


OURS = sorted(kind for kind, source in sources().items() if source.module.startswith("duplex."))


@pytest.mark.parametrize("kind", OURS)
def test_a_number_is_taken_up_to_the_ends_of_its_range_and_not_beyond(kind):
    for name, interval in RANGES[kind].items():
        taken, refused = INTERVALS[interval]
        for value in taken:
            assert getattr(parse(kind, {name: value}), name) == value
        for value in refused:
            with pytest.raises(OptionError, match=rf"\b{name}\b"):
                parse(kind, {name: value})


@pytest.mark.parametrize("kind", OURS)
def test_a_template_has_a_word(kind):
    if "template" in find(kind).Options.spoken_types():
        assert parse(kind, {"template": "x"})
        with pytest.raises(OptionError, match="template is empty"):
            parse(kind, {"template": " "})


@pytest.mark.parametrize("kind", OURS)
def test_every_number_has_a_range(kind):
    spoken = find(kind).Options.spoken_types()
    numbers = {name for name, said in spoken.items() if said.split(" | ")[0] in ("int", "float")}
    assert numbers == RANGES[kind].keys()
