"""The codebook `H`: a visual prototype (estimated mean image feature) per composition, few of which are stored.

The Duplex paper's Eq. 10, for compositions of M states and N objects. A prototype that training never refined is
computed from the mean features of training images,

    h_mn = normalise(mean_s + mean_o - mean_all)    (images of state m, of object n, all images),

or, with `unseen="random"`, from a seed and the composition's index. Only the prototypes of compositions with training
images and those that were refined are stored. Logits of features z over many candidates need no other prototypes in
memory:

    z . h_mn = (z . a_m + z . b_n) / |a_m + b_n|,   a_m = mean_s - mean_all,   b_n = mean_o.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from duplex.errors import DuplexError
from duplex.labels import Ints, LabelSpace
from duplex.layers.composition_index import copy_to_device

Unseen = Literal["compose", "random"]  # initial prototypes of compositions without training images
Logits = Callable[[Tensor, float], Tensor]  # features z [B, d], 1 / tau -> z . h / tau [B, C]
ROWS = 1 << 14  # candidates up to which logits are products with prototypes; beyond it, outer sums
BLOCK = 1 << 14  # prototypes computed at a time where they are not stored
CELLS = 1 << 24  # compositions whose lengths are stored (64 MiB); with more, they are computed in blocks
DENSE = 1 << 28  # numbers that a codebook of all prototypes may hold
LEAST = 1e-12  # shortest vector that is normalised


class Codebook(nn.Module):
    """Table of visual prototypes, one per composition: random until `start` computes them; `write_back` changes them.

    The state dict holds the K stored prototypes, sorted by composition: their compositions `known [K]` and vectors
    `rows [K, d]`. The attribute `growing` lists these two names, because K differs between checkpoints. `_stored` holds
    the prototypes in the order in which they were added.
    """

    growing = ("known", "rows")
    mean_s: Tensor  # [M, d]
    mean_o: Tensor  # [N, d]
    mean_all: Tensor  # [d]
    seed: Tensor
    _stored: Tensor
    _inverse: Tensor | None

    def __init__(
        self, labels: LabelSpace, dim: int, *, unseen: Unseen, random_seen: bool, anchored: bool = False
    ) -> None:
        """Create the codebook with random prototypes.

        dim: width of a prototype.
        unseen: how prototypes of compositions without training images begin: "compose" (from means) or "random".
        random_seen: store random prototypes of the training compositions.
        anchored: keep a copy of the initial prototypes as `initial`, from which every refinement then starts.
        """
        super().__init__()
        self.labels, self.dim, self.unseen = labels, dim, unseen
        if labels.size * dim <= DENSE:  # leaves torch's generator where drawing all M * N prototypes would leave it
            skip_random_numbers(labels.size * dim)
        seen = labels.pairs["train"] if random_seen else labels.pairs["train"][:0]
        self.register_buffer("_stored", normalize(torch.randn(len(seen), dim), dim=-1), persistent=False)
        self.register_buffer("_inverse", None, persistent=False)
        self._known, self._slots = seen, np.arange(len(seen))
        if unseen == "compose":
            self.register_buffer("mean_s", torch.zeros(len(labels.states), dim))
            self.register_buffer("mean_o", torch.zeros(len(labels.objects), dim))
            self.register_buffer("mean_all", torch.zeros(dim))
        else:
            self.register_buffer("seed", torch.randint(2**62, ()))
        self.initial: Codebook | None = None  # holds the initial prototypes
        if anchored:
            self.initial = copy.deepcopy(self)

    @torch.no_grad()
    def start(self, z: Tensor, compositions: Tensor, *, seen: bool) -> None:
        """Set the means per state, per object and over all images, from which prototypes are computed, before training.

        z: unit features of training images [n, d].
        compositions: their compositions [n].
        seen: also set the prototype of each composition with images to its normalised mean feature, and discard all
        other stored prototypes.
        """
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
        """Number K of stored prototypes."""
        return len(self._known)

    def prototypes(self, compositions: Ints) -> Tensor:
        """Return the visual prototypes of `compositions` [C, d]."""
        pairs = self.labels.state_of(compositions), self.labels.object_of(compositions)
        states, objects, place, slot = copy_to_device(self._stored.device, *pairs, *self._find_stored(compositions))
        rows = self._unrefined(states, objects)
        return rows.index_copy_(0, place, self._stored.index_select(0, slot))

    def _unrefined(self, states: Tensor, objects: Tensor) -> Tensor:
        if self.unseen == "random":
            numbers = states * len(self.labels.objects) + objects
            return random_directions(self.seed, numbers, self.dim).to(self._stored.dtype)
        mean_s, mean_o = self.mean_s.index_select(0, states), self.mean_o.index_select(0, objects)
        return normalize(mean_s + mean_o - self.mean_all, dim=-1)

    def _find_stored(self, compositions: Ints) -> tuple[Ints, Ints]:
        """Return the positions in `compositions` with stored prototypes, and these prototypes' rows in `_stored`."""
        if not self.stored_count:
            return self._slots[:0], self._slots[:0]
        place = np.searchsorted(self._known, compositions).clip(max=self.stored_count - 1)
        positions = np.flatnonzero(self._known[place] == compositions)
        return positions, self._slots[place[positions]]

    @torch.no_grad()
    def write_back(self, compositions: Ints, rows: Tensor) -> None:
        """Store refined prototypes `rows` [C, d] of `compositions` [C]; all others stay the same, bit for bit."""
        positions, _ = self._find_stored(compositions)
        if len(positions) < len(compositions):
            self._make_room(np.setdiff1d(compositions, compositions[positions], assume_unique=True))
        (slots,) = copy_to_device(self._stored.device, self._find_stored(compositions)[1])
        self._stored.index_copy_(0, slots, rows.detach().to(self._stored.dtype))

    def _make_room(self, added: Ints) -> None:
        """Reserve memory for prototypes of compositions not yet stored; memory grows by a quarter at a time."""
        total = self.stored_count + len(added)
        if total > len(self._stored):
            more = max(total, min(len(self._stored) * 5 // 4, self.labels.size)) - len(self._stored)
            self._stored = torch.cat([self._stored, self._stored.new_empty(more, self.dim)])
        known = np.concatenate([self._known, added])
        order = np.argsort(known, kind="stable")
        self._slots = np.concatenate([self._slots, np.arange(self.stored_count, total)])[order]
        self._known = known[order]

    def _replace_stored(self, known: Ints, rows: Tensor) -> None:
        self._known, self._slots, self._stored = known, np.arange(len(known)), rows

    def logits_over(self, candidates: Ints | None) -> Logits:
        """Return a function `(features, scale) -> logits` [B, C] over the candidates' prototypes.

        The logits are `scale * (z . h)` of features z [B, d] and prototypes h, with `scale` = 1 / temperature.

        candidates: compositions [C]; None: all compositions.
        """
        count = self.labels.size if candidates is None else len(candidates)
        if count > ROWS and self.unseen == "compose":
            return self._logits_by_sums(candidates)
        listed = np.arange(count) if candidates is None else candidates
        if count > ROWS:
            return self._logits_in_blocks(listed)
        rows = self.prototypes(listed)
        return lambda z, scale: scale * (z @ rows.T)

    def _logits_in_blocks(self, candidates: Ints) -> Logits:
        """Return a function `(features, scale) -> logits` that computes prototypes of some candidates at a time.

        Each call computes them again: all prototypes at once would take too much memory.
        """

        def logits(z: Tensor, scale: float) -> Tensor:
            blocks = (candidates[first : first + BLOCK] for first in range(0, len(candidates), BLOCK))
            return torch.cat([scale * (z @ self.prototypes(block).T) for block in blocks], dim=1)

        return logits

    def _logits_by_sums(self, candidates: Ints | None) -> Logits:
        """Return a function `(features, scale) -> logits` that adds products of features with state and object means.

        It computes no prototypes, which saves memory; for stored prototypes, logits with the prototype replace the
        sums.
        """
        if candidates is None:  # stored prototypes in the order of memory, so that they are not copied
            order = np.argsort(self._slots)
            (place,) = copy_to_device(self._stored.device, self._known[order])
            inverse, stored = self.inverse_lengths(), self._stored[: self.stored_count]

            def combine(by_s: Tensor, by_o: Tensor) -> Tensor:
                return ((by_s[:, :, None] + by_o[:, None]) * inverse).flatten(1)

        else:
            n = len(self.labels.objects)
            numbers, place, slots = copy_to_device(self._stored.device, candidates, *self._find_stored(candidates))
            states, objects = numbers // n, numbers % n
            lengths, stored = self._lengths(states, objects), self._stored.index_select(0, slots)

            def combine(by_s: Tensor, by_o: Tensor) -> Tensor:
                return (by_s.index_select(1, states) + by_o.index_select(1, objects)) / lengths

        def logits(z: Tensor, scale: float) -> Tensor:
            return combine(*self._sums(scale * z)).index_copy_(1, place, scale * z @ stored.T)

        return logits

    def logits_by_states(self, z: Tensor, scale: float, step: int) -> Iterator[Tensor]:
        """Yield the logits over all compositions in blocks [B, step * N] of `step` states each, to save memory.

        z: features [B, d]. scale: 1 / temperature. step: number of states per block.
        """
        states, n = len(self.labels.states), len(self.labels.objects)
        by_s, by_o = self._sums(scale * z) if self.unseen == "compose" else (z, z)
        for m in range(0, states, step):
            first, last = m * n, min(m + step, states) * n
            if self.unseen == "random":
                yield self._logits_in_blocks(np.arange(first, last))(z, scale)
                continue
            inverse = self.inverse_lengths(slice(m, m + step))
            block = (by_s[:, m : m + step, None] + by_o[:, None]).mul_(inverse).flatten(1)
            start, stop = np.searchsorted(self._known, [first, last])
            indices = self._known[start:stop] - first, self._slots[start:stop]
            place, slots = copy_to_device(self._stored.device, *indices)
            yield block.index_copy_(1, place, scale * z @ self._stored.index_select(0, slots).T)

    def _sums(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return products of features [B, d] with centred state means [B, M] and with object means [B, N].

        A centred state mean is the mean feature of the state's images minus that of all images.
        """
        return z @ (self.mean_s - self.mean_all).T, z @ self.mean_o.T

    @torch.no_grad()
    def inverse_lengths(self, states: slice = slice(None)) -> Tensor:
        """Return 1 / the lengths of prototypes before normalisation [m, N], for a slice of m states and all N objects.

        The lengths are `|mean_s + mean_o - mean_all|`; they are cached unless there are too many compositions.
        """
        if self.labels.size > CELLS:
            return self._reciprocal(states)
        if self._inverse is None:
            self._inverse = self._reciprocal(slice(None))
        return self._inverse[states]

    def _reciprocal(self, states: slice) -> Tensor:
        """Compute `1 / |mean_s + mean_o - mean_all|` [m, N] of the codebook's means, for a slice of m states.

        Double precision is used because terms may cancel.
        """
        a, b = (self.mean_s[states] - self.mean_all).double(), self.mean_o.double()
        squares = torch.addmm((a * a).sum(1)[:, None] + (b * b).sum(1), a, b.T, alpha=2)
        return squares.clamp_(min=LEAST**2).rsqrt_().to(self.mean_s.dtype)

    def _lengths(self, states: Tensor, objects: Tensor) -> Tensor:
        """Return the lengths [C] of prototypes before normalisation, `|mean_s + mean_o - mean_all|`.

        states, objects: state and object index of each composition [C].
        """
        blocks = zip(states.split(BLOCK), objects.split(BLOCK), strict=True)
        lengths = [(self.mean_s[m] + self.mean_o[n] - self.mean_all).norm(dim=1) for m, n in blocks]
        return torch.cat(lengths).clamp(min=LEAST)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        known, slots = copy_to_device(self._stored.device, self._known, self._slots)
        destination[f"{prefix}known"], destination[f"{prefix}rows"] = known, self._stored.index_select(0, slots)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *rest: Any
    ) -> None:
        names = [f"{prefix}{name}" for name in self.growing]
        absent = [name for name in names if name not in state_dict]
        if not absent:
            known, rows = (state_dict.pop(name) for name in names)
            self._check(known.cpu().numpy(), rows)
            self._replace_stored(known.cpu().numpy().astype(np.int64), rows.detach().to(self._stored, copy=True))
        missing.extend(absent)
        self._inverse = None
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)

    def _check(self, known: Ints, rows: Tensor) -> None:
        rising = not len(known) or (known[0] >= 0 and known[-1] < self.labels.size and (np.diff(known) > 0).all())
        if not rising or rows.shape != (len(known), self.dim):
            raise DuplexError(
                f"codebook.rows has shape {tuple(rows.shape)} for {len(known)} entries of codebook.known; expected "
                f"({len(known)}, {self.dim}) and rising numbers below {self.labels.size}; train again"
            )


def group_means(z: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return the mean of features `z` [n, d] over each group [count, d]; a group without images gets the mean of all.

    groups: index of each feature's group [n], below `count`.
    """
    sums = torch.zeros(count, z.shape[1], dtype=z.dtype, device=z.device).index_add_(0, groups, z)
    sizes = groups.bincount(minlength=count)[:, None]
    return torch.where(sizes > 0, sums / sizes.clamp(min=1), z.mean(0))


STEP = 1 << 22  # numbers drawn at a time and discarded; a multiple of 16, as torch draws them
MIX = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # odd multipliers of splitmix64 (Steele et al., 2014), signed
GOLDEN = -0x61C8864680B583EB  # its increment


def skip_random_numbers(count: int) -> None:
    """Advance torch's random generator as if drawing `count` normal numbers, with little memory."""
    while count >= 2 * STEP:
        torch.randn(STEP)
        count -= STEP
    torch.randn(count)


def random_directions(seed: Tensor, numbers: Tensor, dim: int) -> Tensor:
    """Return a random unit vector [C, d] per integer in `numbers` [C]; it depends only on `seed` and the integer."""
    cells = numbers[:, None] * dim + torch.arange(dim, device=numbers.device)
    bits = _mixed(seed + GOLDEN * (cells + 1))
    # Box-Muller: 24 bits give a length, 24 others an angle
    u, v = ((_shifted(bits, by) & 0xFFFFFF).to(torch.float32) for by in (40, 8))
    length = (-2 * ((u + 1) / 2**24).log()).sqrt()
    return normalize(length * (2 * math.pi / 2**24 * v).cos(), dim=-1)


def _mixed(x: Tensor) -> Tensor:
    """Hash int64 values by splitmix64's finaliser, to draw random vectors from them."""
    x = (x ^ _shifted(x, 30)) * MIX[0]
    x = (x ^ _shifted(x, 27)) * MIX[1]
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift int64 bits right, filling with zeros, unlike torch's signed shift."""
    return (x >> by) & ((1 << (64 - by)) - 1)
