"""The training loop: repeatable, resumable bit for bit, stopped at divergence."""

import dataclasses
import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from duplex.errors import DuplexError, UsageError
from duplex.evaluation.accumulate import ScoreAccumulator
from duplex.evaluation.curve import AucComponents, Margins
from duplex.features.tokens import Examples
from duplex.methods.base import Batch, Method
from duplex.methods.duplex import DuplexOptions as Options
from duplex.methods.prompt_method import PromptOptions
from duplex.options import Options as MethodOptions
from duplex.options import TrainingOptions
from duplex.training.logs import TrainingHooks
from duplex.training.loop import ResumePoint, TrainingState, make_optimiser, optimiser_step, rate_share, train
from duplex.training.scoring import Validated, Validation
from tests.clock import Clock
from tests.methods.world import features, small_context, small_labels, small_method, step_of

SETTINGS = TrainingOptions(learning_rate=0.01, batch_size=8, epochs=4, threads=1)
DUPLEX = Options(width=5)
LABELS = small_labels()


def examples(split: str = "train", count: int = 50, seed: int = 0) -> Examples:
    compositions = torch.as_tensor(np.resize(LABELS.pairs[split], count))
    centres = features(LABELS.size, 99)  # one cluster per composition
    return Examples(np.arange(count), {"cls": centres[compositions] + 0.5 * features(count, seed)}, compositions)


def images() -> Batch:
    found = examples()
    return Batch(found.inputs, found.compositions)


def run(options: Options | PromptOptions = DUPLEX, settings: TrainingOptions = SETTINGS, **more):
    network, val = small_method(options), examples("val", 24, 7)
    outcome = train(network, examples(), settings, 0, lambda n: Validation(val, LABELS)(n).metrics["auc"], **more)
    return network, outcome


def same(a, b) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory cannot be reset on this system")
def test_peak_memory_excludes_earlier_runs():
    with allocated(2**29):
        pass
    before = run()[1].timing["peak_bytes"]
    with allocated(2**29):
        assert run()[1].timing["peak_bytes"] > before + 2**28
    assert run()[1].timing["peak_bytes"] < before + 2**28


@contextmanager
def allocated(size: int) -> Iterator[None]:
    """Allocate memory from the system, bypassing the allocator, which may keep freed memory."""
    with mmap.mmap(-1, size) as memory:
        for start in range(0, size, 2**20):
            memory[start : start + 2**20] = b"1" * 2**20
        yield


def test_the_best_epoch_by_validation_auc_is_kept():
    network, outcome = run()
    aucs = [row["val_auc"] for row in outcome.history]
    assert outcome.best_auc == max(aucs)
    assert outcome.best_epoch == aucs.index(max(aucs))
    assert Validation(examples("val", 24, 7), LABELS)(network).metrics["auc"] == outcome.best_auc


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_killed_run_continues_bit_identically(tmp_path, monkeypatch, after):
    settings = dataclasses.replace(SETTINGS, decay_every=1)
    whole, reference = run(settings=settings)
    assert same(whole, run(settings=settings)[0])
    partial, save = tmp_path / "training.partial", TrainingState.save

    def save_then_die(state, path):
        save(state, path)
        if state.epoch == after:
            raise KeyboardInterrupt

    monkeypatch.setattr(TrainingState, "save", save_then_die)
    with pytest.raises(KeyboardInterrupt):
        run(settings=settings, resume=ResumePoint(path=partial, key="k"))
    monkeypatch.setattr(TrainingState, "save", save)
    resumed, outcome = run(settings=settings, resume=ResumePoint(path=partial, key="k"))
    assert same(whole, resumed)
    assert (outcome.best_epoch, outcome.history) == (reference.best_epoch, reference.history)


WHOLE = dataclasses.replace(SETTINGS, epochs=3, schedule="cosine_steps", select="last", validate_every=3)


def rates_of(**more):
    """Train, and return the learning rate of every step as a share of the first, with the outcome."""
    rates = []
    hooks = TrainingHooks(on_step=lambda report: rates.append(report.rates[0] / WHOLE.learning_rate))
    network, outcome = run(settings=WHOLE, hooks=hooks, **more)
    return rates, network, outcome


