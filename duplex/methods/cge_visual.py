"""CGE with visual prototypes: the form of the paper's generality table over ResNet-18 (Peng et al., "+ Visual Proto"),
for features without a text tower.

CGE (`duplex.methods.cge`) keeps its loss and its posterior p(c^t|x). Beside it stands Duplex's codebook of visual
prototypes with its local graph (Eq. 10-18), whose posteriors of states and objects come from disentangled factors and
embedded words, as there is no prompt: `p(s|x) ~ exp(cos(z^s, V_s w_s) / T)`, and `L = L_CGE + L_s + L_o + L_c^h`. The
score is `p(c^t|x) + p(c^h|x) + p(s|x) p(o|x)`. `graph: false` keeps the codebook as data
made it, which leaves no L_c^h.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from duplex.labels import Ints, Target
from duplex.layers.codebook import Codebook
from duplex.layers.composition_index import Columns
from duplex.layers.factors import Factors, Fusion, unit
from duplex.layers.graph import Candidates, Message, Nodes, aggregate, blend
from duplex.layers.indices import send
from duplex.methods.base import Batch, Inputs, Scorer, Setting
from duplex.methods.cge import CgeOptions, GraphHead
from duplex.methods.head import Pairs

MESSAGES: tuple[Message, ...] = ("state", "object", "counterfactual")


@dataclass(frozen=True)
class CgeVisualOptions(CgeOptions):
    graph: bool = True
    momentum: float = 0.9  # lambda
    scale: float = 20.0  # 1 / T of cosines with prototypes and words
    factor_width: int = 768  # hidden units of each disentangler

    def rules(self) -> Iterable[tuple[object, str]]:
        yield from super().rules()
        yield 0 <= self.momentum <= 1, f"momentum is {self.momentum}; it lies in [0, 1]"
        yield self.scale > 0 and self.factor_width > 0, "scale and factor_width are positive"


class CgeVisual(GraphHead[CgeVisualOptions]):
    Options = CgeVisualOptions

    def __init__(self, setting: Setting, options: CgeVisualOptions) -> None:
        super().__init__(setting, options)
        labels, dim = setting.labels, setting.dim
        self.codebook = Codebook(labels, dim, unseen="compose", random_seen=False)
        self.factors = Factors(dim, options.factor_width, residual=False)
        self.fusion = Fusion(dim) if options.graph else None
        self.embed_s, self.embed_o = (nn.Linear(self.words.width, dim) for _ in range(2))
        self.target = Target.of(labels, setting.world, "train")
        self._refined: tuple[Ints, Tensor] | None = None

    def start(self, train: Batch) -> None:
        self.codebook.start(unit(train.z), train.compositions, seen=True)

    def posteriors(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """z^s, z^o and log-posteriors of states and objects."""
        z_s, z_o = self.factors(z)
        t_s, t_o = unit(self.embed_s(self.words.states)), unit(self.embed_o(self.words.objects))
        log_s, log_o = ((self.options.scale * f @ t.T).log_softmax(-1) for f, t in ((z_s, t_s), (z_o, t_o)))
        return z_s, z_o, log_s, log_o

    def losses(self, batch: Batch, shared: Pairs) -> dict[str, Tensor]:
        z, own, n = unit(batch.z), batch.compositions, len(self.labels.objects)
        z_s, z_o, log_s, log_o = self.posteriors(z)
        losses = {**super().losses(batch, shared), "s": nll_loss(log_s, own // n), "o": nll_loss(log_o, own % n)}
        if self.fusion is not None:
            nodes = Nodes(z, z_s, z_o, log_s.exp(), log_o.exp(), own // n, own % n)
            compositions, rows = self.refine(nodes, batch.labels)
            places = (self.target.places(listed) for listed in (batch.labels, compositions))
            own_place, refined_place = send(z.device, *places)
            logits = self.codebook.over(self.target.listed)(z, self.options.scale)
            logits = logits.index_copy(1, refined_place, self.options.scale * z @ rows.T)
            losses["ch"] = cross_entropy(logits, own_place)
            self._refined = compositions, rows
        return losses

    def refine(self, nodes: Nodes, own: Ints) -> tuple[Ints, Tensor]:
        """Candidates of a batch of these compositions and their refined rows (Algorithm 1)."""
        n = len(self.labels.objects)
        candidates = Candidates.of(own // n, own % n, self.target, n, nodes.z.device)
        aggregated, reached = aggregate(nodes, candidates, self.fusion, MESSAGES)
        rows = self.codebook.rows_of(candidates.compositions)
        blended = blend(rows, aggregated, self.options.momentum, renormalise=True)
        return candidates.compositions, torch.where(reached[:, None], blended, rows)

    def after_batch(self) -> None:
        if self._refined is not None:
            self.codebook.commit(*self._refined)
            self._refined = None

    @torch.no_grad()
    def scorer(self, columns: Ints) -> Scorer:
        semantic = super().scorer(columns)
        asked = Columns(columns, len(self.labels.objects)).to(self.codebook.mean_all.device)
        visual = self.codebook.over(columns)

        @torch.no_grad()
        def scores(inputs: Inputs) -> Tensor:
            z = unit(inputs["cls"])
            _, _, log_s, log_o = self.posteriors(z)
            pairs = (log_s[:, asked.states] + log_o[:, asked.objects]).exp()
            return semantic(inputs).softmax(-1) + visual(z, self.options.scale).softmax(-1) + pairs

        return scores
