"""The codebook `H`: one visual prototype for every one of the `M * N` compositions (Eq. 10)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from duplex.labels import LabelSpace


class Codebook(nn.Module):
    """`H [M*N, d]`, a buffer that only momentum write-back changes, or a parameter where it is `trainable`.

    Rows are random until `start`.
    """

    rows: Tensor
    anchored: Tensor  # the rows as they began [M*N, d]

    def __init__(
        self, labels: LabelSpace, dim: int, *, trainable: bool, random_seen: bool, anchored: bool = False
    ) -> None:
        super().__init__()
        self.labels, self.trainable = labels, trainable
        rows = random_rows(labels.size, dim)
        if random_seen:
            rows[torch.as_tensor(labels.pairs["train"])] = random_rows(len(labels.pairs["train"]), dim)
        if trainable:
            self.rows = nn.Parameter(rows)
        else:
            self.register_buffer("rows", rows)
        if anchored:
            self.register_buffer("anchored", rows.clone())

    @torch.no_grad()
    def start(self, z: Tensor, compositions: Tensor, *, seen: bool, unseen: bool) -> None:
        """Replace random rows by what the training images' unit features `z [n, d]` and compositions `[n]` say.

        With `seen`, rows of the pairs trained on are the pair's mean feature. With `unseen`, the others are
        `normalise(mean_state + mean_object - mean_all)`: what the state adds to the average image and what the object
        adds.
        """
        if unseen:
            composed = torch.ones(self.labels.size, dtype=torch.bool, device=self.rows.device)
            composed[torch.as_tensor(self.labels.pairs["train"], device=self.rows.device)] = (
                seen  # those without images
            )
            self.rows[composed] = composed_rows(self.labels, z, compositions)[composed].to(self.rows)
        if seen:
            present, inverse = compositions.unique(return_inverse=True)
            self.rows[present] = normalize(_means(z, inverse, len(present)), dim=-1).to(self.rows)

    @torch.no_grad()
    def clear_unseen(self) -> None:
        """Rows of pairs without training images hold nothing: a logit of 0, and all of what first refines them."""
        empty = torch.ones(self.labels.size, dtype=torch.bool, device=self.rows.device)
        empty[torch.as_tensor(self.labels.pairs["train"], device=self.rows.device)] = False
        self.rows[empty] = 0

    @torch.no_grad()
    def anchor(self) -> None:
        """Remember the rows as they are."""
        self.anchored.copy_(self.rows)

    def initial(self, compositions: Tensor) -> Tensor:
        """The anchored rows of `compositions` [C, d]."""
        return self.anchored.index_select(0, compositions)

    @torch.no_grad()
    def commit(self, compositions: Tensor, rows: Tensor) -> None:
        """Write refined rows back in place; every other row stays as it is, bit for bit."""
        self.rows.index_copy_(0, compositions, rows.detach().to(self.rows.dtype))

    @torch.no_grad()
    def average(self, z: Tensor, compositions: Tensor, momentum: float) -> None:
        """Rows of a batch's own compositions towards the mean of their images, `h_c <- normalise(l h_c + (1 - l) x_c)`,
        once a batch; every other row stays."""
        present, inverse = compositions.unique(return_inverse=True)
        mixed = momentum * self.rows[present] + (1 - momentum) * _means(z, inverse, len(present)).to(self.rows)
        self.commit(present, normalize(mixed, dim=-1))

    @torch.no_grad()
    def compose(self, compositions: Tensor) -> None:
        """Rows of pairs without images from the rows of those with: every training image stands for its pair's row."""
        unseen = torch.ones(self.labels.size, dtype=torch.bool, device=self.rows.device)
        unseen[compositions] = False
        self.rows[unseen] = composed_rows(self.labels, self.rows[compositions], compositions)[unseen]

    @torch.no_grad()
    def project(self) -> None:
        """Every row to unit length."""
        self.rows.copy_(normalize(self.rows, dim=-1))


def random_rows(count: int, dim: int) -> Tensor:
    return normalize(torch.randn(count, dim), dim=-1)


def composed_rows(labels: LabelSpace, z: Tensor, compositions: Tensor) -> Tensor:
    """`normalise(mean_state + mean_object - mean_all)` of every composition [M*N, d]."""
    states, objects, dim = len(labels.states), len(labels.objects), z.shape[1]
    mean_s = _means(z, compositions // objects, states)  # [M, d]
    mean_o = _means(z, compositions % objects, objects)  # [N, d]
    composed = mean_s[:, None] + mean_o[None] - z.mean(0)  # [M, N, d]
    return normalize(composed, dim=-1).reshape(labels.size, dim)


def _means(z: Tensor, groups: Tensor, count: int) -> Tensor:
    """Mean of `z` over each group `[count, d]`; a group without images gets the mean of all."""
    sums = torch.zeros(count, z.shape[1], dtype=z.dtype, device=z.device).index_add_(0, groups, z)
    sizes = groups.bincount(minlength=count)[:, None]
    return torch.where(sizes > 0, sums / sizes.clamp(min=1), z.mean(0))
