"""Whatever bytes lie in a file: a result or one sentence. Ten thousand of each kind in the long part."""

from __future__ import annotations

import io
import json
import resource
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duplex.cli.score import _score
from duplex.config.params import load_params
from duplex.data.manifest import read_manifest
from duplex.errors import DuplexError
from duplex.features.extraction import finished_marks
from duplex.features.inspection import inspect
from duplex.features.layout import ENCODED, Span
from duplex.features.store import PartialCache, open_features
from duplex.labels import LabelSpace
from duplex.report.aggregate import aggregate, metrics_table
from duplex.report.curves import margins_of
from duplex.report.results import read_predictions, read_tree
from duplex.system.hdf5 import Unfit, read_attribute, refuse_endless
from duplex.training.checkpoint import load_checkpoint, read_record, save_checkpoint
from tests.methods.world import small_method, small_setting
from tests.subprocesses import ROOT
from tests.training.test_checkpoint import ENCODER, RECORD

FEW, MANY = 60, 10_000
HANG = timedelta(seconds=20)
GROWTH = 2 << 20  # kilobytes: 2 GiB
WORDS = {
    "yaml": [
        b"&a ",
        b"*a",
        b"[",
        b"]",
        b"{",
        b"}",
        b": ",
        b"- ",
        b"\t",
        b"!!",
        b"? ",
        b"|",
        b"9" * 5000,
        b"~",
        b"'",
        b"\n",
    ],
    "json": [b"[", b"]", b"{", b"}", b"null", b"NaN", b"1e999", b"-", b'"', b",", b"9" * 400, b"true", b"\\ud800"],
    "csv": [b",", b'"', b"\n", b"\r", b";", b"\t", b"\0", b"../", b"/", b"train", b"nan", b"1e999", b"\xef\xbb\xbf"],
    "binary": [
        b"\0" * 8,
        b"\xff" * 8,
        b"\x01\x00\x00\x00",
        b"\x7f",
        b"\x89HDF\r\n\x1a\n",
        b"TREE",
        b"SNOD",
        b"PK\x03\x04",
    ],
}
IDENTITY = {"encoder": "e", "weights": "w", "precision": "fp32", "preprocessing": "p", "manifest": "m", "dim": "3"}
METRICS = {"closed": {"seen": 1.0, "auc": 0.5, "auc_low": 0.1}, "groups": {"head": {"accuracy": 1.0}}, "val_auc": 3.0}


def edits(kind: str) -> st.SearchStrategy[list[tuple[float, str, bytes]]]:
    """Where (a share of the file), what is done, and with which bytes."""
    piece = st.one_of(st.sampled_from(WORDS[kind]), st.binary(min_size=1, max_size=6))
    one = st.tuples(st.floats(0, 1), st.sampled_from(["insert", "replace", "delete", "cut", "repeat"]), piece)
    return st.lists(one, min_size=1, max_size=5)


def edited(data: bytes, changes: list[tuple[float, str, bytes]]) -> bytes:
    for share, how, piece in changes:
        at = int(share * len(data))
        middle = {"insert": piece, "replace": piece, "delete": b"", "cut": b"", "repeat": data[at : at + 40] * 3}[how]
        skip = {"insert": 0, "replace": len(piece), "delete": 1 + 8 * len(piece), "cut": len(data), "repeat": 0}[how]
        data = data[:at] + middle + data[at + skip :]
    return data


def cache(folder: Path) -> bytes:
    made = PartialCache.create(folder / "seed.h5", IDENTITY, Span(0, 4, 4), 3)
    made.write(0, np.full(4, ENCODED, np.uint8), cls=np.ones((4, 3), np.float16))
    made.finish()
    return (folder / "seed.h5").read_bytes()


def scores_npz(_: Path) -> bytes:
    stream = io.BytesIO()
    values = np.random.default_rng(0).random((6, 4), np.float32)
    np.savez(stream, scores=values, target=np.arange(6) % 4, seen=np.array([1, 1, 0, 0]), k=np.array([1, 2]))
    return stream.getvalue()


def scores_h5(folder: Path) -> bytes:
    with h5py.File(folder / "seed.h5", "w") as file:
        file["scores"] = np.random.default_rng(0).random((6, 4), np.float32)
        file["target"], file["seen"], file["state"] = np.arange(6) % 4, np.array([1, 1, 0, 0]), ["a", "b", "a", "b"]
    return (folder / "seed.h5").read_bytes()


