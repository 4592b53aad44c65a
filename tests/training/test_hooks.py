"""Hooks of training: what each receives, and that the default is what no hook gives."""

import dataclasses
from typing import Any

import pytest
import torch

from duplex.errors import DuplexError
from duplex.training.logs import EpochReport, StepReport, TrainingHooks
from duplex.training.loop import make_optimiser, optimiser_step, train
from duplex.training.scoring import Validation, metric_name
from tests.methods.world import small_method
from tests.training.test_loop import DUPLEX, LABELS, SETTINGS, examples, images

VAL = examples("val", 24, 7)


def trained(select="auc", choose_by=None, settings=SETTINGS, **hooks):
    method = small_method(DUPLEX)
    name = select if choose_by is None else metric_name(choose_by)
    validate = Validation(VAL, LABELS, name, choose_by)
    return method, train(method, examples(), settings, 0, validate, hooks=TrainingHooks(**hooks))


def test_steps_and_epochs_are_reported_with_losses_rates_and_validation():
    steps, epochs = list[StepReport](), list[EpochReport]()
    method, outcome = trained(on_step=steps.append, on_epoch=epochs.append)
    assert [report.step for report in steps] == list(range(1, 4 * 7 + 1)), "50 images in batches of 8, 4 epochs"
    assert [report.epoch for report in steps] == [epoch for epoch in (1, 2, 3, 4) for _ in range(7)]
    assert [report.epoch for report in epochs] == [0, 1, 2, 3, 4] and all(report.method is method for report in steps)
    assert {report.rates for report in steps} == {(SETTINGS.learning_rate,)}
    for row, report in zip(outcome.history, epochs, strict=True):
        assert report.validation == {"auc": row["val_auc"]}
        assert {f"loss_{name}": value for name, value in report.losses.items()} == {
            name: value for name, value in row.items() if name.startswith("loss_")
        }
        own = [each for each in steps if each.epoch == report.epoch]
        for name, mean in report.losses.items():
            sizes = [*[8] * 6, 2]  # images per step
            total = sum(size * each.losses[name] for size, each in zip(sizes, own, strict=True))
            assert mean == pytest.approx(total / 50)
    assert max(report.epoch for report in epochs if report.is_best) == outcome.best_epoch


def test_a_metric_of_ones_own_chooses_the_epoch_and_is_in_the_history():
    def worst(metrics):
        assert set(metrics) == {"seen", "unseen", "hm", "auc"} and all(0 <= value <= 1 for value in metrics.values())
        return -metrics["auc"]

    method, outcome = trained(choose_by=worst)
    aucs = [row["val_auc"] for row in outcome.history]
    assert outcome.selected_by == "worst" and [row["val_worst"] for row in outcome.history] == [-auc for auc in aucs]
    assert outcome.best_auc == min(aucs) and outcome.best_epoch == aucs.index(min(aucs))
    assert Validation(VAL, LABELS)(method).metrics == {"auc": min(aucs)}, "the tensors of that epoch are loaded"


@pytest.mark.parametrize("value", [float("nan"), None, "high", torch.ones(())])
def test_a_metric_that_is_no_finite_number_is_refused(value):
    with pytest.raises(DuplexError, match=r"select: selection returned .*expected a finite number"):
        trained(choose_by=lambda metrics: value)


def test_gradients_are_scaled_to_the_largest_norm():
    norms, clip = [], 0.01

    class Noting(torch.optim.SGD):
        def step(self, closure=None):
            grads = [p.grad.flatten() for group in self.param_groups for p in group["params"] if p.grad is not None]
            norms.append(float(torch.cat(grads).norm()))

    for limit in (None, clip):
        method = small_method(DUPLEX).train()
        settings = dataclasses.replace(SETTINGS, clip=limit)
        optimiser_step(method, images(), torch.arange(8), settings, Noting(method.groups(), lr=0.1))
    assert norms[0] > 2 * clip and norms[1] == pytest.approx(clip, rel=1e-3)


def test_an_optimiser_of_ones_own_has_the_learning_rate_of_the_options():
    method = small_method(DUPLEX)
    groups: list[dict[str, Any]] = [{"params": [parameter]} for parameter in method.parameters()]
    groups[0]["lr"] = 0.5
    method.groups = lambda: groups  # type: ignore[method-assign]
    made = make_optimiser(method, SETTINGS, TrainingHooks(optimiser=torch.optim.NAdam))
    assert type(made) is torch.optim.NAdam
    assert [group["lr"] for group in made.param_groups] == [0.5, *[SETTINGS.learning_rate] * (len(groups) - 1)]


def test_a_schedule_of_ones_own_multiplies_the_rates():
    rates = []
    trained(schedule=lambda epoch: 1 / (epoch + 1), on_step=lambda report: rates.append((report.epoch, report.rates)))
    by_epoch = {epoch: rate for epoch, (rate,) in rates}
    assert by_epoch == pytest.approx({epoch: SETTINGS.learning_rate / epoch for epoch in (1, 2, 3, 4)})


class Ledger:
    def __init__(self):
        self.calls = []

    def step(self, report):
        self.calls.append(("step", report.step))

    def epoch(self, report):
        self.calls.append(("epoch", report.epoch))

    def close(self):
        self.calls.append(("close", 0))


def test_a_log_is_closed_even_if_training_fails():
    whole, broken = Ledger(), Ledger()
    trained(log=whole)
    assert whole.calls[0] == ("epoch", 0) and whole.calls[-2:] == [("epoch", 4), ("close", 0)]
    assert len(whole.calls) == 5 + 4 * 7 + 1
    with pytest.raises(DuplexError, match="select"):
        trained(choose_by=lambda metrics: None, log=broken)
    assert broken.calls == [("close", 0)]
