"""LOGICZSL (Wu et al., "LOGICZSL: Exploring Logic-induced Representation for Compositional Zero-shot Learning", CVPR
2025), over cached features: rules of logic between primitives and compositions, as losses.

Three paths give posteriors of compositions, states and objects; rules say how they hang together, and losses ask
images for their truth. With the product t-norm and its implication `a -> b  =  1 - a + a b`, what a rule lacks to be
true is `a (1 - b)`. Summed over rules, averaged over images:

* composition and decomposition, for every seen c = (s, o): `c -> s`, `c -> o`:  p(c) (1 - p(s)) + p(c) (1 - p(o));
  `s and o -> c`:  p(s) p(o) (1 - p(c))
* primitives:  `a excludes b`:  p(a) q(b);    `a implies b`:  p(a) (1 - q(b)) where p is the primitive's own path and q
  the marginal of the composition path, q(s) = sum_o p(s, o).

The paper has a language model write the rules. Here they are lines of the row's `rules`; without any, they are read
off the training labels (`duplex.layers.rules`). Scores are the three paths'.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from duplex.layers.prompt_paths import Prototypes
from duplex.layers.rules import FORM, observed, read, well_formed
from duplex.methods.base import Batch, Setting
from duplex.methods.three_paths import ThreePathOptions, ThreePaths


@dataclass(frozen=True)
class LogicOptions(ThreePathOptions):
    rules_weight: float = 1.0  # of both losses; 0 leaves the three paths
    rules_written: tuple[str, ...] = ()  # `state: ripe excludes unripe`; none: read off the training labels

    def rules(self) -> Iterable[tuple[object, str]]:
        yield from super().rules()
        yield self.rules_weight >= 0, f"rules_weight is {self.rules_weight}; it is at least 0"
        for line in self.rules_written:
            yield well_formed(line), f"rules_written: {line!r} is no rule; {FORM}"


class LogicZsl(ThreePaths[LogicOptions]):
    Options = LogicOptions
    excludes_s: Tensor
    implies_s: Tensor
    excludes_o: Tensor
    implies_o: Tensor

    def __init__(self, setting: Setting, options: LogicOptions) -> None:
        super().__init__(setting, options)
        written, labels = options.rules_written, setting.labels
        states, objects = read(written, labels) if written else observed(labels)
        for name, rules in (("s", states), ("o", objects)):
            self.register_buffer(f"excludes_{name}", rules.excludes, persistent=False)
            self.register_buffer(f"implies_{name}", rules.implies, persistent=False)

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        z, factored, losses = self.seen(batch, shared)
        weight = self.options.rules_weight
        if not weight:
            return losses
        p_c = self.paths.logits(z, shared.compositions).softmax(-1)  # [B, C]
        p_s, p_o = factored.log_s.exp(), factored.log_o.exp()
        m, n = self.columns.states, self.columns.objects
        q_s, q_o = (torch.zeros_like(p).index_add(1, group, p_c) for p, group in ((p_s, m), (p_o, n)))
        of_s, of_o = p_s[:, m], p_o[:, n]  # [B, C]
        formed = p_c * (2 - of_s - of_o) + of_s * of_o * (1 - p_c)
        lacking = violated(p_s, q_s, self.excludes_s, self.implies_s)
        lacking = lacking + violated(p_o, q_o, self.excludes_o, self.implies_o)
        return {**losses, "formed": weight * formed.sum(1).mean(), "related": weight * lacking.mean()}


def violated(p: Tensor, q: Tensor, excludes: Tensor, implies: Tensor) -> Tensor:
    """`sum_(a excludes b) p_a q_b + sum_(a implies b) p_a (1 - q_b)` of each image [B]."""
    return ((p @ excludes) * q).sum(1) + ((p @ implies) * (1 - q)).sum(1)
