"""TOMCAT: adapts prompts and image prototypes to unlabelled images that arrive one by one.

Yan, Feng, "TOMCAT: Test-time Comprehensive Knowledge Accumulation for Compositional Zero-Shot
Learning", NeurIPS 2025, with formulas as in the authors' code. For each image:

    w_c = sigma(-theta z.t_c),   t~_c = norm(t_c + w_c dt_c)
    u_c = sigma(-theta z.v_c),   v~_c = norm(v_c + u_c dv_c)
    l_c = log p(c|x) + kappa z.(t~_c - t_c) + alpha exp(-beta (1 - z.v~_c))
    L = entropy(softmax l) + lambda (mean cross-entropy of the rows and of the columns of kappa v~_i.t~_j)

* z, t_c: unit features of image, prompt;  p: the method's probabilities;  kappa: 1 / temperature
* dt_c, dv_c: offsets, at first zero; AdamW makes a step after the scores of each batch
* v_c: mean of a queue of the K features with the lowest entropies. An image enters the
  queue of the c with the largest l_c (without the last summand, for which c must have a queue)
* i, j: compositions whose queue was entered by an image of the stream

With `warm`, each queue begins with the composition's mean training feature or, if it is unseen, a
composed prototype; this feature is the first to leave. WARM-CAT (arXiv 2602.23114; only its
abstract was read) learns a map instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from duplex.methods.base import AdapterInputs, Inputs, StreamAdapter, UnsuitableMethod
from duplex.methods.codebook import Codebook
from duplex.methods.layers import unit
from duplex.methods.portable import normalise_posterior_sums
from duplex.options import Count, NonNegative, Options

BETAS = (0.9, 0.999)  # of AdamW
EPSILON = 1e-3
MOST = 1 << 14  # of more candidates, only the first so many move
TOP = 16  # that are among so many best of an image
LEAST = 1e-38  # probability


@dataclass(frozen=True)
class TomcatOptions(Options):
    """Options of the stream adapter `tomcat`; defaults: the authors' code for C-GQA."""

    learning_rate: NonNegative = 6.25e-6  # of the offsets
    alpha: NonNegative = 0.5  # weight of the similarities to image prototypes
    beta: NonNegative = 10.0  # sharpness of these similarities
    theta: NonNegative = 2.0  # slope of w and u
    contrast: NonNegative = 1.75  # lambda, weight of the cross-entropies
    weight_decay: NonNegative = 1e-4  # of the offsets
    queue: Count = 3  # K, features of a queue
    warm: bool = False  # whether queues begin with training features


