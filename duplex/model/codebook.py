"""The codebook `H`: one visual prototype for every one of the `M * N` compositions (Eq. 10)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from duplex.labels import LabelSpace
from duplex.model.options import Options


class Codebook(nn.Module):
    """`H [M*N, d]`, a buffer that only momentum write-back changes, or a parameter (`codebook: trainable`)."""

    rows: Tensor

    def __init__(self, options: Options, rows: Tensor) -> None:
        super().__init__()
        if options.codebook == "trainable":
            self.rows = nn.Parameter(rows)
        else:
            self.register_buffer("rows", rows)

    @torch.no_grad()
    def commit(self, compositions: Tensor, rows: Tensor) -> None:
        """Write refined rows back in place; every other row stays as it is, bit for bit."""
        self.rows.index_copy_(0, compositions, rows.detach().to(self.rows.dtype))

    @torch.no_grad()
    def project(self) -> None:
        """Every row to unit length."""
        self.rows.copy_(normalize(self.rows, dim=-1))


def random_rows(count: int, dim: int) -> Tensor:
    return normalize(torch.randn(count, dim), dim=-1)


def initial_rows(options: Options, labels: LabelSpace, z: Tensor, compositions: Tensor) -> Tensor:
    """First codebook `[M*N, d]` from the training images' unit features `z [n, d]` and their compositions `[n]`.

    Seen rows (`seen_rows: data`) are the pair's mean feature. Unseen rows (`unseen_rows: compose`) are
    `normalise(mean_state + mean_object - mean_all)`: what the state adds to the average image and what the object adds.
    """
    states, objects, dim = len(labels.states), len(labels.objects), z.shape[1]
    device = z.device
    rows = random_rows(labels.size, dim).to(z)
    if options.unseen_rows == "compose":
        mean_s = _means(z, compositions // objects, states)  # [M, d]
        mean_o = _means(z, compositions % objects, objects)  # [N, d]
        composed = mean_s[:, None] + mean_o[None] - z.mean(0)  # [M, N, d]
        rows = normalize(composed, dim=-1).reshape(labels.size, dim)
    seen = torch.as_tensor(labels.pairs["train"], device=device)
    if options.seen_rows == "random":
        rows[seen] = random_rows(len(seen), dim).to(z)
    else:
        present, inverse = compositions.unique(return_inverse=True)
        rows[present] = normalize(_means(z, inverse, len(present)), dim=-1)
    return rows


def _means(z: Tensor, groups: Tensor, count: int) -> Tensor:
    """Mean of `z` over each group `[count, d]`; a group without images gets the mean of all."""
    sums = torch.zeros(count, z.shape[1], dtype=z.dtype, device=z.device).index_add_(0, groups, z)
    sizes = groups.bincount(minlength=count)[:, None]
    return torch.where(sizes > 0, sums / sizes.clamp(min=1), z.mean(0))
