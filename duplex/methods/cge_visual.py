"""CGE with Duplex's visual prototypes, which needs no text tower.

"+ Visual Proto" in the Duplex paper's table of ResNet-18 features (Peng et al.).

    p(s|x) = softmax_s cos(z^s, V_s w_s) / T,    p(o|x) = softmax_o cos(z^o, V_o w_o) / T
    L = L_CGE + L_s + L_o + L_c^h
    S = p(c^t|x) + p(c^h|x) + p(s|x) p(o|x)

* L_CGE, p(c^t|x): loss and posterior of CGE (duplex.methods.cge)
* L_c^h, p(c^h|x): loss and posterior by a codebook of visual prototypes, which a local graph refines (the
  Duplex paper's Eq. 10-18)
* z^s, z^o: state factor and object factor of an image, the outputs of two small networks
* w, V: word vectors and their linear maps, in place of prompts;  T: temperature

With `graph: false`, prototypes stay mean features of training images, and L_c^h is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from duplex.labels import CandidateSet
from duplex.methods.base import Batch, Inputs, MethodContext
from duplex.methods.cge import CgeOptions, GraphHead
from duplex.methods.codebook import Codebook, Logits
from duplex.methods.duplex import Message, MessageNodes, RefinedPrototypes, refine
from duplex.methods.layers import CompositionIndex, FactorNetworks, Fusion, copy_to_device, unit
from duplex.methods.portable import normalise_posterior_sums
from duplex.options import Count, Positive, Share

MESSAGES: tuple[Message, ...] = ("state", "object", "counterfactual")


@dataclass(frozen=True)
class CgeVisualOptions(CgeOptions):
    graph: bool = True  # whether the local graph refines visual prototypes
    momentum: Share = 0.9  # lambda, the weight of a prototype's old value per refinement
    scale: Positive = 20.0  # 1 / T of cosines with prototypes and words
    factor_width: Count = 768  # hidden units of each disentangler


class CgeVisual(GraphHead[CgeVisualOptions]):
    """CGE whose score also uses visual prototypes and an image's state and object factors."""

    def __init__(self, context: MethodContext, options: CgeVisualOptions) -> None:
        super().__init__(context, options)
        labels = context.labels
        dim = context.dim
        self.codebook = Codebook(labels, dim, unseen="compose", random_seen=False)
        self.factors = FactorNetworks(dim, options.factor_width)
        self.fusion = Fusion(dim) if options.graph else None
        self.embed_s = nn.Linear(self.words.width, dim)
        self.embed_o = nn.Linear(self.words.width, dim)
        self.candidates = CandidateSet.of(labels, context.world, "train")
        self._pending: RefinedPrototypes | None = None  # by `losses`, for `after_batch`

    def start(self, train: Batch) -> None:
        self.codebook.start(unit(train.cls), train.compositions, seen=True)

    def posteriors(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Factors [B, d] of unit features `z`; log probabilities of states, of objects."""
        z_s, z_o = self.factors(z)
        t_s = unit(self.embed_s(self.words.states))
        t_o = unit(self.embed_o(self.words.objects))
        log_s = (self.options.scale * z_s @ t_s.T).log_softmax(-1)
        log_o = (self.options.scale * z_o @ t_o.T).log_softmax(-1)
        return z_s, z_o, log_s, log_o

    def losses(self, batch: Batch, shared: tuple[Tensor]) -> dict[str, Tensor]:
        z = unit(batch.cls)
        scale = self.options.scale
        m, n = self.primitives(batch.compositions)
        z_s, z_o, log_s, log_o = self.posteriors(z)
        losses = {**super().losses(batch, shared), "state": nll_loss(log_s, m), "object": nll_loss(log_o, n)}
        if self.fusion is not None:
            nodes = MessageNodes(z, z_s, z_o, log_s.exp(), log_o.exp(), m, n)
            own = batch.compositions_np
            momentum = self.options.momentum
            self._pending = refine(nodes, own, self.candidates, self.codebook, self.fusion, MESSAGES, momentum)
            positions = self.candidates.positions
            target, refined = copy_to_device(z.device, positions(own), positions(self._pending.compositions))
            logits = self.codebook.logits_over(self.candidates.listed)(z, scale)
            logits = logits.index_copy(1, refined, scale * z @ self._pending.rows.T)
            losses["visual"] = cross_entropy(logits, target)
        return losses

    def after_batch(self) -> None:
        if self._pending is not None:
            self.codebook.write_back(self._pending.compositions, self._pending.rows)
            self._pending = None

    def shared(self) -> tuple[Tensor]:
        return (super().prepare(self.train_candidates),)

    def prepare(self, candidates: CompositionIndex) -> tuple[Tensor, Logits]:
        return super().prepare(candidates), self.codebook.logits_over(candidates.compositions_np)

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: tuple[Tensor, Logits]) -> Tensor:
        z = unit(inputs["cls"])
        embeddings, visual = prepared
        _, _, log_s, log_o = self.posteriors(z)
        factors = (log_s[:, candidates.states] + log_o[:, candidates.objects]).exp()
        semantic = super().score(inputs, candidates, embeddings)
        return semantic.softmax(-1) + visual(z, self.options.scale).softmax(-1) + factors

    def probabilities(self, scores: Tensor) -> Tensor:
        return normalise_posterior_sums(scores)
