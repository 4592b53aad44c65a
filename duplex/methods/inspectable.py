"""What a method lets people look at: the report, `duplex retrieve` and `duplex swap` ask for these and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from duplex.labels import Ints
from duplex.layers.paths import Paths

Inputs = Mapping[str, Tensor]  # {"cls": [B, d], "patch": [B, T, w]}: those that the method needs


@dataclass(frozen=True)
class Exhibits:
    """None for what a method has not got. Each is a function without gradients."""

    features: Callable[[Inputs], Tensor] | None = None  # z^c [B, d], of unit length: what prototypes are compared with
    semantic: Callable[[Ints], Tensor] | None = None  # t^c [C, d] of compositions
    visual: Callable[[Ints], Tensor] | None = None  # h [C, d] of compositions
    factors: Callable[[Inputs], tuple[Tensor, Tensor]] | None = None  # z^s, z^o [B, d]
    joined: Callable[[Tensor, Tensor], Tensor] | None = None  # phi(z^s, z^o) [B, d], where the method fuses factors
    spoken: Callable[[Inputs], Tensor] | None = None  # [B, d] what t^c is compared with, where that is not z^c

    @property
    def names(self) -> tuple[str, ...]:
        """What there is."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not None)


def of_paths(paths: Paths) -> Exhibits:
    """Features, semantic prototypes and, with three paths, factors."""

    @torch.no_grad()
    def features(inputs: Inputs) -> Tensor:
        return paths.features(inputs["cls"])

    @torch.no_grad()
    def factors(inputs: Inputs) -> tuple[Tensor, Tensor]:
        assert paths.factors is not None
        z_s, z_o = paths.factors(paths.features(inputs["cls"]))
        return z_s, z_o

    return Exhibits(features, paths.semantic, factors=None if paths.factors is None else factors)
