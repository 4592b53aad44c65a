"""The codebook `H`: one visual prototype for every one of the `M * N` compositions (Eq. 10), few of which are kept.

A row that no batch has refined is a formula of `M + N + 1` vectors,

    h_mn = normalise(mean_s + mean_o - mean_all),

what the state adds to the average image and what the object adds; or a direction drawn from a seed and its place; or
nothing, which gives a logit of 0 and leaves all to what first refines it. Kept are the rows of pairs with images and
those that were refined. Scores over many columns make no rows either:

    z . h_mn = (z . a_m + z . b_n) / |a_m + b_n|,   a_m = mean_s - mean_all,   b_n = mean_o.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from duplex.errors import DuplexError
from duplex.labels import Ints, LabelSpace
from duplex.layers.draws import pass_over, random_rows, rows_at
from duplex.layers.indices import send

Unseen = Literal["compose", "random", "empty"]  # what rows of pairs without images are
Logits = Callable[[Tensor, float], Tensor]  # features z [B, d], 1 / tau -> z . h / tau [B, C]
ROWS = 1 << 14  # columns up to which scores are made of rows; beyond it, of outer sums
BLOCK = 1 << 14  # rows made at a time where they are thrown away again
CELLS = 1 << 24  # compositions whose norms are kept: 64 MiB; of a larger world they are made block by block
DENSE = 1 << 28  # numbers that a codebook with all its rows may hold
LEAST = 1e-12  # length below which a row stays as short as it is


class Codebook(nn.Module):
    """`H` as formula and exceptions; only momentum write-back changes a row. Rows are random until `start`.

    `grows` names the tensors of its state whose first dimension is the number of rows that it keeps, rising by
    composition: `known [K]` and `rows [K, d]`. In memory they lie in `_stored` in the order in which they came.
    """

    grows = ("known", "rows")
    mean_s: Tensor  # [M, d]
    mean_o: Tensor  # [N, d]
    mean_all: Tensor  # [d]
    seed: Tensor
    _stored: Tensor
    _inverse: Tensor | None

    def __init__(
        self, labels: LabelSpace, dim: int, *, unseen: Unseen, random_seen: bool, anchored: bool = False
    ) -> None:
        """`anchored` keeps the rows as they began, too."""
        super().__init__()
        self.labels, self.dim, self.unseen = labels, dim, unseen
        if labels.size * dim <= DENSE:  # the rest of a method starts as beside a codebook that draws its rows
            pass_over(labels.size * dim)
        seen = labels.pairs["train"] if random_seen else labels.pairs["train"][:0]
        self.register_buffer("_stored", random_rows(len(seen), dim), persistent=False)
        self.register_buffer("_inverse", None, persistent=False)
        self._known, self._slots = seen, np.arange(len(seen))
        if unseen == "compose":
            self.register_buffer("mean_s", torch.zeros(len(labels.states), dim))
            self.register_buffer("mean_o", torch.zeros(len(labels.objects), dim))
            self.register_buffer("mean_all", torch.zeros(dim))
        elif unseen == "random":
            self.register_buffer("seed", torch.randint(2**62, ()))
        self.began: Codebook | None = None
        if anchored:
            self.began = copy.deepcopy(self)

    @torch.no_grad()
    def start(self, z: Tensor, compositions: Tensor, *, seen: bool) -> None:
        """What the training images' unit features `z [n, d]` and compositions `[n]` say. With `seen`, rows of the pairs
        that have images are the pair's mean feature."""
        if self.unseen == "compose":
            for mean, value in zip(self._means, means_of(self.labels, z, compositions), strict=True):
                mean.copy_(value)
            self._inverse = None
        if seen:
            present, rows = seen_rows(z, compositions)
            self._keep(present.cpu().numpy(), rows.to(self._stored))
        if self.began is not None:
            self.began.start(z, compositions, seen=seen)

    # -- rows -----------------------------------------------------------------------------------------------------

    @property
    def kept(self) -> int:
        """K"""
        return len(self._known)

    def rows_of(self, compositions: Ints) -> Tensor:
        """`h_c` [C, d]"""
        pairs = self.labels.state_of(compositions), self.labels.object_of(compositions)
        states, objects, place, slot = send(self._stored.device, *pairs, *self._among(compositions))
        rows = self._formula(states, objects)
        return rows.index_copy_(0, place, self._stored.index_select(0, slot))

    def initial(self, compositions: Ints) -> Tensor:
        """The rows of an anchored codebook as they began [C, d]."""
        assert self.began is not None
        return self.began.rows_of(compositions)

    def _formula(self, states: Tensor, objects: Tensor) -> Tensor:
        if self.unseen == "empty":
            return self._stored.new_zeros(len(states), self.dim)
        if self.unseen == "random":
            return rows_at(self.seed, states * len(self.labels.objects) + objects, self.dim).to(self._stored.dtype)
        return composed_rows(self._means, states, objects)

    @property
    def _means(self) -> Means:
        return self.mean_s, self.mean_o, self.mean_all

    def _among(self, compositions: Ints) -> tuple[Ints, Ints]:
        """Places in `compositions` of those whose rows are kept, and where these lie."""
        if not self.kept:
            return self._slots[:0], self._slots[:0]
        place = np.searchsorted(self._known, compositions).clip(max=self.kept - 1)
        mine = np.flatnonzero(self._known[place] == compositions)
        return mine, self._slots[place[mine]]

    @torch.no_grad()
    def commit(self, compositions: Ints, rows: Tensor) -> None:
        """Write refined rows back; every other row stays as it is, bit for bit."""
        mine, _ = self._among(compositions)
        if len(mine) < len(compositions):
            self._make_room(np.setdiff1d(compositions, compositions[mine], assume_unique=True))
        _, slots = self._among(compositions)
        (there,) = send(self._stored.device, slots)
        self._stored.index_copy_(0, there, rows.detach().to(self._stored.dtype))

    @torch.no_grad()
    def average(self, z: Tensor, compositions: Ints, momentum: float) -> None:
        """Rows of a batch's own compositions towards the mean of their images, `h_c <- normalise(l h_c + (1 - l) x_c)`,
        once a batch; every other row stays."""
        present, inverse, sizes = np.unique(compositions, return_inverse=True, return_counts=True)
        group, count = send(z.device, inverse, sizes)
        means = z.new_zeros(len(present), z.shape[1]).index_add_(0, group, z) / count[:, None]
        mixed = momentum * self.rows_of(present) + (1 - momentum) * means.to(self._stored)
        self.commit(present, normalize(mixed, dim=-1))

    @torch.no_grad()
    def compose(self, compositions: Tensor) -> None:
        """The formula's means from the rows of pairs with images: every training image stands for its pair's row."""
        rows = self.rows_of(compositions.cpu().numpy())
        for mean, value in zip(self._means, means_of(self.labels, rows, compositions), strict=True):
            mean.copy_(value)
        self._inverse = None

    def _make_room(self, further: Ints) -> None:
        """Slots for rows that were formulas; memory grows by a quarter at a time."""
        total = self.kept + len(further)
        if total > len(self._stored):
            more = max(total, min(len(self._stored) * 5 // 4, self.labels.size)) - len(self._stored)
            self._stored = torch.cat([self._stored, self._stored.new_empty(more, self.dim)])
        known = np.concatenate([self._known, further])
        order = np.argsort(known, kind="stable")
        self._known, self._slots = known[order], np.concatenate([self._slots, np.arange(self.kept, total)])[order]

    def _keep(self, known: Ints, rows: Tensor) -> None:
        """These rows and no others."""
        self._known, self._slots, self._stored = known, np.arange(len(known)), rows

    # -- scores ---------------------------------------------------------------------------------------------------

    def over(self, columns: Ints | None) -> Logits:
        """`z . h / tau` over some columns, or over all: short lists by their rows, long ones by outer sums with the
        kept rows in their places."""
        count = self.labels.size if columns is None else len(columns)
        if count <= ROWS:
            rows = self.rows_of(np.arange(count) if columns is None else columns)
            return lambda z, scale: scale * (z @ rows.T)
        if self.unseen != "compose":
            return self._made(np.arange(count) if columns is None else columns)
        return self._whole() if columns is None else self._gathered(columns)

    def _whole(self) -> Logits:
        """All of them [B, M*N]."""
        order = np.argsort(self._slots)
        (place,) = send(self._stored.device, self._known[order])
        inverse, kept = self.inverse(), self._stored[: self.kept]

        def logits(z: Tensor, scale: float) -> Tensor:
            by_s, by_o = self.sums(scale * z)
            cells = (by_s[:, :, None] + by_o[:, None]) * inverse
            return cells.flatten(1).index_copy_(1, place, scale * z @ kept.T)

        return logits

    def _gathered(self, columns: Ints) -> Logits:
        """A long list that leaves some out."""
        n = len(self.labels.objects)
        mine, slots = self._among(columns)
        every, place, slot = send(self._stored.device, columns, mine, slots)
        states, objects = every // n, every % n
        lengths, kept = self._lengths(states, objects), self._stored.index_select(0, slot)

        def logits(z: Tensor, scale: float) -> Tensor:
            by_s, by_o = self.sums(scale * z)
            cells = (by_s.index_select(1, states) + by_o.index_select(1, objects)) / lengths
            return cells.index_copy_(1, place, scale * z @ kept.T)

        return logits

    def _made(self, columns: Ints) -> Logits:
        """Rows without sums: made anew, some at a time."""

        def logits(z: Tensor, scale: float) -> Tensor:
            some = (columns[first : first + BLOCK] for first in range(0, len(columns), BLOCK))
            return torch.cat([scale * (z @ self.rows_of(part).T) for part in some], dim=1)

        return logits

    def sums(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """`z . a_m` [B, M] and `z . b_n` [B, N]"""
        return z @ (self.mean_s - self.mean_all).T, z @ self.mean_o.T

    @torch.no_grad()
    def inverse(self, states: slice = slice(None)) -> Tensor:
        """`1 / |a_m + b_n|` of some states [m, N]; kept where the world is small enough."""
        if self.labels.size > CELLS:
            return self._reciprocal(states)
        if self._inverse is None:
            self._inverse = self._reciprocal(slice(None))
        return self._inverse[states]

    def _reciprocal(self, states: slice) -> Tensor:
        """`|a + b|^2 = |a|^2 + |b|^2 + 2 a . b`, in double precision: where they cancel, little is left."""
        a, b = (self.mean_s[states] - self.mean_all).double(), self.mean_o.double()
        squares = torch.addmm((a * a).sum(1)[:, None] + (b * b).sum(1), a, b.T, alpha=2)
        return squares.clamp_(min=LEAST**2).rsqrt_().to(self.mean_s.dtype)

    def _lengths(self, states: Tensor, objects: Tensor) -> Tensor:
        """`|a_m + b_n|` of some pairs [C], without their rows all at once."""
        found = [
            (self.mean_s[m] + self.mean_o[n] - self.mean_all).norm(dim=1)
            for m, n in zip(states.split(BLOCK), objects.split(BLOCK), strict=True)
        ]
        return torch.cat(found).clamp(min=LEAST)

    def by_states(self, z: Tensor, scale: float, step: int) -> Iterator[Tensor]:
        """`z . h / tau` over all compositions in blocks of `step` states, [B, step * N] each, without anything of the
        size `M * N`."""
        states, n = len(self.labels.states), len(self.labels.objects)
        by_s, by_o = self.sums(scale * z) if self.unseen == "compose" else (z, z)
        for m in range(0, states, step):
            first, last = m * n, min(m + step, states) * n
            if self.unseen != "compose":
                yield self._made(np.arange(first, last))(z, scale)
                continue
            cells = (by_s[:, m : m + step, None] + by_o[:, None]).mul_(self.inverse(slice(m, m + step))).flatten(1)
            start, stop = np.searchsorted(self._known, [first, last])
            place, slot = send(self._stored.device, self._known[start:stop] - first, self._slots[start:stop])
            yield cells.index_copy_(1, place, scale * z @ self._stored.index_select(0, slot).T)

    # -- state ----------------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        known, slots = send(self._stored.device, self._known, self._slots)
        destination[f"{prefix}known"], destination[f"{prefix}rows"] = known, self._stored.index_select(0, slots)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *rest: Any
    ) -> None:
        names = [f"{prefix}{name}" for name in self.grows]
        absent = [name for name in names if name not in state_dict]
        if not absent:
            known, rows = (state_dict.pop(name) for name in names)
            self._keep(self._checked(known.cpu().numpy(), rows), rows.detach().to(self._stored, copy=True))
        missing.extend(absent)
        self._inverse = None
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)

    def _checked(self, known: Ints, rows: Tensor) -> Ints:
        rising = not len(known) or (known[0] >= 0 and known[-1] < self.labels.size and (np.diff(known) > 0).all())
        if not rising or rows.shape != (len(known), self.dim):
            raise DuplexError(
                f"codebook.rows {tuple(rows.shape)} do not go with {len(known)} of {self.labels.size} compositions in "
                "rising order; train again"
            )
        return known.astype(np.int64)


Means = tuple[Tensor, Tensor, Tensor]  # mean_s [M, d], mean_o [N, d], mean_all [d]


def means_of(labels: LabelSpace, z: Tensor, compositions: Tensor) -> Means:
    n = len(labels.objects)
    return _means(z, compositions // n, len(labels.states)), _means(z, compositions % n, n), z.mean(0)


def composed_rows(means: Means, states: Tensor, objects: Tensor) -> Tensor:
    """`normalise(mean_s + mean_o - mean_all)` of some pairs [C, d]."""
    mean_s, mean_o, mean_all = means
    return normalize(mean_s.index_select(0, states) + mean_o.index_select(0, objects) - mean_all, dim=-1)


def seen_rows(z: Tensor, compositions: Tensor) -> tuple[Tensor, Tensor]:
    """Compositions that have images, rising [K], and the direction of their mean feature [K, d]."""
    present, inverse = compositions.unique(return_inverse=True)
    return present, normalize(_means(z, inverse, len(present)), dim=-1)


def _means(z: Tensor, groups: Tensor, count: int) -> Tensor:
    """Mean of `z` over each group `[count, d]`; a group without images gets the mean of all."""
    sums = torch.zeros(count, z.shape[1], dtype=z.dtype, device=z.device).index_add_(0, groups, z)
    sizes = groups.bincount(minlength=count)[:, None]
    return torch.where(sizes > 0, sums / sizes.clamp(min=1), z.mean(0))
