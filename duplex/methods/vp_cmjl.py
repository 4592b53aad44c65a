"""VP-CMJL (Zhang et al., "Learning Visual Proxy for Compositional Zero-Shot Learning", ICCV 2025), over cached
features.

On the text side an image's CLS feature z reads the prompts of states by a block of cross-attention, which gives its
state's factor and, as evidence of its own, how much attention each state has; likewise for objects:

    z_t^s, a^s = B_s(z, t_s),    l_t(s) = (cos(z_t^s, t_s) + a^s) / tau,    l_t(c) = cos(z, t_c) / tau

Beside the prompts stand *visual proxies* of states and objects, free vectors in the images' space that start at the
text features and are trained by gradient. They are compared with disentangled factors, `l_v(s) = cos(z^s, w_s) / tau`.
A composition's proxy is made of those of its primitives, `w_c = A w_s + B w_o`, A and B starting as identities, so
that unseen ones have theirs. Cross-modal joint learning ties the proxies' posterior of compositions to the text's:

    L = sum over c, s, o of [CE(l_t) + CE(l_v)]  +  KL(p_t(c|x) | p_v(c|x))

A score is that of three paths, `p(c|x) + p(s|x) p(o|x)`, over blended logits `(1 - a) l_t + a l_v`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from duplex.errors import UsageError
from duplex.layers.attention import CrossBlock
from duplex.layers.composition_index import Columns
from duplex.layers.factors import unit
from duplex.layers.prompt_paths import Prototypes
from duplex.layers.word_vectors import word_vectors
from duplex.methods.base import Batch, Setting
from duplex.methods.three_paths import ThreePathOptions, ThreePaths


@dataclass(frozen=True)
class VpCmjlOptions(ThreePathOptions):
    proxies: bool = True  # without them, and without the attention, it is the three paths alone
    blend: float = 0.3  # a
    heads: int = 4

    def rules(self) -> Iterable[tuple[object, str]]:
        yield from super().rules()
        yield 0 <= self.blend <= 1, f"blend is {self.blend}; it lies in [0, 1]"
        yield self.heads >= 1, f"heads is {self.heads}; it is at least 1"


class Logits(NamedTuple):
    """Of compositions [B, C], states [B, M] and objects [B, N]."""

    compositions: Tensor
    states: Tensor
    objects: Tensor


class VpCmjl(ThreePaths[VpCmjlOptions]):
    Options = VpCmjlOptions

    def __init__(self, setting: Setting, options: VpCmjlOptions) -> None:
        super().__init__(setting, options)
        if options.proxies:
            dim, heads = setting.dim, options.heads
            if dim % heads:
                raise UsageError(f"heads is {heads}; the feature's width {dim} is no multiple of it")
            states, objects = (rows.to(torch.float32) for rows in word_vectors(setting.labels, setting.tower))
            self.states, self.objects = nn.Parameter(states.clone()), nn.Parameter(objects.clone())  # [M, d], [N, d]
            self.from_state, self.from_object = (nn.Parameter(torch.eye(dim)) for _ in range(2))
            self.read_s, self.read_o = (CrossBlock(dim, dim, heads) for _ in range(2))

    def text(self, z: Tensor, t: Prototypes) -> Logits:
        """l_t"""
        (z_s, a_s), (z_o, a_o) = self.read_s.read(z, t.states), self.read_o.read(z, t.objects)
        rows = ((unit(z_s), t.states, a_s), (unit(z_o), t.objects, a_o))
        s, o = (self.paths.logits(f, prototypes) + self.paths.scale * a for f, prototypes, a in rows)
        return Logits(self.paths.logits(z, t.compositions), s, o)

    def visual(self, z: Tensor, columns: Columns) -> Logits:
        """l_v"""
        assert self.paths.factors is not None
        z_s, z_o = self.paths.factors(z)
        states, objects = self.states @ self.from_state.T, self.objects @ self.from_object.T
        w_c = unit(states.index_select(0, columns.states) + objects.index_select(0, columns.objects))
        rows = ((z, w_c), (z_s, unit(self.states)), (z_o, unit(self.objects)))
        return Logits(*(self.paths.logits(f, w) for f, w in rows))

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        if not self.options.proxies:
            return self.seen(batch, shared).losses
        z = self.paths.features(batch.z)
        text, visual = self.text(z, shared), self.visual(z, self.columns)
        m, n = self.primitives(batch.compositions)
        own = self.columns.places(batch.compositions), m, n
        joint = visual.compositions.log_softmax(-1), text.compositions.log_softmax(-1)
        return {
            **crossed(("ct", "s", "o"), text, own),
            **crossed(("vc", "vs", "vo"), visual, own),
            "joint": kl_div(*joint, reduction="batchmean", log_target=True),
        }

    def terms(self, z: Tensor, t: Prototypes, columns: Columns) -> Iterator[Tensor]:
        if not self.options.proxies:
            yield from super().terms(z, t, columns)
            return
        a, both = self.options.blend, zip(self.text(z, t), self.visual(z, columns), strict=True)
        c, s, o = (((1 - a) * text + a * visual).softmax(-1) for text, visual in both)
        yield c
        yield s[:, columns.states] * o[:, columns.objects]


def crossed(names: Iterable[str], logits: Logits, own: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    return {name: cross_entropy(rows, target) for name, rows, target in zip(names, logits, own, strict=True)}
