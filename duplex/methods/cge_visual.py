"""CGE with Duplex's visual prototypes, which needs no text tower: "+ Visual Proto" in the Duplex paper's table of
ResNet-18 features (Peng et al.).

CGE (`duplex.methods.cge`) keeps its loss L_CGE and its posterior p(c^t|x) of a composition. Added are Duplex's codebook
of visual prototypes, with the posterior p(c^h|x) and the loss L_c^h, and the local graph that refines them (the Duplex
paper's Eq. 10-18). As there are no prompts, posteriors of states and objects come from an image's state factor z^s and
object factor z^o (outputs of two small networks), compared with embedded words w at a temperature T:
`p(s|x) ~ exp(cos(z^s, V_s w_s) / T)`, likewise p(o|x). The loss is `L = L_CGE + L_s + L_o + L_c^h`, the score is
`p(c^t|x) + p(c^h|x) + p(s|x) p(o|x)`. `graph: false` leaves the prototypes at mean features of training images, and
drops L_c^h.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from duplex.labels import CandidateSet
from duplex.layers.codebook import Codebook, Logits
from duplex.layers.composition_index import CompositionIndex, copy_to_device
from duplex.layers.factors import Factors, Fusion, unit
from duplex.layers.graph import FactorNodes, Message, RefinedPrototypes, refine
from duplex.methods.base import Batch, Inputs, MethodContext
from duplex.methods.cge import CgeOptions, GraphHead
from duplex.options import Count, Positive, Share

MESSAGES: tuple[Message, ...] = ("state", "object", "counterfactual")


@dataclass(frozen=True)
class CgeVisualOptions(CgeOptions):
    graph: bool = True  # whether the local graph refines visual prototypes
    momentum: Share = 0.9  # lambda, the weight of a prototype's old value per refinement
    scale: Positive = 20.0  # 1 / T of cosines with prototypes and words
    factor_width: Count = 768  # hidden units of each disentangler


class CgeVisual(GraphHead[CgeVisualOptions]):
    """CGE with visual prototypes and state and object factors: the score `p(c^t|x) + p(c^h|x) + p(s|x) p(o|x)` adds the
    posteriors by CGE's embeddings, by visual prototypes, and by factors."""

    def __init__(self, context: MethodContext, options: CgeVisualOptions) -> None:
        super().__init__(context, options)
        labels, dim = context.labels, context.dim
        self.codebook = Codebook(labels, dim, unseen="compose", random_seen=False)
        self.factors = Factors(dim, options.factor_width, residual=False)
        self.fusion = Fusion(dim) if options.graph else None
        self.embed_s, self.embed_o = (nn.Linear(self.words.width, dim) for _ in range(2))
        self.target = CandidateSet.of(labels, context.world, "train")
        self._pending: RefinedPrototypes | None = None  # prototypes refined by `losses`, written by `after_batch`

    def start(self, train: Batch) -> None:
        self.codebook.start(unit(train.cls), train.compositions, seen=True)

    def posteriors(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return images' state factors and object factors [B, d], log p(s|x) [B, M] over all states, and log p(o|x)
        [B, N] over all objects.

        z: unit features of the images [B, d].
        """
        z_s, z_o = self.factors(z)
        t_s, t_o = unit(self.embed_s(self.words.states)), unit(self.embed_o(self.words.objects))
        log_s, log_o = ((self.options.scale * f @ t.T).log_softmax(-1) for f, t in ((z_s, t_s), (z_o, t_o)))
        return z_s, z_o, log_s, log_o

    def losses(self, batch: Batch, shared: tuple[Tensor]) -> dict[str, Tensor]:
        z, scale = unit(batch.cls), self.options.scale
        m, n = self.primitives(batch.compositions)
        z_s, z_o, log_s, log_o = self.posteriors(z)
        losses = {**super().losses(batch, shared), "state": nll_loss(log_s, m), "object": nll_loss(log_o, n)}
        if self.fusion is not None:
            nodes = FactorNodes(z, z_s, z_o, log_s.exp(), log_o.exp(), m, n)
            own, momentum = batch.compositions_np, self.options.momentum
            self._pending = refine(nodes, own, self.target, self.codebook, self.fusion, MESSAGES, momentum)
            positions = (self.target.positions(listed) for listed in (own, self._pending.compositions))
            target, refined = copy_to_device(z.device, *positions)
            logits = self.codebook.logits_over(self.target.listed)(z, scale)
            logits = logits.index_copy(1, refined, scale * z @ self._pending.rows.T)
            losses["visual"] = cross_entropy(logits, target)
        return losses

    def after_batch(self) -> None:
        if self._pending is not None:
            self.codebook.write_back(*self._pending)
            self._pending = None

    def shared(self) -> tuple[Tensor]:
        return (super().prepare(self.train_candidates),)

    def prepare(self, candidates: CompositionIndex) -> tuple[Tensor, Logits]:
        return super().prepare(candidates), self.codebook.logits_over(candidates.compositions_np)

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: tuple[Tensor, Logits]) -> Tensor:
        z, (embeddings, visual) = unit(inputs["cls"]), prepared
        _, _, log_s, log_o = self.posteriors(z)
        factors = (log_s[:, candidates.states] + log_o[:, candidates.objects]).exp()
        semantic = super().score(inputs, candidates, embeddings)
        return semantic.softmax(-1) + visual(z, self.options.scale).softmax(-1) + factors