def predictions(_: Path) -> bytes:
    rows = [f"{i},a{i}.jpg,red star,{i % 2},1,0.{i},red star,red moon,blue star,closed" for i in range(6)]
    return ("row,image,label,seen,right,margin,top1,top2,top3,world\n" + "\n".join(rows) + "\n").encode()


def manifest(_: Path) -> bytes:
    return b"image,state,object,split\n" + b"".join(b"a%d.jpg,red,star,train\n" % i for i in range(5))


def labels(_: Path) -> bytes:
    pairs = {"train": [0, 1], "val": [2], "test": [3]}
    return json.dumps({"states": ["red", "blue"], "objects": ["star", "moon"], "pairs": pairs}).encode()


def checkpoint(folder: Path) -> bytes:
    save_checkpoint(folder / "seed.safetensors", small_method(RECORD.options, dtype=torch.float32), RECORD)
    return (folder / "seed.safetensors").read_bytes()


def look_at_checkpoint(path: Path) -> None:
    read_record(path)
    load_checkpoint(path, small_setting(dtype=torch.float32), ENCODER)


def look_at_cache(path: Path) -> None:
    finished_marks(path, {**IDENTITY}, Span(0, 4, 4))
    for look in (inspect, open_features):
        try:
            look(path)
        except DuplexError as error:
            _one_sentence(error)
    path.rename(path.with_name(path.name + ".partial"))
    try:
        PartialCache(path).close()
    except Unfit as error:
        _one_sentence(error)
    finally:
        path.with_name(path.name + ".partial").rename(path)


def look_at_scores(path: Path) -> None:
    for protocol in ("exact", "sampled"):
        try:
            _score(path, None, protocol, 0, 0)
        except DuplexError as error:
            _one_sentence(error)


def look_at_metrics(path: Path) -> None:
    metrics_table(aggregate({("a", "m"): [read_tree(path) or {}]}))


def look_at_predictions(path: Path) -> None:
    table = read_predictions(path)
    if table is not None:
        margins_of(table, "closed")


KINDS: dict[str, tuple[str, str, Callable[[Path], bytes], Callable[[Path], object]]] = {
    "params": ("p.yaml", "yaml", lambda _: (ROOT / "params.yaml").read_bytes(), load_params),
    "manifest": ("m.csv", "csv", manifest, read_manifest),
    "labels": ("l.json", "json", labels, LabelSpace.load),
    "cache": ("c.h5", "binary", cache, look_at_cache),
    "scores_npz": ("s.npz", "binary", scores_npz, look_at_scores),
    "scores_h5": ("s.h5", "binary", scores_h5, look_at_scores),
    "checkpoint": ("c.safetensors", "json", checkpoint, look_at_checkpoint),
    "metrics": ("m.json", "json", lambda _: json.dumps(METRICS).encode(), look_at_metrics),
    "predictions": ("p.csv", "csv", predictions, look_at_predictions),
}


def _one_sentence(error: Exception) -> None:
    assert str(error) and "Traceback" not in str(error)


@dataclass
class Tried:
    files: int = 0
    grown: int = 0  # kilobytes of memory


def fuzz(folder: Path, kind: str, examples: int) -> Tried:
    name, words, make, look = KINDS[kind]
    seed, path, bystander = make(folder), folder / name, folder / "bystander"
    bystander.write_text("precious")
    tried = Tried()

    @settings(max_examples=examples, deadline=HANG, database=None, suppress_health_check=list(HealthCheck))
    @given(edits(words))
    def attempt(changes: list[tuple[float, str, bytes]]) -> None:
        data = edited(seed, changes)
        path.write_bytes(data)
        tried.files += 1
        try:
            look(path)
        except DuplexError as error:
            _one_sentence(error)
        assert path.read_bytes() == data and bystander.read_text() == "precious"

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    attempt()
    tried.grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return tried


@pytest.mark.parametrize("kind", KINDS)
def test_any_bytes(tmp_path: Path, kind: str) -> None:
    tried = fuzz(tmp_path, kind, FEW)
    assert tried.files >= FEW and tried.grown < GROWTH


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_of_each(tmp_path: Path, kind: str) -> None:
    tried = fuzz(tmp_path, kind, MANY)
    assert tried.files >= MANY and tried.grown < GROWTH