class Tomcat(StreamAdapter):
    """Stream adapter that moves prompts and image prototypes to make predictions more certain."""

    Options = TomcatOptions
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "learning_rate": (0.0, 1e-6, 5e-6, 2.5e-5, 1e-4, 5e-4),
        "alpha": (0.0, 0.25, 0.5, 1.25),
        "warm": (False, True),
    }

    def __init__(self, run: AdapterInputs, options: TomcatOptions) -> None:
        super().__init__(run, options)
        parts = run.method.inspectable()
        features = parts.text_space_features or parts.features
        if parts.semantic is None or features is None:
            raise UnsuitableMethod(
                f"tomcat adapts prompts, and {run.method.class_name} has none; choose a run with prompts"
            )
        self.t = unit(parts.semantic(run.candidates[run.feasible]))  # of candidates that compete
        self.features = features
        self.kappa = math.exp(run.method.context.tower.logit_scale)
        self.columns = torch.from_numpy(np.flatnonzero(run.feasible)).to(self.t.device)
        rows = min(len(self.t), MOST)
        dim = self.t.shape[1]
        self.moving = self.columns[:0]  # which of the C move; tables below have a row for each
        self.v = self.t.new_zeros(rows, dim)
        self.has_queue = torch.zeros(rows, dtype=torch.bool, device=self.t.device)
        self.met = self.has_queue.clone()  # whether an image of the stream entered the queue
        self.queues: dict[int, list[tuple[float, Tensor]]] = {}  # (entropy, feature), by entropy
        self.offsets = self.t.new_zeros(2, rows, dim)  # dt, dv
        self.mean = torch.zeros_like(self.offsets)  # of AdamW
        self.square = torch.zeros_like(self.offsets)
        self.steps = 0
        self.book: Codebook | None = None
        if options.warm:
            self.book = Codebook(run.method.labels, dim, unseen="compose", random_seen=False).to(self.t.device)
            self.book.start(unit(self.features(run.train.inputs)), run.train.compositions, seen=True)
        if len(self.t) <= MOST:
            self._admit(torch.arange(len(self.t), device=self.t.device))

    def _admit(self, candidates: Tensor) -> None:
        first = len(self.moving)
        new = candidates[~torch.isin(candidates, self.moving)]
        self.moving = torch.cat([self.moving, new])[:MOST]
        if self.book is not None and len(self.moving) > first:
            compositions = self.run.candidates[self.columns[self.moving[first:]].cpu().numpy()]
            self.v[first : len(self.moving)] = self.book.prototypes(compositions).to(self.t)
            self.has_queue[first : len(self.moving)] = True

    @torch.no_grad()
    def scores(self, stream: Iterable[Inputs]) -> Iterator[Tensor]:
        for inputs in stream:
            scores = self.run.scorer(inputs)
            base, is_probability = self._log_probabilities(scores)
            if len(self.t) > MOST:
                self._admit(base.topk(TOP).indices.unique())
            offsets = self.offsets[:, : len(self.moving)].clone().requires_grad_()
            for place, z in enumerate(unit(self.features(inputs)).to(self.t)):
                with torch.enable_grad():
                    shift, loss = self._adapted(z, base[place], offsets)
                    (loss / len(base)).backward()
                shift = shift.detach()
                change = (base[place] + shift).logsumexp(0) - base[place].logsumexp(0)
                own = scores[place, self.columns]  # the sum of probabilities stays
                scores[place, self.columns] = own * (shift - change).exp() if is_probability else own + shift
            self._step(offsets)
            yield scores

    def _log_probabilities(self, scores: Tensor) -> tuple[Tensor, bool]:
        competing = scores[:, self.columns].to(self.t)
        p = self.run.method.probabilities(competing)
        return p.clamp(min=LEAST).log(), torch.equal(p, normalise_posterior_sums(competing))

    def _adapted(self, z: Tensor, base: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        # the change of the log-probabilities `base` [C], and the loss
        options = self.options
        rows = self.moving
        t = self.t[rows]
        w = torch.sigmoid(-options.theta * (t @ z))
        moved_t = unit(t + w[:, None] * offsets[0])
        shift = torch.zeros_like(base).index_add(0, rows, self.kappa * ((moved_t - unit(t)) @ z))
        log_p = (base + shift).detach().log_softmax(0)
        for place in (rows == log_p.argmax()).nonzero()[:, 0].tolist():  # none if full
            self._enqueue(place, float(_entropy(log_p)), z)
            self.met[place] = True
        listed = self.has_queue[: len(rows)].nonzero()[:, 0]
        v = self.v[listed]
        u = torch.sigmoid(-options.theta * (v @ z))
        moved_v = unit(v + u[:, None] * offsets[1, listed])
        visual = options.alpha * torch.exp(-options.beta * (1 - moved_v @ z))
        shift = shift.index_add(0, rows[listed], visual)
        met = self.met[listed]
        logits = self.kappa * moved_v[met] @ moved_t[listed[met]].T
        own = torch.arange(len(logits), device=logits.device)
        contrast = (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2
        return shift, _entropy((base + shift).log_softmax(0)) + options.contrast * contrast

    def _enqueue(self, place: int, entropy: float, z: Tensor) -> None:
        first = [(math.inf, self.v[place].clone())] if self.has_queue[place] else []
        queue = [*self.queues.get(place, first), (entropy, z)]
        self.queues[place] = sorted(queue, key=lambda entry: entry[0])[: self.options.queue]
        self.v[place] = torch.stack([feature for _, feature in self.queues[place]]).mean(0)
        self.has_queue[place] = True

    def _step(self, offsets: Any) -> None:
        rows = slice(len(self.moving))
        rate = self.options.learning_rate
        self.steps += 1
        mean = torch.lerp(offsets.grad, self.mean[:, rows], BETAS[0])
        square = torch.lerp(offsets.grad**2, self.square[:, rows], BETAS[1])
        root = (square / (1 - BETAS[1] ** self.steps)).sqrt() + EPSILON
        kept = (1 - rate * self.options.weight_decay) * offsets
        self.offsets[:, rows] = kept - rate * mean / (1 - BETAS[0] ** self.steps) / root
        self.mean[:, rows] = mean
        self.square[:, rows] = square


def _entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(-1)
