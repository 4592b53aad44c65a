"""Rows of the study are variations of `duplex` that can be built, each another one than `duplex` itself."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.validation import main
from benchmarks.variations import READINGS, STUDY, Scheduled
from duplex.errors import UsageError
from duplex.methods.duplex import DuplexOptions
from tests.methods.world import features, small_labels, small_setting, step_of
from tests.subprocesses import ROOT

SEEN = small_labels().pairs["train"].tolist()


@pytest.mark.parametrize("name", READINGS)
def test_a_reading_takes_a_step_and_is_another_form(name: str) -> None:
    options = dataclasses.replace(DuplexOptions(width=5), **READINGS[name])
    assert options != DuplexOptions(width=5)
    method = Scheduled(small_setting(), options).double()
    losses = step_of(method, features(len(SEEN), 5), SEEN, method.shared()).losses
    assert set(losses) == {"s", "o", "ct", "ch"} and all(float(loss.detach()) > 0 for loss in losses.values())


def test_every_row_of_the_study_has_options_that_go_together() -> None:
    kinds = {
        (repr(dataclasses.replace(DuplexOptions(), **row.options)), row.kind, row.schedule) for row in STUDY.values()
    }
    assert len(kinds) == len(STUDY)  # no row is asked twice


def test_an_unknown_row_of_the_study_is_one_sentence(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["validation", "--study", "--only", "no relu;no such row"])
    with pytest.raises(UsageError, match="unknown row of the study 'no such row'; known: duplex, static"):
        main()
