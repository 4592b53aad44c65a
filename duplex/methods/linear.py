"""Logistic regression on the encoder's features, a baseline for all methods that compose.

    over: primitives    S(c|x) = log p(s|x) + log p(o|x)    of a pair c = (s, o), seen or not
    over: pairs         S(c|x) = log p(c|x)                 of a seen pair; -1e30 of every other pair

    p(g|x) = softmax_g(w_g . z + b_g),    (w, b) = argmin  mean_i -log p(g_i|x_i) + l2 / 2 sum_g |w_g|^2

* z: unit image features; those of joined encoders are scaled, each by its own deviation
* g: states, objects or seen pairs
* l2: strength of regularisation, the best of `STRENGTHS` by validation AUC. A classifier of pairs
  is never right on an unseen pair, so its AUC is 0; for it, accuracy on seen pairs decides.

Each minimum is found by full-batch L-BFGS in float64, which starts at the minimum for the next
stronger regularisation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from duplex.errors import UsageError
from duplex.labels import Ints
from duplex.methods import portable
from duplex.methods.base import Batch, Inputs, Method, MethodContext, ScoreTerms
from duplex.methods.layers import part_scales, unit
from duplex.options import Options, Positive

STRENGTHS = (1e-2, 1e-3, 1e-4, 1e-5)
KEPT = 4  # latest fits in memory: another recipe of the same search may need the same regressions
TOLERANCE = 1e-8
MOST_STEPS = 3000


@dataclass(frozen=True)
class LinearOptions(Options):
    over: Literal["primitives", "pairs"] = "primitives"  # states and objects, or seen pairs
    l2: Positive | None = None  # strength of the regularisation; null: chosen by validation


class Linear(Method[LinearOptions]):
    """Logistic regression of states and objects, or of seen pairs; buffers [d + 1, G]."""

    reads_joined = True
    l2: Tensor

    def __init__(self, context: MethodContext, options: LinearOptions) -> None:
        super().__init__(context, options)
        labels = context.labels
        sizes = {"states": len(labels.states), "objects": len(labels.objects)}
        self._sizes = sizes if options.over == "primitives" else {"pairs": len(labels.pairs["train"])}
        for name, size in self._sizes.items():
            self.register_buffer(name, torch.zeros(context.dim + 1, size, dtype=torch.float64))
        self.register_buffer("l2", torch.zeros((), dtype=torch.float64))
        self._tried: dict[float, dict[str, Tensor]] = {}  # classifiers by l2

    @classmethod
    def accepts_partial_labels(cls, options: LinearOptions) -> bool:
        return options.over == "primitives"

    def start(self, train: Batch) -> None:
        strengths = STRENGTHS if self.options.l2 is None else (self.options.l2,)
        seen = torch.as_tensor(self.labels.pairs["train"], device=train.compositions.device)
        states, objects = self.known_primitives(train.compositions)
        groups = {"states": states, "objects": objects, "pairs": torch.searchsorted(seen, train.compositions)}
        self._tried = {l2: {} for l2 in strengths}
        z = unit(train.cls).double()
        scales = part_scales(z.var(0, correction=0), self.context.parts)
        for name, size in self._sizes.items():
            known = groups[name] >= 0
            path = kept_fits((scales * z)[known], groups[name][known], size, strengths, name)
            for l2, classifier in zip(strengths, path, strict=True):
                self._tried[l2][name] = torch.cat([scales[:, None] * classifier[:-1], classifier[-1:]])
        self._use(strengths[-1])

    def _use(self, l2: float) -> None:
        self.l2.fill_(l2)
        for name, classifier in self._tried[l2].items():
            self.get_buffer(name).copy_(classifier)

    def choose_options(self, images: Inputs, candidates: Ints, auc: Callable[[Tensor], float]) -> None:
        unseen = torch.as_tensor(~self.labels.is_seen(candidates))
        results = {}
        for l2 in self._tried:
            self._use(l2)
            scores = self.scorer(candidates)(images).cpu()
            results[l2] = auc(scores.masked_fill(unseen, -torch.inf) if "pairs" in self._sizes else scores)
        if results:
            self._use(max(results, key=results.__getitem__))

    def chosen_options(self) -> dict[str, Any]:
        return {"l2": float(self.l2)}

    def score_terms(self, candidates: Ints) -> ScoreTerms:
        tensors = self.portable(candidates)
        return torch.no_grad()(lambda inputs: portable.score_terms(tensors, inputs["cls"]))

    def portable(self, candidates: Ints) -> dict[str, Tensor]:
        tensors = portable.candidate_primitives(self.labels, candidates, self.l2.device)
        tensors["product"] = torch.ones((), device=self.l2.device)
        for name in self._sizes:
            rows = self._columns_of(candidates) if name == "pairs" else self.get_buffer(name)
            tensors[f"classifier.{name}.weight"] = rows[:-1].float()
            tensors[f"classifier.{name}.offset"] = rows[-1].float()
        return tensors

    def _columns_of(self, candidates: Ints) -> Tensor:
        seen = self.labels.is_seen(candidates)
        pairs = self.get_buffer("pairs")
        if not seen.any():
            raise UsageError("`over: pairs` scores only seen pairs, but no candidate is seen; set `over: primitives`")
        columns = pairs.new_zeros(len(pairs), len(candidates))
        columns[-1] = -1e30  # exports must be finite
        columns[:, torch.as_tensor(seen)] = pairs[:, self.labels.pairs["train"].searchsorted(candidates[seen])]
        return columns


_kept: dict[str, list[Tensor]] = {}  # digest of the arguments -> result of `fit_logistic`


def kept_fits(z: Tensor, classes: Tensor, size: int, strengths: Sequence[float], name: str) -> list[Tensor]:
    """The result of `fit_logistic`, kept in memory for a second call with the same arguments."""
    sha256 = hashlib.sha256(f"{z.device} {tuple(z.shape)} {size} {strengths}".encode())
    for values in (z, classes):
        sha256.update(values.cpu().contiguous().numpy().tobytes())
    key = sha256.hexdigest()
    if key not in _kept:
        fits = list(fit_logistic(z, classes, size, strengths, name))
        while len(_kept) >= KEPT:
            del _kept[next(iter(_kept))]
        _kept[key] = fits
    return _kept[key]


@torch.enable_grad()
def fit_logistic(z: Tensor, classes: Tensor, size: int, strengths: Sequence[float], name: str) -> Iterator[Tensor]:
    """Fit to `z` [B, d] with each of `strengths`; yields weights and offsets [d + 1, size]."""
    if len(classes.unique()) < 2:
        raise UsageError(f"linear needs training images of two or more {name}, but all show one; use another method")
    x = torch.cat([z - z.mean(0), z.new_ones(len(z), 1)], 1)  # centred: fewer steps
    w = z.new_zeros(x.shape[1], size, requires_grad=True)
    settings: dict[str, Any] = {"tolerance_grad": TOLERANCE, "tolerance_change": 0, "line_search_fn": "strong_wolfe"}
    for l2 in strengths:
        optimiser = torch.optim.LBFGS([w], max_iter=MOST_STEPS, **settings)

        def loss(l2: float = l2, optimiser: torch.optim.Optimizer = optimiser) -> Tensor:
            optimiser.zero_grad()
            value = cross_entropy(x @ w, classes) + l2 / 2 * w[:-1].square().sum()
            value.backward()
            return value

        optimiser.step(loss)
        columns = w.detach().clone()
        columns[-1] -= z.mean(0) @ columns[:-1]
        yield columns
