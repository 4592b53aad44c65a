"""Word vectors of the primitives from the frozen text tower: what feasibility compares states and objects by."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from duplex.encoders.text import TextTower
from duplex.labels import LabelSpace
from duplex.layers.prompt_paths import Prompts


def word_vectors(labels: LabelSpace, tower: TextTower) -> tuple[Tensor, Tensor]:
    """`[M, d]`, `[N, d]`: the tower's features of "a photo of <state>" and "a photo of <object>"; nothing learned."""
    none = np.empty(0, dtype=np.int64)
    prototypes = Prompts(labels, tower).encode(none)
    return prototypes.states, prototypes.objects
