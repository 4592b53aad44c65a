"""A codebook whose rows are parameters: all `M * N` of them, with a gradient and the optimiser's two moments each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from duplex.errors import UsageError
from duplex.labels import Ints, LabelSpace
from duplex.layers.codebook import DENSE, Logits, Unseen, composed_rows, means_of, seen_rows
from duplex.layers.draws import random_rows
from duplex.layers.indices import send


class TrainedCodebook(nn.Module):
    """`H [M*N, d]`, moved by gradients, and by write-back too. Rows are random until `start`."""

    def __init__(
        self, labels: LabelSpace, dim: int, *, unseen: Unseen, random_seen: bool, anchored: bool = False
    ) -> None:
        super().__init__()
        _refuse_too_many(labels, dim)
        assert not anchored, "rows that gradients move have no beginning to go back to"
        self.labels, self.unseen = labels, unseen
        rows = random_rows(labels.size, dim)
        if random_seen:
            rows[torch.as_tensor(labels.pairs["train"])] = random_rows(len(labels.pairs["train"]), dim)
        self.rows = nn.Parameter(rows)

    @torch.no_grad()
    def start(self, z: Tensor, compositions: Tensor, *, seen: bool) -> None:
        """As `Codebook.start`: pairs with images are their mean feature if `seen`, others are composed if they are."""
        if self.unseen != "random":
            chosen = torch.ones(self.labels.size, dtype=torch.bool, device=self.rows.device)
            chosen[torch.as_tensor(self.labels.pairs["train"], device=self.rows.device)] = seen  # those without images
            every, n = chosen.nonzero()[:, 0], len(self.labels.objects)
            means = means_of(self.labels, z, compositions)
            rows = composed_rows(means, every // n, every % n).to(self.rows)
            self.rows[every] = rows if self.unseen == "compose" else 0 * rows
        if seen:
            present, rows = seen_rows(z, compositions)
            self.rows[present] = rows.to(self.rows)

    def rows_of(self, compositions: Ints) -> Tensor:
        """`h_c` [C, d]"""
        (there,) = send(self.rows.device, compositions)
        return self.rows.index_select(0, there)

    def over(self, columns: Ints | None) -> Logits:
        """`z . h / tau` over some columns, or over all."""
        rows = self.rows if columns is None else self.rows_of(columns)
        return lambda z, scale: scale * (z @ rows.T)

    @torch.no_grad()
    def commit(self, compositions: Ints, rows: Tensor) -> None:
        """Write refined rows back in place; every other row stays as it is, bit for bit."""
        (there,) = send(self.rows.device, compositions)
        self.rows.index_copy_(0, there, rows.detach().to(self.rows.dtype))

    @torch.no_grad()
    def project(self) -> None:
        """Every row to unit length."""
        self.rows.copy_(normalize(self.rows, dim=-1))


def _refuse_too_many(labels: LabelSpace, dim: int) -> None:
    m, n = len(labels.states), len(labels.objects)
    if labels.size * dim > DENSE:
        gib = 4 * 4 * labels.size * dim / 2**30  # value, gradient and two moments of 4 bytes
        rows = f"{m:,} x {n:,} rows of {dim} numbers"
        raise UsageError(
            f"codebook: trainable keeps {rows}, with gradients and moments {gib:,.0f} GiB; the "
            f"most is {16 * DENSE / 2**30:.0f} GiB; choose codebook: buffer"
        )