def cosine(share: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def test_a_cosine_by_steps_falls_with_every_step_to_zero():
    rates, _, outcome = rates_of()
    assert rates == pytest.approx([cosine(step / len(rates)) for step in range(len(rates))])
    assert outcome.best_epoch == WHOLE.epochs
    assert [epoch for epoch, row in enumerate(outcome.history) if "val_auc" in row] == [WHOLE.epochs]


@pytest.mark.parametrize("slow", [0.1, 1.0, 7.0, 1000.0])
def test_limited_time_ends_training_within_a_step_and_its_cosine_with_it(slow):
    every = len(rates_of()[0])
    limit = 10.0
    rates, _, outcome = rates_of(resume=ResumePoint(seconds=limit, clock=Clock(slow)))
    step = max(1 / every, slow / limit)  # share of the training; the clock is also read around each epoch
    assert 1 <= len(rates) <= every
    assert (len(rates) - 1) * step < 1
    assert rates[-1] <= cosine((len(rates) - 1) * step) + 1e-6
    assert len(rates) == every or rates[-1] <= cosine(max(0.0, 1 - 4 * step))
    last = outcome.history[-1]
    assert outcome.best_epoch == last["epoch"] and "val_auc" in last


def test_training_without_a_limit_is_the_same_on_a_busy_machine():
    (_, idle, _), (_, busy, _) = (rates_of(resume=ResumePoint(clock=Clock(step))) for step in (1e-3, 1e3))
    assert same(idle, busy)


@pytest.mark.parametrize("after", [1, 2])
def test_limited_training_that_was_killed_continues_where_its_cosine_was(tmp_path, monkeypatch, after):
    rates, whole, _ = rates_of()
    partial, save = tmp_path / "training.partial", TrainingState.save
    limit = 4.0 * len(rates)  # time for all steps

    def save_then_die(state, path):
        save(state, path)
        if state.epoch == after:
            raise KeyboardInterrupt

    def limited() -> ResumePoint:
        return ResumePoint(path=partial, key="k", seconds=limit, clock=Clock(1.0))

    monkeypatch.setattr(TrainingState, "save", save_then_die)
    with pytest.raises(KeyboardInterrupt):
        rates_of(resume=limited())
    monkeypatch.setattr(TrainingState, "save", save)
    rest, resumed, _ = rates_of(resume=limited())
    assert rest == pytest.approx(rates[-len(rest) :]) and len(rest) == len(rates) * (3 - after) // 3
    assert same(resumed, whole)


def test_the_state_of_another_run_is_ignored(tmp_path, capsys):
    partial = tmp_path / "training.partial"
    run(resume=ResumePoint(path=partial, key="lambda 0.9"))
    other, _ = run(Options(width=5, momentum=0.5), resume=ResumePoint(path=partial, key="lambda 0.5"))
    assert same(other, run(Options(width=5, momentum=0.5))[0])
    assert "was saved; training starts over" in capsys.readouterr().err


class CountingTower:
    def __init__(self, tower):
        self.tower, self.calls = tower, 0

    def encode(self, *args, **options):
        self.calls += 1
        return self.tower.encode(*args, **options)


def test_accumulated_batches_take_one_step_and_one_text_encoding():
    """Without graph and dropout the losses are means over images: four batches of 2 equal one batch of 8."""
    options = Options(width=5, graph=False, adapter_dropout=0.0)
    rows, results = torch.arange(8), []
    for settings in (SETTINGS, dataclasses.replace(SETTINGS, batch_size=2, accumulate=4)):
        network = small_method(options)
        tower = CountingTower(network.paths.prompts.tower)
        network.paths.prompts.__dict__["tower"] = tower
        terms = optimiser_step(network, images(), rows, settings, torch.optim.SGD(network.groups(), lr=0.1))
        results.append((network.state_dict(), terms))
        assert tower.calls == 1
    for name, value in results[0][0].items():
        torch.testing.assert_close(results[1][0][name], value, rtol=1e-9, atol=1e-11)
    first, second = ({name: float(value) for name, value in terms.items()} for _, terms in results)
    assert first == pytest.approx(second)


def test_a_step_updates_prompts_by_the_summed_gradients():
    """The prompts' gradient equals that of one backward pass through everything at once."""
    options, chosen = Options(width=5, adapter_dropout=0.0), torch.arange(8)
    network = small_method(options)
    optimiser_step(network, images(), chosen, SETTINGS, torch.optim.SGD(network.groups(), lr=0.0))
    gradient = network.paths.prompts.learned_rows.grad.clone()
    plain = small_method(options)
    step_of(plain, examples().cls[chosen], examples().compositions[chosen]).total.backward()
    torch.testing.assert_close(gradient, plain.paths.prompts.learned_rows.grad, rtol=1e-10, atol=1e-12)


def test_divergence_is_reported_with_step_term_and_advice():
    broken = examples()
    broken.cls[3] = float("nan")
    with pytest.raises(DuplexError, match=r"loss '\w+' became nan in epoch 1, step \d+; lower training.learning_rate"):
        train(small_method(DUPLEX), broken, SETTINGS, 0, lambda _: 0.5)


FIXED = {"context": "fixed", "vocabulary": "fixed", "paths": "composition", "adapter": "none"}


@pytest.mark.parametrize("more", [{**FIXED, "inference": ("semantic",)}, {"width": 5}])
def test_a_method_without_losses_stays_at_epoch_zero(more):
    options = PromptOptions(losses=(), **more)
    network, outcome = run(options)
    assert outcome.best_epoch == 0
    assert len(outcome.history) == 1 and outcome.timing["seconds_per_epoch"] == 0
    assert same(network, small_method(options))


def test_no_training_image_is_an_error():
    with pytest.raises(DuplexError, match="no training image is readable"):
        train(small_method(DUPLEX), examples(count=0), SETTINGS, 0, lambda _: 0.5)


class Recorder(Method[MethodOptions]):
    def __init__(self, setting, options=MethodOptions()):
        super().__init__(setting, options)
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen, self.modes, self.calls, self.draws = [], [], [], []

    def losses(self, batch, shared):
        self.seen.append(batch.compositions.tolist())
        self.modes.append(self.training)
        self.draws.append(float(torch.rand(())))
        self.calls.append("losses")
        return {"a": self.weight * 0 + len(batch), "b": self.weight}

    def after_batch(self):
        self.calls.append("batch")

    def after_step(self):
        self.calls.append("step")

    def after_epoch(self, epoch):
        self.calls.append(f"epoch {epoch}")


def recorded(settings: TrainingOptions, seed: int = 0, validate=lambda _: 0.5):
    method = Recorder(small_context())
    rows = torch.arange(LABELS.size)[:10]  # as compositions, so that the order shows
    outcome = train(method, Examples(np.arange(10), {"cls": features(10, 0)}, rows), settings, seed, validate)
    return method, outcome


FOUR = TrainingOptions(learning_rate=0.125, batch_size=4, epochs=4, decay_every=2)


def test_the_seed_determines_the_order_of_images_in_each_epoch_and_random_draws():
    methods = [recorded(FOUR, seed)[0] for seed in (0, 0, 1)]
    first, again, other = (method.seen for method in methods)
    assert methods[0].draws == methods[1].draws != methods[2].draws
    epochs = [[row for step in first[start : start + 3] for row in step] for start in range(0, 12, 3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert list(range(10)) not in epochs and len({tuple(epoch) for epoch in epochs}) == 4
    assert first == again
    assert first != other


def test_the_method_is_in_training_mode_for_batches_only():
    modes = []

    def validate(method):
        modes.append(method.training)
        method.eval()
        return 0.5

    method, _ = recorded(FOUR, validate=validate)
    assert method.modes == [True] * 12, "also after validation switched to evaluation mode"
    assert not method.training, "a trained method is in evaluation mode"


def test_training_drops_elements_of_words_with_one_mask_per_step():
    settings = dataclasses.replace(SETTINGS, word_dropout=0.3, accumulate=2)
    network, _ = run(settings=settings)
    assert network.paths.prompts.word_dropout == 0.3
    assert not same(network, run(settings=dataclasses.replace(settings, word_dropout=0.0))[0])
    with pytest.raises(UsageError, match="has no learned word vectors"):
        run(PromptOptions(width=5, vocabulary="fixed"), settings)


def test_hooks_are_called_in_order():
    method, _ = recorded(dataclasses.replace(FOUR, epochs=1, batch_size=4, accumulate=2))
    assert method.calls == ["losses", "batch", "losses", "batch", "step", "losses", "batch", "step", "epoch 1"]


@pytest.mark.parametrize(
    ("more", "rates"),
    [
        ({}, [1, 1, 0.5, 0.5]),
        ({"schedule": "constant"}, [1, 1, 1, 1]),
        ({"schedule": "cosine"}, [1, 0.85355, 0.5, 0.14645]),
        ({"decay": 0.25, "decay_every": 1}, [1, 0.25, 0.0625, 0.015625]),
    ],
)
def test_the_learning_rate_follows_its_schedule(monkeypatch, more, rates):
    settings = dataclasses.replace(FOUR, batch_size=10, **more)
    found = []

    def note(optimiser):
        found.append(optimiser.param_groups[0]["lr"])

    monkeypatch.setattr(torch.optim.Adam, "step", lambda self, closure=None: note(self))
    recorded(settings)
    assert found == pytest.approx([0.125 * rate for rate in rates], abs=1e-5)
    if settings.schedule == "cosine":
        assert [rate_share(settings.epochs + more, settings) for more in (0, 1, 5)] == pytest.approx([0, 0, 0])


def test_optimiser_and_weight_decay_are_those_of_the_settings():
    method = Recorder(small_context())
    assert type(make_optimiser(method, FOUR)) is torch.optim.Adam
    adamw = make_optimiser(method, dataclasses.replace(FOUR, optimiser="adamw", weight_decay=0.25, eps=1e-4))
    assert type(adamw) is torch.optim.AdamW
    assert (adamw.param_groups[0]["weight_decay"], adamw.param_groups[0]["eps"]) == (0.25, 1e-4)


def test_nan_after_the_last_step_is_reported():
    class Broken(Recorder):
        def after_step(self):
            with torch.no_grad():
                self.weight.fill_(float("nan"))

        def losses(self, batch, shared):
            return {"b": torch.nan_to_num(self.weight)}

    with pytest.raises(DuplexError, match=r"weight diverged in the last step of epoch 1; lower training.learning_rate"):
        train(Broken(small_context()), examples(count=4), FOUR, 0, lambda _: 0.5)


@pytest.mark.parametrize(("aucs", "best"), [([0.1, 0.2, 0.3, 0.3, 0.3, 0.9], 2), ([0.5] * 4, 0)])
def test_patience_counts_from_the_best_epoch(aucs, best):
    rest, settings = iter(aucs), dataclasses.replace(SETTINGS, epochs=30, patience=2)
    outcome = train(small_method(DUPLEX), examples(), settings, 0, lambda _: next(rest))
    assert (outcome.best_epoch, [row["epoch"] for row in outcome.history]) == (best, [*range(best + 3)])


def test_patience_ends_only_after_validations():
    """Epochs 0, 3 and 6 are validated; without a better one, the third ends training, although patience is shorter."""
    rest, settings = iter([0.1, 0.3, 0.2]), dataclasses.replace(SETTINGS, epochs=30, patience=2, validate_every=3)
    outcome = train(small_method(DUPLEX), examples(), settings, 0, lambda _: next(rest))
    assert (outcome.best_epoch, outcome.history[-1]["epoch"]) == (3, 6)


def test_the_epoch_by_loss_unseen_accuracy_harmonic_mean_or_the_last():
    val, kept = examples("val", 24, 7), {}
    for name in ("loss", "unseen", "hm", "last"):
        settings = dataclasses.replace(SETTINGS, select=name)
        kept[name] = train(small_method(DUPLEX), examples(), settings, 0, Validation(val, LABELS, name))
    for name, better in (("loss", min), ("unseen", max), ("hm", max)):
        values = [row[f"val_{name}"] for row in kept[name].history]
        assert kept[name].best_epoch == values.index(better(values)) and kept[name].selected_by == name
    assert kept["hm"].best_auc == kept["hm"].history[kept["hm"].best_epoch]["val_auc"]
    assert kept["last"].best_epoch == 4 and kept["last"].selected_by == "last"


@pytest.mark.parametrize("name", ["auc", "hm", "loss"])
def test_the_epoch_by_the_open_world_has_every_pair_as_a_candidate(name):
    val = examples("val", 24, 7)
    validate = Validation(val, LABELS, name, world="open")
    kept = train(small_method(DUPLEX), examples(), dataclasses.replace(SETTINGS, select=name), 0, validate)
    better = min if name == "loss" else max
    values = [row[f"val_{name}_all"] for row in kept.history]
    assert kept.best_epoch == values.index(better(values)) and kept.selected_by == f"{name}_all"
    network = small_method(DUPLEX).eval()
    scores = network.scorer(np.arange(LABELS.size))(val.inputs)
    margins = Margins.of(ScoreAccumulator(val.compositions.numpy(), LABELS.seen).add(scores).competitors())
    found = validate(network).metrics
    assert found["auc_all"] == pytest.approx(AucComponents.of(margins).auc)
    assert found["auc"] == Validation(val, LABELS)(network).metrics["auc"] > found["auc_all"]


@pytest.mark.parametrize("select", ["auc", "last"])
def test_a_metric_of_the_caller_chooses_the_epoch_wherever_it_stands_among_the_metrics(select):
    best = iter([0.2, 0.9, 0.1, 0.3, 0.4])

    def validate(_):
        return Validated({"mine": next(best), "auc": 0.5}, "mine")

    outcome = train(small_method(DUPLEX), examples(), dataclasses.replace(SETTINGS, select=select), 0, validate)
    assert (outcome.best_epoch, outcome.selected_by, outcome.best_auc) == (1, "mine", 0.5)
    assert [name for name in outcome.history[0] if name.startswith("val_")] == ["val_mine", "val_auc"]


def test_of_losses_the_lowest_is_the_best():
    assert Validated({"auc": 0.5, "loss": 2.0}, "loss").value == -2.0
    assert Validated({"auc": 0.5, "loss": 2.0}).value == 0.5


def test_without_validation_the_last_epoch_is_kept():
    """Patience has no effect."""
    kept = small_method(DUPLEX)
    outcome = train(kept, examples(), dataclasses.replace(SETTINGS, patience=1), 0, None)
    assert (outcome.best_epoch, outcome.selected_by) == (4, "last") and np.isnan(outcome.best_auc)
    assert not any(name.startswith("val_") for row in outcome.history for name in row)
    last = small_method(DUPLEX)
    train(last, examples(), dataclasses.replace(SETTINGS, select="last"), 0, lambda _: 0.5)
    assert same(kept, last)


def test_a_run_killed_after_its_last_epoch_still_knows_what_chose_its_best_one(tmp_path):
    val, resume = examples("val", 24, 7), ResumePoint(path=tmp_path / "training.partial", key="k")
    settings = dataclasses.replace(SETTINGS, select="hm")
    ends = []
    for _ in range(2):
        network = small_method(DUPLEX)
        ends.append((network, train(network, examples(), settings, 0, Validation(val, LABELS, "hm"), resume)))
    assert same(ends[0][0], ends[1][0]) and ends[1][1].selected_by == "hm"
    assert ends[0][1].history == ends[1][1].history


def test_the_validation_loss_is_the_cross_entropy_of_the_scores():
    network, val = small_method(PromptOptions(width=5)), examples("val", 24, 7)
    candidates = LABELS.candidates("closed", "val")
    p = network.probabilities(network.eval().scorer(candidates)(val.inputs).double())
    own = [p[row, candidates.tolist().index(c)].log() for row, c in enumerate(val.compositions.tolist())]
    assert Validation(val, LABELS, "loss")(network).metrics["loss"] == pytest.approx(-float(sum(own)) / 24)


@pytest.mark.parametrize(("every", "validated"), [(2, [0, 2, 4, 5]), (9, [0, 5])])
def test_epochs_between_validations_are_trained_but_never_kept(every, validated):
    _, outcome = run(settings=dataclasses.replace(SETTINGS, epochs=5, validate_every=every))
    assert [row["epoch"] for row in outcome.history if "val_auc" in row] == validated
    assert [row["epoch"] for row in outcome.history] == list(range(6))
    aucs = [row["val_auc"] for row in run(settings=dataclasses.replace(SETTINGS, epochs=5))[1].history]
    assert outcome.best_epoch == max(validated, key=lambda epoch: aucs[epoch])
    assert outcome.best_auc == aucs[outcome.best_epoch]


@pytest.mark.parametrize(("reads", "epochs"), [(False, [2, 4, 5]), (True, [1, 2, 3, 4, 5])])
def test_buffers_that_no_loss_reads_are_recomputed_before_validations_alone(reads, epochs, monkeypatch):
    class Counting(type(small_method(PromptOptions(width=5)))):
        trains_on_buffers = reads

        def on_features_changed(self, train: Batch) -> None:
            called.append(len(train))

        def after_epoch(self, epoch: int) -> None:
            called[-1:] = [epoch] if called and called[-1] == 50 else called[-1:]

    called: list[int] = []
    monkeypatch.setattr(f"{__name__}.small_method", lambda options: Counting(small_context(), options).double())
    run(PromptOptions(width=5), dataclasses.replace(SETTINGS, epochs=5, validate_every=2))
    assert called == epochs
