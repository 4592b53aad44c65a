"""VP-CMJL (Zhang et al., "Learning Visual Proxy for Compositional Zero-Shot Learning", ICCV 2025), over cached
features.

Beside the text prototypes of three paths stand *visual proxies* of states and objects, free vectors in the images'
space that start at the text features and are trained by gradient: `p_v(s|x) ~ exp(cos(z^s, w_s) / tau)`. A
composition's proxy is made of those of its primitives, `w_c = normalise(A w_s + B w_o)`, A and B starting as
identities, so that unseen ones have theirs. Cross-modal joint learning ties the two, in this version by a loss on
their mean: with logits l_t and l_v of text and proxies,

    L = sum over c, s, o of  CE(l_t) + CE(l_v) + CE((l_t + l_v) / 2)

and all six posteriors score: `p_t(c) + p_v(c) + p_t(s) p_t(o) + p_v(s) p_v(o)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from duplex.methods.base import Batch, Setting
from duplex.methods.three_paths import ThreePathOptions, ThreePaths
from duplex.parts.factors import unit
from duplex.parts.heads import Columns
from duplex.parts.prompts import Prototypes
from duplex.parts.words import word_vectors


@dataclass(frozen=True)
class VpCmjlOptions(ThreePathOptions):
    proxies: bool = True  # without them it is the three paths alone


class VpCmjl(ThreePaths[VpCmjlOptions]):
    Options = VpCmjlOptions

    def __init__(self, setting: Setting, options: VpCmjlOptions) -> None:
        super().__init__(setting, options)
        if options.proxies:
            states, objects = (rows.to(torch.float32) for rows in word_vectors(setting.labels, setting.tower))
            self.states, self.objects = nn.Parameter(states.clone()), nn.Parameter(objects.clone())  # [M, d], [N, d]
            self.from_state, self.from_object = (nn.Parameter(torch.eye(setting.dim)) for _ in range(2))

    def visual(self, z: Tensor, z_s: Tensor, z_o: Tensor, columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the proxies of compositions, states and objects."""
        states, objects = unit(self.states), unit(self.objects)
        w_c = unit(
            (states @ self.from_state.T).index_select(0, columns.states)
            + (objects @ self.from_object.T).index_select(0, columns.objects)
        )
        return self.paths.logits(z, w_c), self.paths.logits(z_s, states), self.paths.logits(z_o, objects)

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        z, factored, losses = self.seen(batch, shared)
        if not self.options.proxies:
            return losses
        c, s, o = self.visual(z, factored.z_s, factored.z_o, self.columns)
        m, n = self.primitives(batch.compositions)
        own = {"c": (c, shared.compositions, z, self.columns.places(batch.compositions))}
        own |= {"s": (s, shared.states, factored.z_s, m), "o": (o, shared.objects, factored.z_o, n)}
        for name, (visual, t, feature, target) in own.items():
            losses[f"v{name}"] = cross_entropy(visual, target)
            losses[f"j{name}"] = cross_entropy((visual + self.paths.logits(feature, t)) / 2, target)
        return losses

    def terms(self, z: Tensor, t: Prototypes, columns: Columns) -> Iterator[Tensor]:
        yield from super().terms(z, t, columns)
        if self.options.proxies:
            assert self.paths.factors is not None
            z_s, z_o = self.paths.factors(z)
            c, s, o = self.visual(z, z_s, z_o, columns)
            yield c.softmax(-1)
            yield s.softmax(-1)[:, columns.states] * o.softmax(-1)[:, columns.objects]
