"""Measure any model: scores in, exact metrics with intervals out; no data set, no encoder."""

import matplotlib.pyplot as plt
import numpy as np

import duplex
from duplex.evaluation.curve import Margins

rng = np.random.default_rng(0)
labels = rng.integers(0, 10, 2000)  # index of each image's pair among ten candidates
seen = np.arange(10) < 6  # the model was trained on the first six
scores = rng.normal(size=(2000, 10)) + 2 * np.eye(10)[labels] + 1.5 * seen  # and prefers them

competitors = duplex.ScoreAccumulator(labels, seen).add(scores, slice(0, 2000)).competitors()
metrics = duplex.measure(competitors, rounds=200)
low, high = metrics.auc_interval
print(f"S {metrics.seen:.1%}, U {metrics.unseen:.1%}, HM {metrics.hm:.1%}")
print(f"AUC {metrics.auc:.1%} ({low:.1%} to {high:.1%})")

curve = duplex.Curve.of(Margins.of(competitors)).table()
figure, axes = plt.subplots(figsize=(3, 2.2), layout="constrained")
for kind in ("seen", "unseen"):
    axes.plot(curve["bias"], curve[kind], label=f"{kind} pairs")
axes.set(xlabel="bias added to unseen pairs", ylabel="accuracy")
axes.legend(fontsize=7)
figure.savefig("scores.png")
