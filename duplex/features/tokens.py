"""Read tokens (patch tokens, block inputs or pixels) from a feature cache, and join features and labels into examples.

What does not fit into memory stays on disk: a method then gets `DiskTokens` instead of a tensor.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.errors import DuplexError
from duplex.features import file as cache_file
from duplex.features.file import (
    NEGATIVE_CHECKSUMS,
    NEGATIVES,
    PIXELS,
    DamagedCache,
    open_cache,
    read_rows,
    refuse_wrong,
    repair_hint,
    row_checksums,
)
from duplex.labels import SPLITS, Ints, LabelSpace

if TYPE_CHECKING:
    import pandas as pd

IN_MEMORY = 2**31  # default budget in bytes: more tokens than this stay on the disk, on any machine
BLOCK = 2**22  # bytes of a block of neighbouring rows; `training.memory` is at least this
WINDOW = 64  # blocks whose rows are mixed
ANNOUNCED = 2**17  # bytes per hint; the system cuts longer ones to the device's window, 128 KiB by default
CPU = torch.device("cpu")


def read_negatives(file: Any) -> NDArray[np.float16] | None:
    """Features [K, d] of drawn images of no pair in an open cache; None if it has none."""
    if NEGATIVES not in file:
        return None
    values: NDArray[np.float16] = file[NEGATIVES][...]
    refuse_wrong(NEGATIVES, np.arange(len(values)), row_checksums(values) != file[NEGATIVE_CHECKSUMS][...])
    return values


def read_tokens(
    path: Path, name: str = "patch", limit: int = IN_MEMORY, rows: Ints | None = None
) -> NDArray[Any] | DiskTokens | None:
    """Tokens [N, ...] of all images or `rows`: "patch", "block_inputs" or "pixels"; None if not stored.

    Up to `limit` bytes are read into memory; more stay on disk.
    """
    with open_cache(path) as file:
        if name not in file:
            return None
        if rows is None and file[name].nbytes <= limit:
            return read_rows(file, name)
    tokens = DiskTokens.open(path, name)
    if rows is not None:
        tokens = tokens.at(rows)
        if int(np.prod(tokens.shape)) * (1 if name == PIXELS else 2) <= limit:
            return tokens[:].numpy()
    return tokens


class MappedRows:
    """An array in a cache file that stays on disk (memory-mapped); only rows that are read are loaded."""

    def __init__(self, file: Any, name: str, mapped: mmap.mmap) -> None:
        self.name = name
        self._mapped = mapped
        self._offset = file[name].id.get_offset()
        self._rows = np.ndarray(file[name].shape, file[name].dtype, buffer=mapped, offset=self._offset)
        self._checksums = cache_file.stored_checksums(file, name)
        self._unread = np.ones(len(self._rows), dtype=bool)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._rows.shape

    def read(self, rows: Ints) -> NDArray[Any]:
        """Read rows from disk; raises `DamagedCache` if a row does not match its checksum when first read."""
        values = self._rows.take(rows, axis=0)
        self._mapped.madvise(mmap.MADV_DONTNEED)  # the system caches the pages, not this process
        unread = self._unread[rows]
        if unread.any():
            first = rows[unread]
            wrong = row_checksums(values if unread.all() else values[unread]) != self._checksums[first]
            refuse_wrong(self.name, first, wrong)
            self._unread[rows] = False
        return values

    def read_ahead(self, rows: Ints) -> None:
        size = self._rows[0].nbytes
        for row in rows.tolist():
            start = self._offset + row * size
            stop = start + size
            start -= start % mmap.PAGESIZE
            for place in range(start, stop, ANNOUNCED):
                self._mapped.madvise(mmap.MADV_WILLNEED, place, min(ANNOUNCED, stop - place))


@dataclass(frozen=True, eq=False)
class DiskTokens:
    """Patch tokens that stay in the cache file: `tokens[rows]` reads those of the images `rows`."""

    path: Path
    stored: MappedRows
    rows: Ints  # rows of the cache that this object stands for
    device: torch.device = CPU  # receives the rows that are read

    @classmethod
    def open(cls, path: Path, name: str = "patch") -> DiskTokens:
        """Open the tokens of all images in a feature cache; `name` says which, such as `patch` or `block_inputs`."""
        with open_cache(path) as file:
            stored = MappedRows(file, name, mmap.mmap(file.id.get_vfd_handle(), 0, access=mmap.ACCESS_READ))
        return cls(path, stored, np.arange(stored.shape[0]))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.stored.shape[1:])

    def at(self, places: Ints) -> DiskTokens:
        """Select the tokens of the images at the positions `places`, in this order; nothing is read from disk yet."""
        return replace(self, rows=self.rows[places])

    def to(self, device: torch.device) -> DiskTokens:
        return replace(self, device=device)

    def read_ahead(self, places: Tensor) -> None:
        """Tell the operating system that the tokens at positions `places` will be read soon."""
        self.stored.read_ahead(self.rows[places.cpu().numpy()])

    def __getitem__(self, key: Tensor | slice) -> Tensor:
        rows = self.rows[key if isinstance(key, slice) else key.cpu().numpy()]
        try:
            values = torch.from_numpy(self.stored.read(rows))
        except DamagedCache as error:
            raise DuplexError(f"{self.path} is damaged: {error}; {repair_hint(self.path)}") from error
        if self.device.type == "cuda":  # pinned, so that the host need not wait for the copy
            return values.pin_memory().to(self.device, non_blocking=True)
        return values.to(self.device)

    def shuffled_rows(self, generator: torch.Generator) -> Tensor:
        """All positions: blocks of adjacent images in random order, shuffled within `WINDOW` blocks."""
        blocks = torch.arange(len(self)).split(max(1, BLOCK // (int(np.prod(self.shape[1:])) * 2)))
        drawn = torch.randperm(len(blocks), generator=generator).tolist()
        mixed = []
        for start in range(0, len(drawn), WINDOW):
            rows = torch.cat([blocks[number] for number in drawn[start : start + WINDOW]])
            mixed.append(rows[torch.randperm(len(rows), generator=generator)])
        return torch.cat(mixed)


Arrays = Mapping[str, np.ndarray | DiskTokens]  # rows of a cache, by input name


@dataclass(frozen=True)
class Examples:
    """The cached features and the labels of one split's readable images."""

    rows: Ints  # manifest rows [n]
    inputs: Mapping[str, Tensor]  # cached inputs: {"cls": [n, d], "patch": [n, T, w], …}
    compositions: Tensor  # label of each image [n]; negative if only its state or object is known

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def cls(self) -> Tensor:
        return self.inputs["cls"]

    def to(self, device: torch.device) -> Examples:
        inputs = {name: values.to(device) for name, values in self.inputs.items()}
        return Examples(self.rows, inputs, self.compositions.to(device))


def join_labels(manifest: pd.DataFrame, labels: LabelSpace, inputs: Arrays, bad: np.ndarray) -> dict[str, Examples]:
    """Join features and labels: each split's examples, without unreadable images (mask `bad`)."""
    if len(manifest) != len(bad):
        raise DuplexError(
            f"the manifest has {len(manifest)} rows, but its feature cache has {len(bad)}; run `dvc repro extract`"
        )
    compositions = torch.from_numpy(labels.partial_index(manifest["state"].tolist(), manifest["object"].tolist()))
    splits = manifest["split"].to_numpy()
    rows = {split: np.flatnonzero((splits == split) & ~bad) for split in SPLITS}
    examples = {}
    for split, chosen in rows.items():
        selected: dict[str, Any] = {}
        for name, values in inputs.items():
            selected[name] = values.at(chosen) if isinstance(values, DiskTokens) else torch.from_numpy(values[chosen])
        selected["cls"] = selected["cls"].float()  # tokens keep the type of the cache
        examples[split] = Examples(chosen, selected, compositions[chosen])
    return examples
