"""Measure an idea for unseen pairs: python -m benchmarks.ideas [--encoder NAME] [--weights FILE] SOURCE

Synthetic images of unseen pairs: the feature z of a training image of the pair (m, n) is moved by the closed form's
vectors of states and objects, to z + a_m' - a_m or z + b_n' - b_n, and gets the label (m', n) or (m, n') of an unseen
pair, drawn at random. SOURCE is a folder or a table of labelled images (TABLE:FOLDER of its images). Over its own split
and random ones, and over two seeds of the synthetic images, the table has means on validation images, per cent: AUC
among listed pairs, and images of unseen and of seen pairs that are right among all pairs at the true share of unseen
pairs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from benchmarks.measure import emit, options, say, write_csv
from duplex import load_dataset
from duplex.data.tables import LabelledImages, resplit
from duplex.evaluation.accumulate import ScoreAccumulator
from duplex.evaluation.curve import AucComponents, Margins
from duplex.evaluation.probabilities import fit_probabilities, log_probabilities
from duplex.features.tokens import Examples, join_labels
from duplex.labels import Ints, LabelSpace
from duplex.methods.base import Batch, MethodContext
from duplex.methods.gaussian import ClassStatistics, ClosedForm
from duplex.methods.layers import unit
from duplex.methods.linear import Linear, LinearOptions
from duplex.training.scoring import choose_options

COPIES, SEEDS = 3, (0, 1)  # synthetic images per training image; seeds
Scorer = Callable[[Ints], Tensor]  # compositions [C] -> log probabilities of validation images [N, C]
Measured = dict[str, float]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("source")
    parser.add_argument("--encoder", default="tiny")
    parser.add_argument("--weights")
    parser.add_argument("--splits", type=int, default=4)
    parser.add_argument("--csv", help="write the table to this file")
    given = parser.parse_args()
    place, _, images = given.source.partition(":")
    data = load_dataset(place, images=images or None, encoder=given.encoder, weights=given.weights)
    rows = []
    for number in range(given.splits):
        own = LabelledImages(data.manifest, data.labels, {})
        split = own if number == 0 else resplit(own, number)
        bad = np.asarray(~data.features.any(1))
        examples = join_labels(split.manifest, split.labels, {"cls": data.features}, bad)
        for record in measured(examples, split.labels):
            rows.append({"split": number, **record})
    table = pd.DataFrame(rows).groupby("method", sort=False).mean(numeric_only=True).drop(columns="split")
    table = table.round(1).reset_index()
    write_csv(table, given.csv)
    emit(json.loads(table.to_json(orient="records"))) if given.json else say(table.to_string(index=False))


def measured(examples: dict[str, Examples], labels: LabelSpace) -> Iterator[dict[str, Any]]:
    """A row for each method and, with synthetic images, for each seed."""
    train, val = examples["train"], examples["val"]
    z = unit(train.cls.double())
    model = ClosedForm.fit(ClassStatistics.of(z, train.compositions, len(labels.states), len(labels.objects)))
    closed = closed_form(model, val)
    yield {"method": "closed form", **validated(closed, val, labels)}
    real = regressions(train, val, labels)
    yield from with_product("regressions", real, closed, val, labels)
    for seed in SEEDS:
        both = with_synthetic(train, model, labels, np.random.default_rng(seed))
        yield from with_product("regressions, synthetic images", regressions(both, val, labels), closed, val, labels)


def with_product(
    name: str, scorer: Scorer, closed: Scorer, val: Examples, labels: LabelSpace
) -> Iterator[dict[str, Any]]:
    """The rows of a scorer and of its product with the closed form, on a common scale."""
    yield {"method": name, **validated(scorer, val, labels)}
    heats = [temperature(each, val, labels) for each in (scorer, closed)]
    product: Scorer = lambda pairs: scorer(pairs) / heats[0] + closed(pairs) / heats[1]  # noqa: E731
    yield {"method": f"{name}, times closed form", **validated(product, val, labels)}


def with_synthetic(train: Examples, model: ClosedForm, labels: LabelSpace, random: np.random.Generator) -> Examples:
    """`train` with `COPIES` synthetic images of unseen pairs for each image.

    x = z W, so that a shift of x by a_m' - a_m is one of z by (a_m' - a_m) W^-1.
    """
    inverse = torch.linalg.inv(model.whitening)
    a, b = model.additive.state @ inverse, model.additive.object @ inverse
    seen = np.zeros((len(labels.states), len(labels.objects)), dtype=bool)
    seen.flat[labels.pairs["train"]] = True
    z = unit(train.cls.double())
    m, n = (
        part.numpy() for part in (train.compositions // len(labels.objects), train.compositions % len(labels.objects))
    )
    parts, compositions = [z], [train.compositions.numpy()]
    for _ in range(COPIES):
        to_state = drawn(~seen[:, n].T, random)  # m' [n], or -1 if every state has images with the object
        to_object = drawn(~seen[m], random)
        moves_state = (random.random(len(m)) < 0.5) & (to_state >= 0) | (to_object < 0)
        new_m, new_n = np.where(moves_state, to_state, m), np.where(moves_state, n, to_object)
        usable = np.where(moves_state, to_state, to_object) >= 0
        shift = a[new_m] - a[m] + b[new_n] - b[n]
        parts.append((z + shift)[usable])
        compositions.append((new_m * len(labels.objects) + new_n)[usable])
    cls = torch.cat(parts).float()
    return Examples(np.arange(len(cls)), {"cls": cls}, torch.from_numpy(np.concatenate(compositions)))


def drawn(allowed: np.ndarray, random: np.random.Generator) -> Ints:
    """For each row of a mask [n, G], a random column that it allows; -1 if there is none."""
    weights = np.where(allowed, random.random(allowed.shape), -1.0)
    return np.where(allowed.any(1), weights.argmax(1), -1)


def regressions(train: Examples, val: Examples, labels: LabelSpace) -> Scorer:
    """Logistic regressions of states and objects, whose strength validation chooses."""
    method = Linear(MethodContext(labels, {"cls": tuple(train.cls.shape[1:])}, None, None), LinearOptions())
    method.start(Batch(train.inputs, train.compositions))
    choose_options(method, val, labels)
    return lambda pairs: log_probabilities(method.probabilities, method.scorer(pairs)(val.inputs))


def closed_form(model: ClosedForm, val: Examples) -> Scorer:
    z = unit(val.cls.double())
    return lambda pairs: model.scorer(torch.from_numpy(pairs))(z).log_softmax(1)


def temperature(scorer: Scorer, val: Examples, labels: LabelSpace) -> float:
    pairs = labels.candidates("closed", "val")
    target = np.searchsorted(pairs, val.compositions.numpy())
    return fit_probabilities(scorer(pairs), target, labels.is_seen(pairs)).temperature


def validated(scorer: Scorer, val: Examples, labels: LabelSpace) -> Measured:
    """AUC among the pairs of validation; accuracy on unseen and on seen pairs among all pairs."""
    label = val.compositions.numpy()
    pairs = labels.candidates("closed", "val")
    target, seen = np.searchsorted(pairs, label), labels.is_seen(pairs)
    log_p = scorer(pairs)
    auc = AucComponents.of(Margins.of(ScoreAccumulator(target, seen).add(log_p.float()).competitors())).auc
    is_new = ~labels.is_seen(label)
    confidence = replace(fit_probabilities(log_p, target, seen), new_share=float(is_new.mean()))
    everything = labels.candidates("open", "val")
    seen = labels.is_seen(everything)
    prior = torch.from_numpy(confidence.log_prior(seen, np.ones_like(seen)))
    answer = everything[(scorer(everything) / confidence.temperature + prior).argmax(1).numpy()]
    right = answer == label
    return {
        "AUC": 100 * (math.nan if auc is None else auc),
        "unseen pairs": 100 * float(right[is_new].mean()),
        "seen pairs": 100 * float(right[~is_new].mean()),
    }


if __name__ == "__main__":
    main()
