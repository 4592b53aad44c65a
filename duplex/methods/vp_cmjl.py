"""VP-CMJL (Zhang et al., "Learning Visual Proxy for Compositional Zero-Shot Learning", ICCV 2025).

On the text side an image's CLS feature z attends to the text features t_s of the states' prompts by a block of
cross-attention B_s, which gives the image's state factor z_t^s and the attention a^s to each state, which is added to
the logits l_t; likewise for objects (tau: CLIP's temperature):

    z_t^s, a^s = B_s(z, t_s),    l_t(s) = (cos(z_t^s, t_s) + a^s) / tau,    l_t(c) = cos(z, t_c) / tau

*Visual proxies* w of states and objects are trained vectors in the images' space that start at the text features. They
are compared with an image's state factor z^s and object factor z^o, the outputs of two small networks:
`l_v(s) = cos(z^s, w_s) / tau`. A composition's proxy is composed of those of its state and its object,
`w_c = A w_s + B w_o`, where the matrices A and B start as identities, so that unseen compositions have one too.
Cross-modal joint learning draws the proxies' posterior p_v of compositions to the posterior p_t by text:

    L = sum over c, s, o of [CE(l_t) + CE(l_v)]  +  KL(p_t(c|x) | p_v(c|x))

The score is `p(c|x) + p(s|x) p(o|x)`, with posteriors by the blended logits `(1 - b) l_t + b l_v` (b: option `blend`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from duplex.layers.attention import CrossBlock
from duplex.layers.composition_index import CompositionIndex
from duplex.layers.factors import unit
from duplex.layers.prompt_paths import Prototypes, word_vectors
from duplex.methods.base import Batch, MethodContext
from duplex.methods.three_paths import ThreePathOptions, ThreePaths
from duplex.options import Count, Share


@dataclass(frozen=True)
class VpCmjlOptions(ThreePathOptions):
    proxies: bool = True  # whether there are visual proxies and attention; otherwise these are the three paths
    blend: Share = 0.3  # weight b of the proxies' logits
    heads: Count = 4  # heads of the cross-attention


Logits = tuple[Tensor, Tensor, Tensor]  # of compositions [B, C], states [B, M] and objects [B, N]


class VpCmjl(ThreePaths[VpCmjlOptions]):
    """VP-CMJL: images are compared with prompts of compositions, states and objects, and with trained vectors of these
    in the images' space (visual proxies)."""

    def __init__(self, context: MethodContext, options: VpCmjlOptions) -> None:
        super().__init__(context, options)
        if options.proxies:
            dim, heads = context.dim, options.heads
            states, objects = (rows.to(torch.float32) for rows in word_vectors(context.labels, context.tower))
            self.states, self.objects = nn.Parameter(states.clone()), nn.Parameter(objects.clone())  # [M, d], [N, d]
            self.from_state, self.from_object = (nn.Parameter(torch.eye(dim)) for _ in range(2))
            self.read_s, self.read_o = (CrossBlock(dim, dim, heads) for _ in range(2))

    def text_logits(self, z: Tensor, t: Prototypes) -> Logits:
        """Return composition, state and object logits [B, C], [B, M], [B, N] of images by prompts.

        z: image features after the adapter [B, d].
        t: text features of the prompts.
        """
        (z_s, a_s), (z_o, a_o) = self.read_s(z, t.states), self.read_o(z, t.objects)
        rows = ((unit(z_s), t.states, a_s), (unit(z_o), t.objects, a_o))
        s, o = (self.paths.logits(f, prototypes) + self.paths.scale * a for f, prototypes, a in rows)
        return self.paths.logits(z, t.compositions), s, o

    def visual_logits(self, z: Tensor, candidates: CompositionIndex) -> Logits:
        """Return composition, state and object logits [B, C], [B, M], [B, N] of images by trained vectors (proxies).

        z: image features after the adapter [B, d].
        """
        assert self.paths.factors is not None
        z_s, z_o = self.paths.factors(z)
        states, objects = self.states @ self.from_state.T, self.objects @ self.from_object.T
        w_c = unit(states.index_select(0, candidates.states) + objects.index_select(0, candidates.objects))
        rows = ((z, w_c), (z_s, unit(self.states)), (z_o, unit(self.objects)))
        c, s, o = (self.paths.logits(f, w) for f, w in rows)
        return c, s, o

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        if not self.options.proxies:
            return self.path_losses(batch, shared)[2]
        z = self.paths.adapt(batch.cls)
        text, visual = self.text_logits(z, shared), self.visual_logits(z, self.train_candidates)
        joint = visual[0].log_softmax(-1), text[0].log_softmax(-1)
        return {
            **self.cross_entropies(("semantic", "state", "object"), text, batch.compositions),
            **self.cross_entropies(("composition_proxy", "state_proxy", "object_proxy"), visual, batch.compositions),
            "joint": kl_div(*joint, reduction="batchmean", log_target=True),
        }

    def terms(self, z: Tensor, t: Prototypes, candidates: CompositionIndex) -> Iterator[Tensor]:
        if not self.options.proxies:
            yield from super().terms(z, t, candidates)
            return
        b, both = self.options.blend, zip(self.text_logits(z, t), self.visual_logits(z, candidates), strict=True)
        c, s, o = (((1 - b) * text + b * visual).softmax(-1) for text, visual in both)
        yield c
        yield s[:, candidates.states] * o[:, candidates.objects]
