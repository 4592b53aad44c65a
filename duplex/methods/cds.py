"""CDS-CZSL (Li et al., "Context-based and Diversity-driven Specificity in Compositional Zero-Shot Learning", CVPR
2024).

A state that few objects can have is more specific than one that many can have: *sliced* strawberry is more informative
than *red* strawberry. By diversity, the specificity of a state s among N objects is

    d(s) = 1 - log(1 + |O_s|) / log(1 + N),    O_s: the objects seen with s

By context, the specificity of a state on an object is `g(s, o) = sigmoid(l(s, o))`, `l = MLP([t_s; t_o])`, from the
text features t of both. It is trained to rank: of two states seen with the same object, that with the larger d has the
larger g,

    L_spec = mean over (s, s', o), d(s) > d(s'), of  softplus(-(l(s, o) - l(s', o)))

Scores are those of three paths (prompts of compositions, states and objects), except that specific compositions weigh
more: `S = p(c|x) + p(s|x) p(o|x) (1 + w g(s, o))`. The paper's learner also clusters batches and removes noise from
states, and it filters open-world compositions. This version does none of that: infeasible compositions are excluded by
the evaluation's threshold, as for every method.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from duplex.labels import LabelSpace
from duplex.layers.composition_index import CompositionIndex
from duplex.layers.factors import Mlp
from duplex.layers.prompt_paths import Prototypes
from duplex.methods.base import Batch, MethodContext
from duplex.methods.three_paths import ThreePathOptions, ThreePaths
from duplex.options import Count, NonNegative


@dataclass(frozen=True)
class CdsOptions(ThreePathOptions):
    specificity: NonNegative = 0.5  # weight w of g in the score; 0: the three paths alone
    context_width: Count = 256  # hidden units of the MLP


class Cds(ThreePaths[CdsOptions]):
    """CDS-CZSL: prompts of compositions, states and objects, where the score's term `p(s|x) p(o|x)` is larger the more
    specific a state is to its object."""

    more_specific: Tensor
    less_specific: Tensor

    def __init__(self, context: MethodContext, options: CdsOptions) -> None:
        super().__init__(context, options)
        self.ranker = Mlp(2 * context.dim, options.context_width, 1, 1, 0.0) if options.specificity else None
        more, less = specificity_pairs(context.labels)
        self.register_buffer("more_specific", more, persistent=False)
        self.register_buffer("less_specific", less, persistent=False)

    def specificity_logits(self, t: Prototypes, candidates: CompositionIndex) -> Tensor:
        """Return a logit per candidate composition [C]: the larger, the more specific its state is to its object.

        t: text features of states and objects, which get no gradients.
        """
        assert self.ranker is not None
        states, objects = t.states.detach(), t.objects.detach()
        both = [states.index_select(0, candidates.states), objects.index_select(0, candidates.objects)]
        logits: Tensor = self.ranker(torch.cat(both, dim=-1))[:, 0]
        return logits

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        _, _, losses = self.path_losses(batch, shared)
        if self.ranker is not None:
            logits = self.specificity_logits(shared, self.train_candidates)
            terms = softplus(logits[self.less_specific] - logits[self.more_specific])
            losses["specificity"] = terms.sum() / max(len(terms), 1)
        return losses

    def terms(self, z: Tensor, t: Prototypes, candidates: CompositionIndex) -> Iterator[Tensor]:
        semantic, factors = super().terms(z, t, candidates)
        yield semantic
        if self.ranker is None:
            yield factors
        else:
            yield factors * (1 + self.options.specificity * self.specificity_logits(t, candidates).sigmoid())


def diversity(labels: LabelSpace) -> Tensor:
    """Return each state's specificity [M]: the larger, the fewer objects the state has in the training pairs."""
    seen = torch.as_tensor(labels.state_of(labels.pairs["train"]))
    counts = seen.bincount(minlength=len(labels.states)).to(torch.float64)
    return 1 - (1 + counts).log() / torch.tensor(1.0 + len(labels.objects), dtype=torch.float64).log()


def specificity_pairs(labels: LabelSpace) -> tuple[Tensor, Tensor]:
    """Return all R pairs of seen compositions that have the same object, but states of different specificity.

    The result is two index tensors into `labels.pairs["train"]`: the more specific [R] and the less specific [R]. A
    loss ranks the first above the second.
    """
    seen = torch.as_tensor(labels.pairs["train"])
    n = len(labels.objects)
    d = diversity(labels)[seen // n]
    pairs = ((seen[:, None] % n == seen % n) & (d[:, None] > d)).nonzero()
    return pairs[:, 0], pairs[:, 1]
