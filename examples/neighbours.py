"""Neighbours: `S(c|x) = p(s|x) p(o|x)`, each by the training images near x, in a trained metric."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import nll_loss, normalize, one_hot

from duplex.methods.base import Method
from duplex.options import Options, Positive


@dataclass(frozen=True)
class NeighbourOptions(Options):
    scale: Positive = 30.0  # 1 / temperature of the weights of neighbours


class Neighbours(Method[NeighbourOptions]):
    def __init__(self, context, options):
        super().__init__(context, options)
        self.metric = nn.Parameter(torch.ones(context.dim))
        self.grow("keys", context.dim)
        self.grow("key_labels", dtype=torch.int64)

    def start(self, train):
        self.keys, self.key_labels = normalize(train.cls, dim=1), train.compositions

    on_features_changed = start

    def probabilities_of_primitives(self, z, rows=None):  # [B, M], [B, N]
        q, k = (normalize(x * self.metric, dim=1) for x in (z, self.keys))
        similarity = self.options.scale * q @ k.T  # [B, n]
        if rows is not None:
            similarity = similarity.scatter(1, rows[:, None], -torch.inf)
        weights = similarity.softmax(-1)
        m, n = self.primitives(self.key_labels)
        states, objects = one_hot(m, len(self.labels.states)), one_hot(n, len(self.labels.objects))
        return weights @ states.to(weights), weights @ objects.to(weights)

    def losses(self, batch, shared):
        s, o = self.probabilities_of_primitives(batch.cls, batch.rows)
        m, n = self.primitives(batch.compositions)
        return {"state": nll_loss(s.clamp(min=1e-6).log(), m), "object": nll_loss(o.clamp(min=1e-6).log(), n)}

    def scorer(self, candidates):
        m, n = self.primitives(torch.as_tensor(candidates, device=self.keys.device))

        @torch.no_grad()
        def scores(inputs):
            s, o = self.probabilities_of_primitives(inputs["cls"])
            return s[:, m] * o[:, n]

        return scores
