import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex.methods.closed_form import ClosedFormMethod
from duplex.methods.compcos import CompCos
from duplex.methods.product import ProductMethod
from duplex.methods.prompt_method import PromptMethod
from duplex.options import CombinedRunsOptions, OptionError
from tests.methods.field import LABELS, batch, build, context

KINDS = {"prompts": PromptMethod, "compcos": CompCos, "closed_form": ClosedFormMethod}


def member(method: str, kind: str, temperature: float = 1.0) -> dict[str, Any]:
    """The reference to a run, with the kind for the naive twin."""
    needs = sorted(KINDS[kind].needs(KINDS[kind].Options()))
    return {"method": method, "kind": kind, "needs": needs, "finetuned": False, "temperature": temperature}


def product_of(*members: tuple[str, str, float], seeds: str = "own") -> ProductMethod:
    """Return the product of random methods, one per (method, kind, temperature)."""
    records = [member(*each) for each in members]
    built = tuple(build(KINDS[kind], seed=place) for place, (_, kind, _) in enumerate(members))
    names = tuple(dict.fromkeys(name for name, *_ in members))
    options = CombinedRunsOptions.from_dict({"of": names, "members": records, "seeds": seeds})
    return ProductMethod(replace(context(), members=built), options).eval()


def naive_scores(product: ProductMethod, columns: Any, inputs: Any) -> list[list[float]]:
    """Scores by loops: probabilities of each member by its own rule, logarithms and temperatures."""
    tables = [method.scorer(columns)(inputs).double().tolist() for method in product._members]
    found = []
    for image in range(len(tables[0])):
        row = [0.0] * len(columns)
        for record, table in zip(product.options.members, tables, strict=True):
            scores = table[image]
            if record["kind"] == "prompts":  # a sum of probabilities
                masses = [max(score, 0.0) for score in scores]
            else:
                masses = [math.exp(score - max(scores)) for score in scores]
            for column, mass in enumerate(masses):
                p = max(mass / sum(masses), 1e-30)
                row[column] += math.log(p) / record["temperature"]
        found.append(row)
    return found


@settings(max_examples=12, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=3),
    temperatures=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=3, max_size=3),
    world=st.sampled_from(["closed", "open"]),
)
def test_scores_are_those_of_loops(kinds, temperatures, world) -> None:
    members = [(f"m{place}", kind, temperatures[place]) for place, kind in enumerate(kinds)]
    product, images = product_of(*members), batch(5)
    columns = LABELS.candidates(world, "test")
    found = product.scorer(columns)(images.inputs)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), naive_scores(product, columns, images.inputs), rtol=2e-6, atol=2e-5)


def test_runs_of_one_method_are_one_score_term() -> None:
    product = product_of(("a", "compcos", 1.0), ("a", "prompts", 2.0), ("b", "compcos", 1.0), seeds="all")
    columns, images = LABELS.candidates("closed", "test"), batch(4)
    terms = dict(product.score_terms(columns)(images.inputs))
    assert list(terms) == ["a", "b"]
    alone = product_of(("a", "compcos", 1.0), ("c", "prompts", 2.0))
    torch.testing.assert_close(product.scorer(columns)(images.inputs), terms["a"] + terms["b"])
    torch.testing.assert_close(terms["a"], alone.scorer(columns)(images.inputs))


def test_members_are_neither_trained_nor_stored_and_move_with_their_product() -> None:
    product = product_of(("a", "compcos", 1.0), ("b", "prompts", 1.0))
    assert product.groups() == [] and set(product.state_dict()) == {"temperatures"}
    assert not any(parameter.requires_grad for each in product._members for parameter in each.parameters())
    product.to("meta")
    assert {tensor.device.type for each in product._members for tensor in each.state_dict().values()} == {"meta"}


@pytest.mark.parametrize(
    ("record", "message"),
    [({}, "of: missing"), ({"of": ["a"]}, "expected a list of 2 or more methods"),
     ({"of": [], "seeds": "all"}, "expected a list of 1 or more methods"), ({"of": ["a", "a"]}, "has a method twice"),
     ({"of": ["a", "b"], "weights": "tuned"}, "weights: unknown key")],
)  # fmt: skip
def test_wrong_options_are_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CombinedRunsOptions.from_dict(record)


def test_needs_are_those_of_all_members() -> None:
    members = (member("a", "prompts"), member("b", "compcos"))
    assert ProductMethod.needs(CombinedRunsOptions(of=("a", "b"), members=members)) == {"cls", "text", "words"}
