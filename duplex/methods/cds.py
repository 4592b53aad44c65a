"""CDS-CZSL (Li et al., "Context-based and Diversity-driven Specificity in Compositional Zero-Shot Learning", CVPR
2024), over cached features.

A state that few objects can be in says more than one that many can: *sliced* strawberry rather than *red* strawberry.
By diversity, the specificity of a state is

    d(s) = 1 - log(1 + |O_s|) / log(1 + N),    O_s: the objects seen with s

By context, `g(s, o) = sigmoid(MLP([t_s; t_o]))` says it for a state in an object. It learns an order: of two states
seen with one object, the one with the larger d has the larger g,

    L_spec = mean over (s, s', o), d(s) > d(s'), of  softplus(-(l(s, o) - l(s', o))),    g = sigmoid(l)

Three paths score, and specific compositions weigh more: `S = p(c|x) + p(s|x) p(o|x) (1 + w g(s, o))`. The paper's
learner also clusters batches and cleans states of noise; those parts, and its filter of open-world compositions, are
not in this version: infeasible compositions fall to the evaluation's threshold as for every method.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from duplex.labels import LabelSpace
from duplex.layers.composition_index import Columns, Mlp
from duplex.layers.prompt_paths import Prototypes
from duplex.methods.base import Batch, Setting
from duplex.methods.three_paths import ThreePathOptions, ThreePaths


@dataclass(frozen=True)
class CdsOptions(ThreePathOptions):
    specificity: float = 0.5  # w; 0 leaves the three paths
    context_width: int = 256  # hidden units of the MLP

    def rules(self) -> Iterable[tuple[object, str]]:
        yield from super().rules()
        yield self.specificity >= 0, f"specificity is {self.specificity}; it is at least 0"
        yield self.context_width > 0, f"context_width is {self.context_width}; it is positive"


class Cds(ThreePaths[CdsOptions]):
    Options = CdsOptions
    better: Tensor
    worse: Tensor

    def __init__(self, setting: Setting, options: CdsOptions) -> None:
        super().__init__(setting, options)
        self.context = Mlp(2 * setting.dim, options.context_width, 1, 1, 0.0) if options.specificity else None
        better, worse = ordered(setting.labels)
        self.register_buffer("better", better, persistent=False)
        self.register_buffer("worse", worse, persistent=False)

    def told(self, t: Prototypes, columns: Columns) -> Tensor:
        """`l(s, o)` of compositions [C]; semantic prototypes are as they are, not moved by it."""
        assert self.context is not None
        states, objects = (rows.detach() for rows in (t.states, t.objects))
        both = [states.index_select(0, columns.states), objects.index_select(0, columns.objects)]
        found: Tensor = self.context(torch.cat(both, dim=-1))[:, 0]
        return found

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        losses = self.seen(batch, shared).losses
        if self.context is not None:
            told = self.told(shared, self.columns)
            terms = softplus(told[self.worse] - told[self.better])
            losses["spec"] = terms.sum() / max(len(terms), 1)
        return losses

    def terms(self, z: Tensor, t: Prototypes, columns: Columns) -> Iterator[Tensor]:
        whole, pairs = super().terms(z, t, columns)
        yield whole
        if self.context is None:
            yield pairs
        else:
            yield pairs * (1 + self.options.specificity * self.told(t, columns).sigmoid())


def diversity(labels: LabelSpace) -> Tensor:
    """`d(s)` [M]"""
    seen = torch.as_tensor(labels.state_of(labels.pairs["train"]))
    counts = seen.bincount(minlength=len(labels.states)).to(torch.float64)
    return 1 - (1 + counts).log() / torch.tensor(1.0 + len(labels.objects), dtype=torch.float64).log()


def ordered(labels: LabelSpace) -> tuple[Tensor, Tensor]:
    """Places among the seen compositions of every two with one object, the more specific state first [R], [R]."""
    pairs = torch.as_tensor(labels.pairs["train"])
    n = len(labels.objects)
    d = diversity(labels)[pairs // n]
    rows = ((pairs[:, None] % n == pairs % n) & (d[:, None] > d)).nonzero()
    return rows[:, 0], rows[:, 1]
