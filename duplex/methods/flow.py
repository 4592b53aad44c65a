"""FlowComposer: flows move an image's state and object factors to their prompts, and its feature.

He, Li, Chen, "FlowComposer: Composable Flows for Compositional Zero-Shot Learning", CVPR 2026. Its
formulas were read on the project page and in third parties' notes, not in the paper.

    x_r = (1 - r) z_s + r t_s,   r ~ U(0, 1),   x^ = x_r + (1 - r) v_s(x_r, r)    likewise for objects
    L_velocity = |v_s(x_r, r) - (t_s - z_s)|^2,   L_end = CE(cos(x^, t of all states) / tau)
    d_s = norm(v_s(z_s, 0)),   (a*, b*) = argmin |a d_s + b d_o - (t_c - z_c)|^2 + q (a^2 + b^2)
    (a, b) = C(d_s, d_o),   L_composer = |(a, b) - (a*, b*)|^2
    L = L_base + L_velocity + L_end + L_composer
    S = S_base + w p(c|z'),   z' = norm(z_c + step (a d_s + b d_o))

* z_c, z_s, z_o: image feature and factors of a base with three paths;  t_c, t_s, t_o: its prompts
* v_s, v_o, C: networks;  tau: CLIP's temperature;  p: the base's p(c|x), a softmax or a logit
* Leaked features: v_s also learns to move z_o and z_c to t_s, and v_o to move z_s and z_c to t_o

The networks' sizes, step, q and w are those of a re-implementation for video; the authors' values
are unknown. Our choices: all losses have the weight 1, L_velocity and L_end are means over all
starts, and L_composer trains only C.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, nll_loss

from duplex.errors import UsageError
from duplex.labels import Ints
from duplex.methods.base import Batch, Inputs, Method, MethodContext, Scorer
from duplex.methods.layers import unit
from duplex.methods.paths import Paths
from duplex.methods.prompts import Prototypes
from duplex.methods.registry import find_method, parse_options
from duplex.options import NonNegative, Options, Positive, refuse

LOSSES = ("state", "object", "semantic")  # of the three paths
HOOKS = (  # methods of `Method` in which the base alone has a part
    *("start", "after_batch", "after_step", "on_features_changed", "after_epoch"),
    *("choose_options", "probabilities", "inspectable"),
)


@dataclass(frozen=True)
class FlowOptions(Options):
    # a three-path kind and its options
    base: Mapping[str, Any] = field(default_factory=lambda: {"kind": "prompts"})
    step: Positive = 0.1  # length of the move along both directions
    ridge: NonNegative = 0.1  # weight q of the squared coefficients
    weight: NonNegative = 0.5  # weight w of the moved feature in the score

    @classmethod
    def describe_types(cls) -> dict[str, str]:
        return {**super().describe_types(), "base": "table of a kind and its options"}

    def rules(self) -> Iterable[tuple[object, str]]:
        is_named = isinstance(self.base.get("kind"), str)
        yield refuse(not is_named, "base needs a kind, such as {kind: prompts}")
        self.base_options()  # raises an error for wrong ones

    def base_options(self) -> Options:
        own = {key: value for key, value in self.base.items() if key != "kind"}
        return parse_options(self.base["kind"], own)


class Flow(Method[FlowOptions]):
    """FlowComposer: networks move image features towards prompts, on top of the option `base`."""

    def __init__(self, context: MethodContext, options: FlowOptions) -> None:
        super().__init__(context, options)
        own = options.base_options()
        self.base: Any = find_method(options.base["kind"])(context, own)
        paths = getattr(self.base, "paths", None)
        has_factors = isinstance(paths, Paths) and paths.factors is not None
        if not has_factors or not set(LOSSES) <= {*getattr(own, "losses", LOSSES)}:
            raise UsageError(
                f"flow's base {dict(options.base)} lacks trained pair, state or object paths; use {{kind: prompts}}"
            )
        for name in HOOKS:
            setattr(self, name, getattr(self.base, name))
        dim = context.dim
        self.state = _network(dim + 1, 2 * dim, dim)
        self.object = _network(dim + 1, 2 * dim, dim)
        self.composer = _network(2 * dim, dim, 2)

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return find_method(options.base["kind"]).needs(options.base_options())

    def branches(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Three features [B, d] of each image: of the whole, of its state, of its object."""
        z = self.base.paths.adapt(inputs["cls"])
        return z, *self.base.paths.factors(z)

    def composed(self, z_s: Tensor, z_o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Unit directions d_s, d_o [B, d] of the flows at the factors, and coefficients [B, 2]."""
        start = z_s.new_zeros(len(z_s), 1)
        d_s = unit(self.state(torch.cat([z_s, start], -1)))
        d_o = unit(self.object(torch.cat([z_o, start], -1)))
        return d_s, d_o, self.composer(torch.cat([d_s, d_o], -1).detach())

    def target_coefficients(self, d_s: Tensor, d_o: Tensor, move: Tensor) -> Tensor:
        """Coefficients a, b [B, 2] for which a d_s + b d_o is nearly `move` [B, d]."""
        own = 1 + self.options.ridge
        both = (d_s * d_o).sum(-1)
        p, q = (d_s * move).sum(-1), (d_o * move).sum(-1)
        determinant = (own * own - both * both).clamp(min=torch.finfo(both.dtype).eps)
        return torch.stack([own * p - both * q, own * q - both * p], -1) / determinant[:, None]

    def losses(self, batch: Batch, shared: Any) -> dict[str, Tensor]:
        losses = self.base.losses(batch, shared)
        t = Prototypes(*shared[:3])
        z_c, z_s, z_o = self.branches(batch.inputs)
        m, n = self.primitives(batch.compositions)
        own = torch.searchsorted(self.base.paths.negatives, batch.compositions)
        move_s, end_s = self._flow(self.state, [z_s, z_o, z_c], t.states[m])
        move_o, end_o = self._flow(self.object, [z_o, z_s, z_c], t.objects[n])
        log_s, log_o = self.base.paths.log_posteriors(end_s, end_o, t)
        starts = len(end_s) // len(m)
        with torch.no_grad():
            d_s, d_o, _ = self.composed(z_s, z_o)
            target = self.target_coefficients(d_s, d_o, t.compositions[own] - z_c)
        return {
            **losses,
            "velocity": move_s + move_o,
            "end": nll_loss(log_s, m.repeat(starts)) + nll_loss(log_o, n.repeat(starts)),
            "composer": 2 * mse_loss(self.composer(torch.cat([d_s, d_o], -1)), target),
        }

    def _flow(self, network: nn.Module, starts: list[Tensor], t: Tensor) -> tuple[Tensor, Tensor]:
        # the loss of the velocities from `starts` to the prompts `t`, and the predicted ends
        x_0 = torch.cat(starts)
        x_1 = t.repeat(len(starts), 1)
        r = torch.rand(len(x_0), 1, device=x_0.device, dtype=x_0.dtype)
        x = (1 - r) * x_0 + r * x_1
        v = network(torch.cat([x, r], -1))
        return (v - (x_1 - x_0)).square().sum(-1).mean(), unit(x + (1 - r) * v)

    @torch.no_grad()
    def scorer(self, candidates: Ints) -> Scorer:
        score_base = self.base.scorer(candidates)
        t = self.base.paths.encode(candidates, ("semantic",)).compositions
        is_logit = getattr(self.base.options, "score", "probability") == "logit"

        @torch.no_grad()
        def score(inputs: Inputs) -> Tensor:
            z_c, z_s, z_o = self.branches(inputs)
            d_s, d_o, coefficients = self.composed(z_s, z_o)
            a, b = coefficients.split(1, dim=1)
            moved = unit(z_c + self.options.step * (a * d_s + b * d_o))
            logits: Tensor = self.base.paths.logits(moved, t)
            own = logits if is_logit else logits.softmax(-1)
            return torch.add(score_base(inputs), self.options.weight * own)

        return score

    def groups(self) -> list[dict[str, Any]]:
        own = [*self.state.parameters(), *self.object.parameters(), *self.composer.parameters()]
        return [*self.base.groups(), {"params": own}]

    def shared(self) -> Any:
        self.base.checkpointing = self.checkpointing
        return self.base.shared()


def _network(inside: int, width: int, out: int) -> nn.Sequential:
    first = nn.Linear(inside, width)
    return nn.Sequential(first, nn.LayerNorm(width), nn.GELU(), nn.Linear(width, out))
