"""Linear probes of states and objects on cached features: `S(c|x) = p(s|x) p(o|x)`. No text tower, no prototypes."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from duplex.methods.base import Method
from duplex.options import Options


@dataclass(frozen=True)
class ProbeOptions(Options):
    scale: float = 20.0  # 1 / temperature

    def rules(self):
        yield self.scale > 0, f"scale is {self.scale}; expected a number above 0"


class LinearProbe(Method[ProbeOptions]):
    Options = ProbeOptions

    def __init__(self, context, options):
        super().__init__(context, options)
        self.states = nn.Linear(context.dim, len(context.labels.states))
        self.objects = nn.Linear(context.dim, len(context.labels.objects))

    def logits(self, inputs):  # [B, M], [B, N]
        z = self.options.scale * normalize(inputs["cls"], dim=-1)
        return self.states(z), self.objects(z)

    def losses(self, batch, shared):
        s, o = self.logits(batch.inputs)
        m, n = self.primitives(batch.compositions)
        return {"state": cross_entropy(s, m), "object": cross_entropy(o, n)}

    def scorer(self, candidates):
        m, n = self.primitives(torch.as_tensor(candidates, device=self.states.weight.device))  # [C], [C]

        @torch.no_grad()
        def scores(inputs):
            s, o = self.logits(inputs)
            return s.softmax(-1)[:, m] * o.softmax(-1)[:, n]

        return scores
