"""VP-CMJL (Zhang et al., "Learning Visual Proxy for Compositional Zero-Shot Learning", ICCV 2025), over cached
features.

Beside the text prototypes of three paths stand *visual proxies* of states and objects, free vectors in the images'
space that start at the text features and are trained by gradient. They are compared with factors of their own,
`p_v(s|x) ~ exp(cos(z_v^s, w_s) / tau)`. A composition's proxy is made of those of its primitives, `w_c = A w_s + B
w_o`, A and B starting as identities, so that unseen ones have theirs. Cross-modal joint learning ties the proxies'
posterior of compositions to the text's: with logits l_t and l_v of text and proxies,

    L = sum over c, s, o of [CE(l_t) + CE(l_v)]  +  KL(p_t(c|x) | p_v(c|x))

A score is that of three paths, `p(c|x) + p(s|x) p(o|x)`, over blended logits `(1 - a) l_t + a l_v`. The published text
path reads its factors by cross-attention over the prompts and adds the attention to its logits; here its factors are
the three paths'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from duplex.methods.base import Batch, Setting
from duplex.methods.three_paths import ThreePathOptions, ThreePaths
from duplex.parts.factors import Factors, unit
from duplex.parts.heads import Columns
from duplex.parts.prompts import Prototypes
from duplex.parts.words import word_vectors


@dataclass(frozen=True)
class VpCmjlOptions(ThreePathOptions):
    proxies: bool = True  # without them it is the three paths alone
    blend: float = 0.3  # a

    def rules(self) -> Iterable[tuple[object, str]]:
        yield from super().rules()
        yield 0 <= self.blend <= 1, f"blend is {self.blend}; it lies in [0, 1]"


class VpCmjl(ThreePaths[VpCmjlOptions]):
    Options = VpCmjlOptions

    def __init__(self, setting: Setting, options: VpCmjlOptions) -> None:
        super().__init__(setting, options)
        if options.proxies:
            states, objects = (rows.to(torch.float32) for rows in word_vectors(setting.labels, setting.tower))
            self.states, self.objects = nn.Parameter(states.clone()), nn.Parameter(objects.clone())  # [M, d], [N, d]
            self.from_state, self.from_object = (nn.Parameter(torch.eye(setting.dim)) for _ in range(2))
            self.visual_factors = Factors(setting.dim, options.width, residual=False)

    def visual(self, z: Tensor, columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the proxies of compositions, states and objects."""
        z_s, z_o = self.visual_factors(z)
        states, objects = self.states @ self.from_state.T, self.objects @ self.from_object.T
        w_c = unit(states.index_select(0, columns.states) + objects.index_select(0, columns.objects))
        rows = ((z, w_c), (z_s, unit(self.states)), (z_o, unit(self.objects)))
        c, s, o = (self.paths.logits(f, w) for f, w in rows)
        return c, s, o

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        z, _, losses = self.seen(batch, shared)
        if not self.options.proxies:
            return losses
        c, s, o = self.visual(z, self.columns)
        m, n = self.primitives(batch.compositions)
        text = self.paths.logits(z, shared.compositions).log_softmax(-1)
        return {
            **losses,
            "vc": cross_entropy(c, self.columns.places(batch.compositions)),
            "vs": cross_entropy(s, m),
            "vo": cross_entropy(o, n),
            "joint": kl_div(c.log_softmax(-1), text, reduction="batchmean", log_target=True),
        }

    def terms(self, z: Tensor, t: Prototypes, columns: Columns) -> Iterator[Tensor]:
        if not self.options.proxies:
            yield from super().terms(z, t, columns)
            return
        assert self.paths.factors is not None
        z_s, z_o = self.paths.factors(z)
        text = ((z, t.compositions), (z_s, t.states), (z_o, t.objects))
        a = self.options.blend
        logits = zip(text, self.visual(z, columns), strict=True)
        c, s, o = (((1 - a) * self.paths.logits(f, rows) + a * proxies).softmax(-1) for (f, rows), proxies in logits)
        yield c
        yield s[:, columns.states] * o[:, columns.objects]
