"""Rows of the paper's tables: which share a training, and how large their checkpoints may become."""

from dataclasses import replace
from typing import Any

import pytest

from duplex.config.params import Params, load_params
from duplex.methods.duplex import DuplexOptions
from duplex.methods.registry import make_method, parse_options
from duplex.project.paper_rows import shared_training
from tests.methods.test_with_finetuning import finetuning_task
from tests.methods.world import features, small_method, step_of
from tests.projects import with_evaluation
from tests.subprocesses import ROOT

INFERENCE = ("infer_so", "infer_ct", "infer_ct_so", "infer_ch", "infer_ch_so", "infer_ch_ct")


@pytest.fixture(scope="module")
def params() -> Params:
    return load_params(ROOT / "ablations/params.yaml")


def test_rows_with_equal_training_and_fewer_terms_are_measured_in_one_run(params: Params):
    assert shared_training(params, "shapes", ["infer_so", *INFERENCE[1:], "duplex_five"]) == dict.fromkeys(
        INFERENCE, "duplex_five"
    )
    assert shared_training(params, "shapes", ["module_vp", "loss_ch_so"]) == {"loss_ch_so": "module_vp"}
    assert shared_training(params, "shapes", INFERENCE[1:3]) == {"infer_ct": "infer_ct_so"}
    on_zappos = shared_training(params, "ut-zappos", ["static", "read_no_graph", "duplex_five", "read_literal"])
    assert on_zappos == {"read_no_graph": "static"}, "read_literal is evaluated in both worlds, duplex_five in one"


def test_rows_that_differ_in_training_are_trained_apart(params: Params):
    """So are those beside a score with an untrained term, whose epoch this term would choose."""
    for names in (["loss_ch", "loss_ch_full"], ["duplex_five", "duplex_five_open"], ["duplex_five", "static", "cso"]):
        assert shared_training(params, "shapes", names) == {}
    assert shared_training(with_evaluation(params, terms=False), "shapes", ["duplex_five", "infer_so"]) == {}


CASES: list[dict[str, Any]] = [
    {},
    {"reading": "literal"},
    {"refine_over": "open"},
    {"graph": False},
    {"unseen_rows": "random", "seen_rows": "random"},
    {"reading": {"codebook": "trained"}},
]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_a_checkpoint_is_as_large_as_it_may_become_once_all_candidates_are_refined(changes: dict[str, Any]):
    method = small_method(DuplexOptions.from_dict({"adapter": "none", "width": 5, **changes}))
    largest = method.stored_values()
    seen = method.labels.pairs["train"].tolist()
    step_of(method, features(len(seen), 0), seen)  # a batch with all states and all objects
    method.after_batch()
    assert sum(value.numel() for value in method.state_dict().values()) == largest


def test_adapters_in_the_encoder_are_counted():
    context = finetuning_task(text="bottleneck")
    options = parse_options("duplex", {"refine_over": "open"})
    frozen = make_method("duplex", options, replace(context, finetuned_blocks=None))
    tuned = make_method("duplex", options, context)
    added = [value.numel() for name, value in tuned.state_dict().items() if not name.startswith("method.")]
    assert {name.partition(".")[0] for name in tuned.state_dict()} == {"method", "blocks", "text"}
    assert tuned.stored_values() == frozen.stored_values() + sum(added)
