"""LOGICZSL: losses penalise probabilities that break logical rules between words and compositions.

Wu et al., "LOGICZSL: Exploring Logic-induced Representation for Compositional Zero-shot Learning",
CVPR 2025.

    a -> b  =  1 - a + a b,    broken by the amount a (1 - b)
    composition, every seen c = (s, o):   p(c) (1 - p(s)) + p(c) (1 - p(o)) + p(s) p(o) (1 - p(c))
    primitives:   a excludes b:  p(a) q(b);    a implies b:  p(a) (1 - q(b))
    S = p(c|x) + p(s|x) p(o|x)

* p: posteriors by prompts of compositions, states and objects (three paths)
* q(s) = sum_o p(s, o): marginal of the composition path, q(o) likewise

The losses are sums over rules, averaged over images; the rules of compositions are `c -> s`, `c ->
o` and `s and o -> c`. In the paper, a language model writes the rules between states and between
objects (primitives). Here they are the lines of the option `rules_written`, or if it is empty,
derived from training labels (`exclusion_rules`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from duplex.errors import UsageError, require
from duplex.labels import LabelSpace
from duplex.methods.base import Batch, MethodContext
from duplex.methods.families import ThreePathOptions, ThreePaths
from duplex.methods.prompts import Prototypes
from duplex.options import NonNegative, refuse

LINE = re.compile(r"(state|object):\s*(.+?)\s+(excludes|implies)\s+(.+?)\s*")
FORM = "write `state: A excludes B`, `state: A implies B`, or the same with `object:`"


class RuleTables(NamedTuple):
    """Rules between states (or objects): tables with 1 at [a, b] if a excludes (or implies) b."""

    excludes: Tensor
    implies: Tensor

    @classmethod
    def empty(cls, count: int) -> RuleTables:
        return cls(torch.zeros(count, count), torch.zeros(count, count))


def parse_rules(lines: Sequence[str], labels: LabelSpace) -> tuple[RuleTables, RuleTables]:
    """Read rules between states and between objects from lines such as `state: a excludes b`."""
    names = {"state": labels.states, "object": labels.objects}
    tables = {kind: RuleTables.empty(len(known)) for kind, known in names.items()}
    for line in lines:
        match = LINE.fullmatch(line)
        assert match is not None
        kind, a, verb, b = match.groups()
        known = names[kind]
        where = f"{kind} in the rule {line!r}:"
        i = known.index(require(a, known, where))
        j = known.index(require(b, known, where))
        if i == j:
            raise UsageError(f"rule {line!r} relates the {kind} {a!r} to itself; {FORM}, with different names")
        getattr(tables[kind], verb)[i, j] = 1.0
        if verb == "excludes":
            tables[kind].excludes[j, i] = 1.0
    return tables["state"], tables["object"]


def exclusion_rules(labels: LabelSpace) -> tuple[RuleTables, RuleTables]:
    """Rules for states, then objects: two states seen with one object exclude each other."""
    seen = torch.as_tensor(labels.seen).reshape(len(labels.states), len(labels.objects)).float()
    rules = []
    for table in (seen, seen.T):
        common = ((table @ table.T) > 0).float()
        common.fill_diagonal_(0)
        rules.append(RuleTables(common, torch.zeros_like(common)))
    return rules[0], rules[1]


@dataclass(frozen=True)
class LogicOptions(ThreePathOptions):
    rules_weight: NonNegative = 1.0  # weight of both losses by rules; 0: the three paths alone
    rules_written: tuple[str, ...] = ()  # as `state: ripe excludes unripe`; empty: from labels

    def rules(self) -> Iterable[tuple[object, str]]:
        yield from super().rules()
        for line in self.rules_written:
            yield refuse(not LINE.fullmatch(line), f"rules_written: {line!r} is no rule; {FORM}")


class LogicZsl(ThreePaths[LogicOptions]):
    """LOGICZSL: prompts on three paths, trained so that posteriors obey logical rules."""

    excludes_s: Tensor
    implies_s: Tensor
    excludes_o: Tensor
    implies_o: Tensor

    def __init__(self, context: MethodContext, options: LogicOptions) -> None:
        super().__init__(context, options)
        written = options.rules_written
        labels = context.labels
        states, objects = parse_rules(written, labels) if written else exclusion_rules(labels)
        for name, rules in (("s", states), ("o", objects)):
            self.register_buffer(f"excludes_{name}", rules.excludes, persistent=False)
            self.register_buffer(f"implies_{name}", rules.implies, persistent=False)

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        z, factors, losses = self.path_losses(batch, shared)
        weight = self.options.rules_weight
        if not weight:
            return losses
        p_c = self.paths.logits(z, shared.compositions).softmax(-1)  # [B, C]
        p_s, p_o = factors.log_s.exp(), factors.log_o.exp()
        m = self.train_candidates.states
        n = self.train_candidates.objects
        q_s = torch.zeros_like(p_s).index_add(1, m, p_c)
        q_o = torch.zeros_like(p_o).index_add(1, n, p_c)
        c_s, c_o = p_s[:, m], p_o[:, n]  # [B, C], p(s) and p(o) of every composition
        composed = p_c * (2 - c_s - c_o) + c_s * c_o * (1 - p_c)
        related = violation(p_s, q_s, self.excludes_s, self.implies_s)
        related = related + violation(p_o, q_o, self.excludes_o, self.implies_o)
        return {
            **losses,
            "composition_rules": weight * composed.sum(1).mean(),
            "primitive_rules": weight * related.mean(),
        }


def violation(p: Tensor, q: Tensor, excludes: Tensor, implies: Tensor) -> Tensor:
    """How much probabilities `p` (left of rules) and `q` (right) [B, N] break the rules [B]."""
    return ((p @ excludes) * q).sum(1) + ((p @ implies) * (1 - q)).sum(1)
