"""VP-CMJL: three paths with attention to text, joined with *visual proxies*, trained vectors.

Zhang et al., "Learning Visual Proxy for Compositional Zero-Shot Learning", ICCV 2025.

    z_t^s, a^s = B_s(z, t_s),    l_t(s) = (cos(z_t^s, t_s) + a^s) / tau,    l_t(c) = cos(z, t_c) / tau
    l_v(s) = cos(z^s, w_s) / tau,    w_c = A w_s + B w_o
    L = sum over c, s, o of [CE(l_t) + CE(l_v)]  +  KL(p_t(c|x) | p_v(c|x))
    S = p(c|x) + p(s|x) p(o|x),    p: softmax of (1 - b) l_t + b l_v

* z: CLS feature;  t: text features of the prompts;  tau: CLIP's temperature;  objects are treated like states
* B_s: block of cross-attention; z_t^s is the image's state factor, a^s its attention to each state
* w: visual proxies of states and objects, initialised with text features;  z^s: output of a small network
* A, B: matrices, initialised with identities, that compose proxies of all compositions, even unseen ones
* KL: draws p_v, the posterior by l_v, to p_t, the posterior by l_t;  b: option `blend`

Blocks start as the identity. With `form: published`, they start at random and have QuickGELU, `w_c =
A [w_s; w_o] + a` with A and a random, and blocks and disentanglers read z before it is scaled to unit
length, as in the code. There, the proxies' text features are of the bare words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from duplex.methods.base import Batch, MethodContext
from duplex.methods.families import CrossBlock, Form, ThreePathOptions, ThreePaths, new_words
from duplex.methods.layers import CompositionIndex, unit
from duplex.methods.prompts import Prototypes, encode_words
from duplex.options import Count, NonNegative, Share


@dataclass(frozen=True)
class VpCmjlOptions(ThreePathOptions):
    blend: Share = 0.3  # weight b of the proxies' logits
    text: NonNegative | None = None  # weight of the text's logits; null: 1 - b
    heads: Count = 4  # heads of the cross-attention
    form: Form = "plain"  # published: start, activation and inputs of the published code


PROXY_LOSSES = ("composition_proxy", "state_proxy", "object_proxy")
Logits = tuple[Tensor, Tensor, Tensor]  # of compositions [B, C], states [B, M] and objects [B, N]


class VpCmjl(ThreePaths[VpCmjlOptions]):
    """VP-CMJL: prompts on three paths, and visual proxies of compositions, states and objects."""

    def __init__(self, context: MethodContext, options: VpCmjlOptions) -> None:
        super().__init__(context, options)
        dim = context.dim
        states, objects = encode_words(context.labels, context.tower)
        self.states = nn.Parameter(states.to(torch.float32, copy=True))  # [M, d]
        self.objects = nn.Parameter(objects.to(torch.float32, copy=True))  # [N, d]
        self.fixed_rows = new_words(context.labels)
        self.is_published = options.form == "published"
        if self.is_published:
            self.join = nn.Linear(2 * dim, dim)
        else:
            self.from_state = nn.Parameter(torch.eye(dim))
            self.from_object = nn.Parameter(torch.eye(dim))
        self.read_s = CrossBlock(dim, dim, options.heads, options.form)
        self.read_o = CrossBlock(dim, dim, options.heads, options.form)

    def features(self, cls: Tensor) -> tuple[Tensor, Tensor]:
        """Unit features [B, d], and the features that blocks and disentanglers read."""
        z = self.paths.adapt(cls)
        return z, self.unscaled(cls, z) if self.is_published else z

    def text_logits(self, z: Tensor, x: Tensor, t: Prototypes) -> Logits:
        """Logits of compositions, states and objects by prompts, for `features` z and x [B, d]."""
        z_s, a_s = self.read_s(x, t.states)
        z_o, a_o = self.read_o(x, t.objects)
        s = self.paths.logits(unit(z_s), t.states) + self.paths.scale * a_s
        o = self.paths.logits(unit(z_o), t.objects) + self.paths.scale * a_o
        return self.paths.logits(z, t.compositions), s, o

    def composed_proxies(self, candidates: CompositionIndex) -> Tensor:
        if self.is_published:
            states = self.states.index_select(0, candidates.states)
            objects = self.objects.index_select(0, candidates.objects)
            return unit(self.join(torch.cat([states, objects], dim=-1)))
        states = (self.states @ self.from_state.T).index_select(0, candidates.states)
        objects = (self.objects @ self.from_object.T).index_select(0, candidates.objects)
        return unit(states + objects)

    def visual_logits(self, z: Tensor, x: Tensor, candidates: CompositionIndex) -> Logits:
        """Logits of compositions [B, C], states [B, M] and objects [B, N] by visual proxies."""
        assert self.paths.factors is not None
        z_s, z_o = self.paths.factors(x)
        w_c = self.composed_proxies(candidates)
        logits = self.paths.logits
        return logits(z, w_c), logits(z_s, unit(self.states)), logits(z_o, unit(self.objects))

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        z, x = self.features(batch.cls)
        text = self.text_logits(z, x, shared)
        visual = self.visual_logits(z, x, self.train_candidates)
        log_v = visual[0].log_softmax(-1)
        log_t = text[0].log_softmax(-1)
        joint = kl_div(log_v, log_t, reduction="batchmean", log_target=True)
        weight = self.options.primitives
        losses = self.three_path_losses(text, batch.compositions, primitives=weight)
        losses |= self.three_path_losses(visual, batch.compositions, PROXY_LOSSES, weight)
        return losses | {"joint": joint}

    def image_logits(self, cls: Tensor, t: Prototypes, candidates: CompositionIndex) -> Sequence[Tensor]:
        z, x = self.features(cls)
        b = self.options.blend
        a = 1 - b if self.options.text is None else self.options.text
        paths = zip(self.text_logits(z, x, t), self.visual_logits(z, x, candidates), strict=True)
        return [a * text + b * visual for text, visual in paths]
