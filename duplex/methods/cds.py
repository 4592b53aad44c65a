"""CDS-CZSL: compositions score higher if their state is specific to the object.

Li et al., "Context-based and Diversity-driven Specificity in Compositional Zero-Shot Learning",
CVPR 2024.

    d(s) = 1 - log(1 + |O_s|) / log(1 + N)                                  specificity by diversity
    g(s, o) = sigmoid(l(s, o)),   l = MLP([t_s; t_o])                       specificity by context
    L_spec = mean over (s, s', o), d(s) > d(s'), of  softplus(-(l(s, o) - l(s', o)))
    S = p(c|x) + p(s|x) p(o|x) (1 + w g(s, o))

* O_s: the objects, of all N, seen with state s: if they are few, s is specific (*sliced* more than
  *red*)
* t_s, t_o: text features of state and object
* p(c|x), p(s|x), p(o|x): posteriors by prompts of compositions, states and objects (three paths)
* L_spec ranks two states seen with the same object; it is added to the cross-entropies of the
  three paths

The paper's learner also clusters batches, removes noise from states, and filters open-world
compositions. This version does none of that; as for every method, the evaluation's threshold
excludes infeasible compositions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from duplex.labels import LabelSpace
from duplex.methods.base import Batch, MethodContext
from duplex.methods.families import ThreePathOptions, ThreePaths
from duplex.methods.layers import CompositionIndex, Mlp
from duplex.methods.prompts import Prototypes
from duplex.options import Count, NonNegative


@dataclass(frozen=True)
class CdsOptions(ThreePathOptions):
    specificity: NonNegative = 0.5  # weight w of g in the score; 0: the three paths alone
    context_width: Count = 256  # hidden units of the MLP


class Cds(ThreePaths[CdsOptions]):
    """CDS-CZSL: three paths, whose scores are raised for states specific to the object."""

    more_specific: Tensor
    less_specific: Tensor

    def __init__(self, context: MethodContext, options: CdsOptions) -> None:
        super().__init__(context, options)
        self.ranker = Mlp(2 * context.dim, options.context_width, 1, 1, 0.0) if options.specificity else None
        more, less = specificity_pairs(context.labels)
        self.register_buffer("more_specific", more, persistent=False)
        self.register_buffer("less_specific", less, persistent=False)

    def specificity_logits(self, t: Prototypes, candidates: CompositionIndex) -> Tensor:
        """Logits [C]: how specific candidates' states are to objects; no gradients to `t`."""
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

    def primitive_score(self, p_s: Tensor, p_o: Tensor, t: Prototypes, candidates: CompositionIndex) -> Tensor:
        joined = super().primitive_score(p_s, p_o, t, candidates)
        if self.ranker is None:
            return joined
        return joined * (1 + self.options.specificity * self.specificity_logits(t, candidates).sigmoid())


def state_specificity(labels: LabelSpace) -> Tensor:
    """Specificity d(s) of each state [M]: 1 if seen with no object, 0 with all objects."""
    seen = torch.as_tensor(labels.state_of(labels.pairs["train"]))
    counts = seen.bincount(minlength=len(labels.states)).to(torch.float64)
    return 1 - (1 + counts).log() / torch.tensor(1.0 + len(labels.objects), dtype=torch.float64).log()


def specificity_pairs(labels: LabelSpace) -> tuple[Tensor, Tensor]:
    """Seen pairs with the same object: [R] with the more specific state, [R] others."""
    seen = torch.as_tensor(labels.pairs["train"])
    n = len(labels.objects)
    d = state_specificity(labels)[seen // n]
    ranked = ((seen[:, None] % n == seen % n) & (d[:, None] > d)).nonzero()
    return ranked[:, 0], ranked[:, 1]
