"""The codebook `H`: a visual prototype (estimated mean feature) per composition, most not stored.

    h_mn = normalise(mean_s + mean_o - mean_all)                            our choice (`compose`)
    h' = normalise(lambda h + (1 - lambda) message), lambda: momentum       Eq. 17-18 of the Duplex paper
    z . h_mn = (z . a_m + z . b_n) / |a_m + b_n|,   a_m = mean_s - mean_all,   b_n = mean_o

* mean_s, mean_o, mean_all: mean features of the training images of state m, of object n, and of
  all

Only prototypes of compositions with training images, and those that training refined, are stored;
the others are composed by the first formula when needed. With `unseen="random"`, an ablation, they
are taken from a random table; with `unseen="empty"` they are zero vectors, with logits of 0.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from duplex.labels import Bools, Ints, LabelSpace
from duplex.methods.layers import copy_to_device

Unseen = Literal["compose", "random", "empty"]  # initial prototypes of compositions without training images
Logits = Callable[[Tensor, float], Tensor]  # features z [B, d], 1 / tau -> z . h / tau [B, C]
ROWS = 1 << 14  # candidates up to which logits are products with prototypes; beyond it, outer sums
BLOCK = 1 << 14  # compositions worked on at a time
DENSE = 1 << 28  # numbers of all prototypes up to which the initial random state depends on them
LEAST = 1e-12  # shortest vector that is normalised


class Codebook(nn.Module):
    """A visual prototype for each composition: initialised by `start`, changed by `write_back`.

    The state dict holds only the K stored prototypes `rows [K, d]`, of `known [K]`.

    unseen, random_seen: initial prototypes of compositions without and with training images.
    anchored: whether to keep the initial prototypes, from which every refinement can start.
    """

    growing = ("known", "rows")
    mean_s: Tensor  # [M, d]
    mean_o: Tensor  # [N, d]
    mean_all: Tensor  # [d]
    seed: Tensor
    _stored: Tensor  # prototypes in the order in which they were added; the last rows may be free
    _inverse: Tensor | None  # of the lengths of all prototypes before normalisation
    _random: Tensor | None  # all prototypes as they begin with `unseen="random"`

    def __init__(
        self, labels: LabelSpace, dim: int, *, unseen: Unseen, random_seen: bool, anchored: bool = False
    ) -> None:
        super().__init__()
        self.labels = labels
        self.dim = dim
        self.unseen = unseen
        if labels.size * dim <= DENSE:  # other parameters are drawn after M * N prototypes
            for first in range(0, labels.size, BLOCK):
                torch.randn(min(BLOCK, labels.size - first), dim)
        seen = labels.pairs["train"] if random_seen else labels.pairs["train"][:0]
        self.register_buffer("_stored", normalize(torch.randn(len(seen), dim), dim=-1), persistent=False)
        self.register_buffer("_inverse", None, persistent=False)
        self.register_buffer("_random", None, persistent=False)
        self._known = seen
        self._slots = np.arange(len(seen))
        if unseen == "compose":
            self.register_buffer("mean_s", torch.zeros(len(labels.states), dim))
            self.register_buffer("mean_o", torch.zeros(len(labels.objects), dim))
            self.register_buffer("mean_all", torch.zeros(dim))
        elif unseen == "random":
            self.register_buffer("seed", torch.randint(2**62, ()))
        self.initial: Codebook | None = None  # holds the initial prototypes
        if anchored:
            self.initial = copy.deepcopy(self)

    @torch.no_grad()
    def start(self, z: Tensor, compositions: Tensor, *, seen: bool) -> None:
        """Compute means of features `z` [n, d] by state, object, in all; if `seen`, by pair."""
        if self.unseen == "compose":
            n = len(self.labels.objects)
            self.mean_s.copy_(group_means(z, compositions // n, len(self.labels.states)))
            self.mean_o.copy_(group_means(z, compositions % n, n))
            self.mean_all.copy_(z.mean(0))
            self._inverse = None
        if seen:
            present, inverse = compositions.unique(return_inverse=True)
            rows = normalize(group_means(z, inverse, len(present)), dim=-1)
            self._replace_stored(present.cpu().numpy(), rows.to(self._stored))
        if self.initial is not None:
            self.initial.start(z, compositions, seen=seen)

    @property
    def stored_count(self) -> int:
        return len(self._known)

    def is_empty(self, compositions: Ints) -> Bools:
        """Which of the `compositions` have no prototype yet."""
        empty = np.full(len(compositions), self.unseen == "empty")
        empty[self._find_stored(compositions)[0]] = False
        return empty

    def prototypes(self, compositions: Ints) -> Tensor:
        found = self._find_stored(compositions)
        numbers, place, slot = copy_to_device(self._stored.device, compositions, *found)
        if self.unseen == "random":
            if self._random is None:
                random = torch.Generator().manual_seed(int(self.seed))
                drawn = torch.randn(self.labels.size, self.dim, generator=random)
                self._random = normalize(drawn, dim=-1).to(self._stored)
            rows = self._random.index_select(0, numbers)
        elif self.unseen == "empty":
            rows = self._stored.new_zeros(len(numbers), self.dim)
        else:
            n = len(self.labels.objects)
            mean_s = self.mean_s.index_select(0, numbers // n)
            mean_o = self.mean_o.index_select(0, numbers % n)
            rows = normalize(mean_s + mean_o - self.mean_all, dim=-1)
        return rows.index_copy_(0, place, self._stored.index_select(0, slot))

    def _find_stored(self, compositions: Ints) -> tuple[Ints, Ints]:
        if not self.stored_count:
            return self._slots[:0], self._slots[:0]
        place = np.searchsorted(self._known, compositions).clip(max=self.stored_count - 1)
        positions = np.flatnonzero(self._known[place] == compositions)
        return positions, self._slots[place[positions]]

    @torch.no_grad()
    def write_back(self, compositions: Ints, rows: Tensor) -> None:
        """Store the refined prototypes `rows` [C, d] of `compositions`."""
        positions, _ = self._find_stored(compositions)
        if len(positions) < len(compositions):
            self._make_room(np.setdiff1d(compositions, compositions[positions], assume_unique=True))
        (slots,) = copy_to_device(self._stored.device, self._find_stored(compositions)[1])
        self._stored.index_copy_(0, slots, rows.detach().to(self._stored.dtype))

    def _make_room(self, added: Ints) -> None:
        total = self.stored_count + len(added)
        if total > len(self._stored):
            more = max(total, min(len(self._stored) * 5 // 4, self.labels.size)) - len(self._stored)
            self._stored = torch.cat([self._stored, self._stored.new_empty(more, self.dim)])
        known = np.concatenate([self._known, added])
        order = np.argsort(known, kind="stable")
        self._slots = np.concatenate([self._slots, np.arange(self.stored_count, total)])[order]
        self._known = known[order]

    def _replace_stored(self, known: Ints, rows: Tensor) -> None:
        self._known = known
        self._slots = np.arange(len(known))
        self._stored = rows

    def logits_over(self, candidates: Ints | None) -> Logits:
        """`(z, scale) -> scale * (z . h)` [B, C], h: prototypes of `candidates` (None: all)."""
        count = self.labels.size if candidates is None else len(candidates)
        if count > ROWS and self.unseen == "compose":
            return self._logits_by_sums(candidates)
        if count > ROWS and self.unseen == "empty":
            return self._logits_of_stored(np.arange(count) if candidates is None else candidates)
        rows = self.prototypes(np.arange(count) if candidates is None else candidates)
        return lambda z, scale: scale * (z @ rows.T)

    def _logits_by_sums(self, candidates: Ints | None) -> Logits:
        if candidates is None:  # in the order of memory, so that none is copied
            (place,) = copy_to_device(self._stored.device, self._known[np.argsort(self._slots)])
            inverse = self.inverse_lengths()
            stored = self._stored[: self.stored_count]

            def combine(by_s: Tensor, by_o: Tensor) -> Tensor:
                return ((by_s[:, :, None] + by_o[:, None]) * inverse).flatten(1)

        else:
            n = len(self.labels.objects)
            found = self._find_stored(candidates)
            numbers, place, slots = copy_to_device(self._stored.device, candidates, *found)
            states, objects = numbers // n, numbers % n
            blocks = zip(states.split(BLOCK), objects.split(BLOCK), strict=True)
            norms = [(self.mean_s[m] + self.mean_o[n] - self.mean_all).norm(dim=1) for m, n in blocks]
            lengths = torch.cat(norms).clamp(min=LEAST)
            stored = self._stored.index_select(0, slots)

            def combine(by_s: Tensor, by_o: Tensor) -> Tensor:
                return (by_s.index_select(1, states) + by_o.index_select(1, objects)) / lengths

        def logits(z: Tensor, scale: float) -> Tensor:
            y = scale * z
            sums = combine(y @ (self.mean_s - self.mean_all).T, y @ self.mean_o.T)
            return sums.index_copy_(1, place, y @ stored.T)

        return logits

    def _logits_of_stored(self, candidates: Ints) -> Logits:
        place, slots = copy_to_device(self._stored.device, *self._find_stored(candidates))
        stored = self._stored.index_select(0, slots)

        def logits(z: Tensor, scale: float) -> Tensor:
            empty = z.new_zeros(len(z), len(candidates))
            return empty.index_copy(1, place, scale * (z @ stored.T))

        return logits

    @torch.no_grad()
    def inverse_lengths(self) -> Tensor:
        """Factors [M, N] that scale sums of a state's and an object's vector to unit length."""
        if self._inverse is None:  # in double precision, because terms may cancel
            a = (self.mean_s - self.mean_all).double()
            b = self.mean_o.double()
            squares = torch.addmm((a * a).sum(1)[:, None] + (b * b).sum(1), a, b.T, alpha=2)
            self._inverse = squares.clamp_(min=LEAST**2).rsqrt_().to(self.mean_s.dtype)
        return self._inverse

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        known, slots = copy_to_device(self._stored.device, self._known, self._slots)
        destination[f"{prefix}known"] = known
        destination[f"{prefix}rows"] = self._stored.index_select(0, slots)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *rest: Any
    ) -> None:
        names = [f"{prefix}{name}" for name in self.growing]
        absent = [name for name in names if name not in state_dict]
        if not absent:
            known = state_dict.pop(f"{prefix}known").cpu().numpy().astype(np.int64)
            rows = state_dict.pop(f"{prefix}rows")
            self._replace_stored(known, rows.detach().to(self._stored, copy=True))
        missing.extend(absent)
        self._inverse = None
        self._random = None
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)


class TrainedCodebook(nn.Module):
    """A codebook trained by gradients; if `anchored`, refinement starts at `initial`."""

    def __init__(self, labels: LabelSpace, initial: Codebook, *, anchored: bool) -> None:
        super().__init__()
        self.labels = labels
        self.beginning = initial
        self.anchored = anchored
        self.H = nn.Parameter(torch.zeros(labels.size, initial.dim))  # [M * N, d]
        self._empty: Bools | None = None  # whether each row is zero [M * N]

    @property
    def initial(self) -> Codebook | None:
        return self.beginning if self.anchored else None

    @torch.no_grad()
    def start(self, z: Tensor, compositions: Tensor, *, seen: bool) -> None:
        self.beginning.start(z, compositions, seen=seen)
        for block in np.array_split(np.arange(self.labels.size), math.ceil(self.labels.size / BLOCK)):
            self.H[block[0] : block[-1] + 1] = self.beginning.prototypes(block)
        self._empty = None

    def is_empty(self, compositions: Ints) -> Bools:
        """Which of the `compositions` have no prototype yet."""
        if self._empty is None:
            self._empty = ~self.H.detach().any(1).cpu().numpy()
        return self._empty[compositions]

    def prototypes(self, compositions: Ints) -> Tensor:
        (numbers,) = copy_to_device(self.H.device, compositions)
        h = self.H.index_select(0, numbers)
        rows = normalize(h, dim=-1)
        # an empty row gets no gradient, which normalisation would multiply by 1 / 1e-12
        return rows * h.detach().any(1, keepdim=True) if self.beginning.unseen == "empty" else rows

    @torch.no_grad()
    def write_back(self, compositions: Ints, rows: Tensor) -> None:
        (numbers,) = copy_to_device(self.H.device, compositions)
        self.H.index_copy_(0, numbers, rows.detach().to(self.H.dtype))
        if self._empty is not None:
            self._empty[compositions] = False

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self._empty = None
        super()._load_from_state_dict(*arguments)

    def logits_over(self, candidates: Ints | None) -> Logits:
        rows = self.prototypes(np.arange(self.labels.size) if candidates is None else candidates)
        return lambda z, scale: scale * (z @ rows.T)


def refined_rows(
    codebook: Codebook | TrainedCodebook,
    compositions: Ints,
    messages: Tensor,
    reached: Tensor,
    momentum: float,
    composed: Tensor | None = None,
) -> Tensor:
    """Refined prototypes of `compositions` [C, d], which `write_back` stores (Eq. 17-18).

    messages: the mean message to each composition [C, d]; reached: whether it receives any [C].
    momentum: weight of the old prototype; for an anchored codebook, of the initial one.
    composed: initial prototypes [C, d], which take the place of empty ones.
    """
    rows = codebook.prototypes(compositions)
    old = rows if codebook.initial is None else codebook.initial.prototypes(compositions)
    if composed is not None:
        rows = fill_empty(rows, composed)
        old = fill_empty(old, composed)
    return torch.where(reached[:, None], blend(old, messages, momentum), rows)


def fill_empty(rows: Tensor, composed: Tensor) -> Tensor:
    """`rows` [C, d], with rows of `composed` where they are zero."""
    return torch.where(rows.detach().any(1, keepdim=True), rows, composed)


def blend(rows: Tensor, messages: Tensor, momentum: float) -> Tensor:
    if momentum == 1.0:
        return rows
    return normalize(momentum * rows + (1.0 - momentum) * messages, dim=-1)


def group_means(z: Tensor, groups: Tensor, count: int) -> Tensor:
    """Mean feature of each group [count, d]; a group without images gets the mean of all."""
    sums = torch.zeros(count, z.shape[1], dtype=z.dtype, device=z.device).index_add_(0, groups, z)
    sizes = groups.bincount(minlength=count)[:, None]
    return torch.where(sizes > 0, sums / sizes.clamp(min=1), z.mean(0))
