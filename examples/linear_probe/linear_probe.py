"""Linear probes of states and objects on cached features: `S(c|x) = p(s|x) p(o|x)`. No text tower, no prototypes."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from duplex.methods.base import Method, columns_of
from duplex.options import Options


@dataclass(frozen=True)
class ProbeOptions(Options):
    scale: float = 20.0  # 1 / temperature

    def rules(self):
        yield self.scale > 0, f"scale is {self.scale}; it is above 0"


class LinearProbe(Method[ProbeOptions]):
    Options = ProbeOptions

    def __init__(self, setting, options):
        super().__init__(setting, options)
        self.states = nn.Linear(setting.dim, len(setting.labels.states))
        self.objects = nn.Linear(setting.dim, len(setting.labels.objects))

    def logits(self, inputs):  # [B, M], [B, N]
        z = self.options.scale * normalize(inputs["cls"], dim=-1)
        return self.states(z), self.objects(z)

    def losses(self, batch, shared):
        s, o = self.logits(batch.inputs)
        n = len(self.labels.objects)
        return {"s": cross_entropy(s, batch.compositions // n), "o": cross_entropy(o, batch.compositions % n)}

    def scorer(self, columns):
        m, n = columns_of(self.labels, columns, self.states.weight.device)  # states and objects of the target set [C]

        @torch.no_grad()
        def scores(inputs):
            s, o = self.logits(inputs)
            return s.softmax(-1)[:, m] * o.softmax(-1)[:, n]

        return scores
