"""Files with random edits give a result or a `DuplexError`; ten thousand of each kind in the long tests."""

import resource
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duplex.config.params import load_params
from duplex.data.tables import read_manifest
from duplex.errors import DuplexError
from tests.subprocesses import ROOT

DEADLINE = timedelta(seconds=20)
GROWTH = 2 << 20  # kilobytes: 2 GiB
WORDS = {
    "yaml": [b"&a ", b"*a", b"[", b"]", b"{", b"}", b": ", b"- ", b"\t", b"!!", b"? ", b"|", b"9" * 5000, b"~", b"'"],
    "csv": [b",", b'"', b"\n", b"\r", b";", b"\t", b"\0", b"../", b"/", b"train", b"nan", b"1e999", b"\xef\xbb\xbf"],
}


def edits(kind: str) -> st.SearchStrategy[list[tuple[float, str, bytes]]]:
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


def manifest(_: Path) -> bytes:
    return b"image,state,object,split\n" + b"".join(b"a%d.jpg,red,star,train\n" % i for i in range(5))


KINDS: dict[str, tuple[str, str, Callable[[Path], bytes], Callable[[Path], object]]] = {
    "params": ("p.yaml", "yaml", lambda _: (ROOT / "params.yaml").read_bytes(), load_params),
    "manifest": ("m.csv", "csv", manifest, read_manifest),
}


@pytest.mark.parametrize("examples", [60, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_edited_files_are_read_or_refused(tmp_path: Path, kind: str, examples: int) -> None:
    name, words, make, look = KINDS[kind]
    seed, path, bystander = make(tmp_path), tmp_path / name, tmp_path / "bystander"
    bystander.write_text("precious")
    attempts = 0

    @settings(max_examples=examples, deadline=DEADLINE, database=None, suppress_health_check=list(HealthCheck))
    @given(edits(words))
    def attempt(changes: list[tuple[float, str, bytes]]) -> None:
        nonlocal attempts
        attempts += 1
        data = edited(seed, changes)
        path.write_bytes(data)
        try:
            look(path)
        except DuplexError as error:
            assert str(error) and "Traceback" not in str(error)
        assert path.read_bytes() == data and bystander.read_text() == "precious"

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    attempt()
    assert attempts >= examples and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH


def test_the_unedited_files_are_valid(tmp_path: Path) -> None:
    """Otherwise every edit would fail at the first byte."""
    for name, _, make, look in KINDS.values():
        data = make(tmp_path)
        (tmp_path / name).write_bytes(data)
        look(tmp_path / name)  # raises for a file that it cannot read
        assert (tmp_path / name).read_bytes() == data, name