def test_what_is_edited_is_sound_to_begin_with(tmp_path: Path) -> None:
    """Else every edit would fail at the first byte, and nothing behind it would be tried."""
    for name, _, make, look in KINDS.values():
        data = make(tmp_path)
        (tmp_path / name).write_bytes(data)
        look(tmp_path / name)
    assert len(open_features(tmp_path / "c.h5").cls) == 4
    assert _score(tmp_path / "s.h5", None, "exact", 0, 0) and _score(tmp_path / "s.npz", None, "sampled", 0, 0)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_texts_that_never_end(tmp_path: Path, at: int) -> None:
    """A heap in which an object takes no room: HDF5 2.0 itself would read it for ever."""
    data = bytearray(scores_h5(tmp_path))
    heap = data.index(b"GCOL") + 16 + 24 * at  # an object of one letter: 16 bytes of head and 8 of content
    data[heap : heap + 16] = bytes(16)
    (tmp_path / "s.h5").write_bytes(data)
    with pytest.raises(DuplexError, match=r"s\.h5: 'state'.*never ends|s\.h5: its texts are damaged.*never ends"):
        _score(tmp_path / "s.h5", None, "exact", 0, 0)


@pytest.mark.parametrize("chunks", [None, (3,)])
def test_texts_that_claim_more_than_their_file_holds(tmp_path: Path, chunks: tuple[int] | None) -> None:
    """HDF5 makes room for a text before it looks for it: 4 GiB, for a reference of which four bytes are damaged."""
    scores_h5(tmp_path)
    with h5py.File(tmp_path / "s.h5", "w") as file, h5py.File(tmp_path / "seed.h5") as seed:
        for name in ("scores", "target", "seen"):
            seed.copy(name, file)
        file.create_dataset("state", data=["a", "b", "a", "b"], dtype=h5py.string_dtype(), chunks=chunks)
    _score(tmp_path / "s.h5", None, "exact", 0, 0)
    data = bytearray((tmp_path / "s.h5").read_bytes())
    heap = data.index(b"GCOL")
    reference = data.index(b"\x01\0\0\0" + heap.to_bytes(8, "little"))
    data[reference : reference + 4] = b"\xff\xff\xff\xff"
    (tmp_path / "s.h5").write_bytes(data)
    with pytest.raises(DuplexError, match=r"s\.h5: 'state' is damaged: its texts claim 4,294,967,2"):
        _score(tmp_path / "s.h5", None, "exact", 0, 0)


def test_packed_texts_are_refused_with_what_to_do(tmp_path: Path) -> None:
    scores_h5(tmp_path)
    with h5py.File(tmp_path / "seed.h5", "a") as file:
        del file["state"]
        file.create_dataset("state", data=["a", "b", "a", "b"], dtype=h5py.string_dtype(), compression="gzip")
    with pytest.raises(DuplexError, match=r"'state' holds texts of any length, packed; store them without compression"):
        _score(tmp_path / "seed.h5", None, "exact", 0, 0)


def test_texts_cut_off_in_the_middle_are_no_reason_to_read_beyond(tmp_path: Path) -> None:
    data = scores_h5(tmp_path)
    heap = data.index(b"GCOL")
    for stop in range(heap, heap + 60):
        (tmp_path / "cut.h5").write_bytes(data[:stop])
        refuse_endless(tmp_path / "cut.h5")
    assert read_heap(data, heap) == 4096


def test_an_identity_whose_keys_are_no_texts(tmp_path: Path) -> None:
    data = cache(tmp_path).replace(b"preprocessing", b"\xff" * 13)
    (tmp_path / "c.h5").write_bytes(data)
    with pytest.raises(DuplexError, match=r"the identity's .* is not a text"):
        open_features(tmp_path / "c.h5")
    assert finished_marks(tmp_path / "c.h5", {**IDENTITY}, Span(0, 4, 4)) is None


def read_heap(data: bytes, start: int) -> int:
    return int.from_bytes(data[start + 8 : start + 16], "little")


def test_an_attribute_of_any_length_is_not_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.attrs["short"], file.attrs["any"] = np.bytes_("here"), "there"
        assert read_attribute(file, "short") == b"here" and read_attribute(file, "any") is None
