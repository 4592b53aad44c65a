"""SAM: each prompt is compared with its nearest image token; a query and a memory join the tokens.

Zhang et al., "Bridging the Modality Gap in Compositional Zero-Shot Learning via Sparse Alignment
and Unimodal Memory Bank", CVPR 2026. Its formulas were read in notes by others, not in the paper.

    l(c) = max_v v.t_c / tau,   p = softmax l                           likewise for states, objects
    u = norm(B_N(... B_1(q, V) ..., V)),   p_u(c) = softmax u.t_c / tau         likewise
    L = CE(p) + (1 - alpha) CE(p_u) + alpha KL(p_u | p)                 summed over the three kinds
    p_m(c) = softmax u.r_c / tau,   r_c = sum_k a_k b_ck,   a = softmax u.b_c / 0.1
    S(c) = beta P(c) + (1 - beta) (P_u(c) + gamma p_m(c)),   P(c) = p(c) + p(s) p(o)

* V: unit features of an image, CLS and mapped patch tokens;  t: prompts;  tau: CLIP's temperature
* q: learned query;  B: blocks of cross-attention and MLP, at first B(x, y) = x
* b_ck: memory of c. Of training images with largest p_u at c, it has u of the K of least entropy;
  free places of c, and all of an unseen c, hold t_c

Not said in the notes: alpha, beta, gamma, K, N, and that no gradient of KL reaches p. The paper
trains low-rank updates of the image encoder; here, a linear map and an adapter change its tokens.
The paper fills the memory batch by batch, and with test images, too; here, it is filled anew after
each epoch, so that the same weights compute all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from duplex.methods.base import Batch, Inputs, MethodContext
from duplex.methods.families import CrossBlock, TextMethod, TextOptions, score_in_chunks
from duplex.methods.layers import Adapter, CompositionIndex, unit
from duplex.methods.prompts import TEMPLATE, Prompts, Prototypes
from duplex.options import Count, NonNegative, Positive, Rate, Share, Template

IMAGES = 256  # of which the memory's features are computed at once


@dataclass(frozen=True)
class SamOptions(TextOptions):
    blocks: Count = 2  # blocks N of the query
    heads: Count = 4  # heads of their attention
    distil: Share = 0.5  # weight alpha of KL
    aligned: Share = 0.5  # weight beta of the tokens' probabilities
    remembered: NonNegative = 1.0  # weight gamma of the memory
    stored: Count = 4  # features K of a composition
    sharpness: Positive = 0.1  # temperature of a
    dropout: Rate = 0.1  # inside the tokens' adapter
    template: Template = TEMPLATE  # words whose tokens initialise the three learned contexts


class Sam(TextMethod[SamOptions]):
    """SAM: prompts compared with nearest patch tokens, a feature of all tokens, and a memory."""

    required_inputs: ClassVar[tuple[str, ...]] = ("cls", "patch", "text")
    memory: Tensor  # b [C, K, d] of the training compositions
    filled: Tensor  # whether there is a feature [C, K]

    def __init__(self, context: MethodContext, options: SamOptions) -> None:
        super().__init__(context, options)
        dim = context.dim
        shape = (len(self.train_candidates.compositions), options.stored)
        learned: Any = {"context": "learned", "vocabulary": "learned", "template": options.template}
        self.prompts = Prompts(context.labels, context.tower, **learned)
        self.project = nn.Linear(context.inputs["patch"][1], dim)
        self.adapter = Adapter(dim, 64, options.dropout, 0.1)
        self.query = nn.Parameter(torch.randn(dim) / dim**0.5)
        self.blocks = nn.ModuleList(CrossBlock(dim, dim, options.heads) for _ in range(options.blocks))
        self.register_buffer("memory", torch.zeros(*shape, dim))
        self.register_buffer("filled", torch.zeros(shape, dtype=torch.bool))

    def tokens(self, inputs: Inputs) -> Tensor:
        """Unit features of each image's CLS token and patches [B, T + 1, d]."""
        cls = unit(inputs["cls"])
        patches = unit(self.project(inputs["patch"].to(cls.dtype)))
        return unit(self.adapter(torch.cat([cls[:, None], patches], 1)))

    def condensed(self, tokens: Tensor) -> Tensor:
        """Unit feature [B, d] that the learned query reads from each image's tokens."""
        u = self.query.expand(len(tokens), 1, -1)
        for block in self.blocks:
            u, _ = block(u, tokens)
        return unit(u[:, 0])

    def both_logits(self, tokens: Tensor, u: Tensor, t: Prototypes) -> tuple[list[Tensor], list[Tensor]]:
        """Logits of pairs, states, objects: by the nearest token, and by the query's feature."""
        return [self.scale * (tokens @ rows.T).amax(1) for rows in t], [self.scale * u @ rows.T for rows in t]

    def shared(self) -> Prototypes:
        return Prototypes(*self.prompts(self.labels.pairs["train"], self.checkpointing))

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        tokens = self.tokens(batch.inputs)
        alpha = self.options.distil
        aligned, read = self.both_logits(tokens, self.condensed(tokens), shared)
        names = ("semantic_query", "state_query", "object_query")
        by_query = self.three_path_losses(read, batch.compositions, names)
        divergence = [
            kl_div(p.detach().log_softmax(-1), q.log_softmax(-1), reduction="batchmean", log_target=True)
            for p, q in zip(aligned, read, strict=True)
        ]
        losses = self.three_path_losses(aligned, batch.compositions)
        losses |= {name: (1 - alpha) * loss for name, loss in by_query.items()}
        return losses | {"distil": alpha * torch.stack(divergence).sum()}

    @torch.no_grad()
    def on_features_changed(self, train: Batch) -> None:
        t = self.prompts.encode(self.labels.pairs["train"]).compositions
        parts = []
        for rows in torch.arange(len(train)).split(IMAGES):
            u = self.condensed(self.tokens(train[rows].inputs))
            log_p = (self.scale * u @ t.T).log_softmax(-1)
            parts.append((u, log_p.argmax(-1, keepdim=True), -(log_p.exp() * log_p).sum(-1, keepdim=True)))
        u, largest, entropy = map(torch.cat, zip(*parts, strict=True))
        at_largest = u.new_full((len(u), len(t)), torch.inf).scatter(1, largest, entropy)
        count = min(self.options.stored, len(u))
        lowest, images = at_largest.topk(count, dim=0, largest=False)
        self.memory[:, :count] = u[images.T]
        self.filled[:, :count] = lowest.T.isfinite()

    def memory_logits(self, u: Tensor, t: Tensor, candidates: CompositionIndex) -> Tensor:
        """Logits [B, C] of `u` [B, d] by memory; free places hold candidates' texts `t` [C, d]."""
        by_text = u @ t.T
        own = torch.isin(candidates.compositions, self.train_candidates.compositions).nonzero()[:, 0]
        rows = self.train_candidates.positions_of_listed(candidates.compositions[own])
        cosines = torch.einsum("bd,ckd->bck", u, self.memory[rows].to(u.dtype))
        cosines = torch.where(self.filled[rows], cosines, by_text[:, own, None])
        read = ((cosines / self.options.sharpness).softmax(-1) * cosines).sum(-1)
        return self.scale * by_text.index_copy(1, own, read)

    def prepare(self, candidates: CompositionIndex) -> Prototypes:
        return self.prompts.encode(candidates.compositions_np)

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Prototypes) -> Tensor:
        beta = self.options.aligned
        gamma = self.options.remembered

        def chunk_scores(cls: Tensor, patches: Tensor) -> Tensor:
            tokens = self.tokens({"cls": cls, "patch": patches})
            u = self.condensed(tokens)
            total = (1 - beta) * gamma * self.memory_logits(u, prepared.compositions, candidates).softmax(-1)
            for weight, (c, s, o) in zip((beta, 1 - beta), self.both_logits(tokens, u, prepared), strict=True):
                primitives = s.softmax(-1)[:, candidates.states] * o.softmax(-1)[:, candidates.objects]
                total = total + weight * (self.scored(c) + primitives)
            return total

        patches, _ = self.context.inputs["patch"]
        width = (patches + 1) * (sum(map(len, prepared)) + 6 * self.context.dim)
        return score_in_chunks(chunk_scores, inputs["cls"], inputs["patch"], width)
