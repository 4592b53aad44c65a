"""Methods of careless authors: side effects change no result, wrong scores are refused; methods may remember images."""

from typing import Any

import numpy as np
import pytest
import torch

import duplex
from duplex.errors import DuplexError
from duplex.labels import WORLDS
from duplex.methods.base import Method, Scorer
from duplex.methods.registry import temporary_kind
from tests.test_testing import Probe
from tests.training.test_ten_lines import arrays


def fit(method: type[Method[Any]]) -> duplex.Run:
    given = arrays()
    more = {"state": "green", "object": "ring", "split": "val"}  # a second unseen pair, as thresholds need
    table = {name: [*column, more[name]] for name, column in given["table"].items()}
    data = duplex.Dataset.from_arrays(np.concatenate([given["features"], given["features"][-1:]]), table)
    with temporary_kind(method):
        run = duplex.fit(data, method, epochs=1, batch_size=8)
        for world in WORLDS:
            duplex.evaluate(run, data, world=world)
        return run


def score(change: Any) -> dict[str, Any]:
    def scorer(self: Probe, candidates: Any) -> Scorer:
        scores = Probe.scorer(self, candidates)
        return lambda inputs: change(scores(inputs), inputs["cls"])

    return {"scorer": scorer}


@pytest.mark.parametrize("wrong", [lambda scores: torch.zeros(len(scores), 9), lambda scores: scores.half()])
def test_scores_of_another_shape_or_type_are_refused(wrong: Any) -> None:
    with pytest.raises(DuplexError, match=r"Faulty returned scores of shape \[.*expected shape \[.* torch.float32"):
        fit(type("Faulty", (Probe,), score(lambda scores, _: wrong(scores))))


def test_scores_that_are_not_finite_are_refused() -> None:
    with pytest.raises(DuplexError, match=r"Faulty\.probabilities\(\) gives NaN or infinity for validation images"):
        fit(type("Faulty", (Probe,), score(lambda scores, _: scores + torch.inf)))
