"""A bit that changes on the disk is noticed by everything that reads the values."""

import binascii
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from duplex.errors import DuplexError
from duplex.features.file import read_features, row_checksums
from duplex.features.inspect import verify
from duplex.features.shards import join_shards
from duplex.features.tokens import DiskTokens, read_tokens

Reader = Callable[[Path], object]


@given(
    block=st.sampled_from([np.float16, np.int8, np.uint8]).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=2, max_dims=4, max_side=4))
    ),
    status=st.integers(0, 255),
)
def test_checksums_are_those_of_the_bytes_of_status_and_row(block: np.ndarray, status: int) -> None:
    statuses = np.full(len(block), status, np.uint8)
    assert row_checksums(block).tolist() == [binascii.crc32(row.tobytes()) for row in block]
    assert row_checksums(block, statuses).tolist() == [binascii.crc32(bytes([status]) + row.tobytes()) for row in block]


def flip_bit(path: Path, name: str, row: int) -> None:
    with h5py.File(path, "r") as file:
        data = file[name]
        size = data.nbytes // len(data)
        place = data.id.get_offset() + (row + 1) * size - 1
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def cache(run) -> Path:
    return run(tokens="patch", block_inputs=1).path


READERS: dict[str, tuple[str, Reader]] = {
    "features": ("cls", read_features),
    "tokens in memory": ("block_inputs", lambda path: read_tokens(path, "block_inputs")),
    "on disk": ("block_inputs", lambda path: DiskTokens.open(path, "block_inputs")[torch.tensor([6, 5])]),
}


@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=READERS)
def test_a_flipped_bit_is_named_by_each_reader(cache: Path, name: str, read: Reader) -> None:
    read(cache)
    flip_bit(cache, name, 5)
    with pytest.raises(DuplexError, match=rf"is damaged: row 5 of '{name}' does not match.*duplex extract.*again"):
        read(cache)
    flip_bit(cache, name, 5)
    read(cache)


def test_a_status_of_another_readable_row_is_noticed(cache: Path) -> None:
    """From "encoded" to "missing" is one bit, and would leave an image out."""
    with h5py.File(cache, "r+") as file:
        file["status"][7] = 3
    with pytest.raises(DuplexError, match="row 7 of 'cls' does not match its checksum"):
        read_features(cache)


@pytest.mark.parametrize("name", ["cls", "patch", "checksums"])
def test_verify_reads_every_row_and_extraction_starts_again(cache, run, encoder, images, tmp_path, name, capsys):
    whole = cache.read_bytes()
    flip_bit(cache, name, 31)
    with pytest.raises(DuplexError, match=r"row 31 of .* does not match its checksum"):
        verify(cache, encoder, images, tmp_path / "pictures", "m" * 64, sample=1)
    run(tokens="patch", block_inputs=1)
    assert cache.read_bytes() == whole and "does not match its checksum; extracting again" in capsys.readouterr().err


def test_a_damaged_row_is_never_copied(run, tmp_path: Path) -> None:
    for k in range(2):
        shard = run(shard=(k, 2)).path
    flip_bit(shard, "cls", 3)
    with pytest.raises(DuplexError, match="row 3 of 'cls' does not match its checksum"):
        join_shards(tmp_path / "features.h5")
    assert not (tmp_path / "features.h5").exists()
