"""Downloads from a real web server that breaks transfers, and hostile archives."""

import io
import itertools
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duplex.data import download as fetching
from duplex.data.download import ARCHIVES, BenchmarkArchive, DeadLink, download_archive, fetch, unpack
from duplex.errors import DuplexError
from duplex.system.files import sole_writer
from tests.data.web import BODY, Server, serving


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture(autouse=True)
def _few_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MAX_STALLS", 2)


def test_a_transfer_that_breaks_repeatedly_is_resumed(server: Server, tmp_path: Path) -> None:
    server.cut = 300_000
    assert fetch(server.url(), tmp_path / "file.zip").read_bytes() == BODY
    starts = [int(asked.removeprefix("bytes=").rstrip("-")) for asked in server.asked[1:] if asked]
    assert len(starts) == len(server.asked) - 1 >= 3
    assert all(300_000 - fetching.CHUNK < b - a <= 300_000 for a, b in itertools.pairwise([0, *starts]))
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.zip"]


def test_a_later_call_continues_the_partial_file(server: Server, tmp_path: Path) -> None:
    server.cut = 0
    partial = tmp_path / "file.zip.partial"
    partial.write_bytes(BODY[:400_000])
    with pytest.raises(DuplexError, match=r"run the command again to continue after the 400,000 bytes"):
        fetch(server.url(), tmp_path / "file.zip")
    assert partial.read_bytes() == BODY[:400_000] and server.asked == ["bytes=400000-"] * 2
    server.cut, server.asked = None, []
    assert fetch(server.url(), tmp_path / "file.zip").read_bytes() == BODY
    assert server.asked == ["bytes=400000-"]
    fetch(server.url(), tmp_path / "file.zip")
    assert len(server.asked) == 1


@pytest.mark.parametrize("fault", ["no ranges", "too long"])
def test_a_partial_file_that_cannot_be_continued_is_started_over(server: Server, tmp_path: Path, fault: str) -> None:
    server.ranges = fault != "no ranges"
    (tmp_path / "file.zip.partial").write_bytes(b"x" * (2 << 20 if fault == "too long" else 1000))
    assert fetch(server.url(), tmp_path / "file.zip").read_bytes() == BODY


@pytest.mark.parametrize("pack", ["zipped", "tarred"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_an_archive_of_two_versions_is_refused(server: Server, tmp_path: Path, pack: str, share: float) -> None:
    """The file changed on the server between two calls: its checksums do not fit."""
    packing = {"zipped": zipped, "tarred": tarred}[pack]
    old, new = (packing({"top/images/a.jpg": content}) for content in (BODY[:1000], BODY[1000:2000]))
    server.files["/a.zip"] = new
    partial = tmp_path / ARCHIVES / "a.zip.partial"
    partial.parent.mkdir()
    partial.write_bytes(old[: int(share * len(old))])
    with pytest.raises(DuplexError, match=r"damaged|limit of"):
        download_archive(archive(server, "/a.zip"), tmp_path, lambda _: None)
    assert not (tmp_path / "images").exists()


def test_dead_links_differ_from_broken_transfers(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DeadLink, match="404"):
        fetch(server.url("/gone.zip"), tmp_path / "file.zip")
    with pytest.raises(DeadLink, match="cannot be reached"):
        fetch("http://127.0.0.1:9/file.zip", tmp_path / "file.zip")
    assert not (tmp_path / "file.zip").exists()


def zipped(names: dict[str, bytes], link: str = "") -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, data in names.items():
            bundle.writestr(name, data)
        if link:
            info = zipfile.ZipInfo(link)
            info.external_attr = 0o120777 << 16
            bundle.writestr(info, "/etc/passwd")
    return stream.getvalue()


def tarred(names: dict[str, bytes], link: str = "", kind: bytes = tarfile.SYMTYPE) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as bundle:
        for name, data in names.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            bundle.addfile(info, io.BytesIO(data))
        if link:
            info = tarfile.TarInfo(link)
            info.type, info.linkname = kind, "/etc/passwd"
            bundle.addfile(info)
    return stream.getvalue()


GOOD = {"top/images/old dog/é.jpg": b"1" * 10, "top/readme": b"2", "__MACOSX/top/images/x": b"3"}
TAKE: dict[str, tuple[str, ...]] = {"images": ("top/images",)}


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_only_wanted_parts_are_unpacked(tmp_path: Path, pack: object) -> None:
    (tmp_path / "a").write_bytes(pack(GOOD))  # type: ignore[operator]
    unpack(tmp_path / "a", TAKE, tmp_path / "root", 10)
    files = [str(p.relative_to(tmp_path / "root")) for p in (tmp_path / "root").rglob("*") if p.is_file()]
    assert files == ["images/old dog/é.jpg"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (zipped({"top/images/../../../x": b""}), "outside of the target folder"),
        (zipped({**GOOD, "top\\..\\..\\x": b""}), "outside of the target folder"),
        (zipped(GOOD, link="top/images/link"), "link"),
        (zipped({"top/images/bomb": b"0" * 5_000_000}), "limit of 1,000 unpacked bytes"),
        (zipped({"other/x": b""}), "lacks 'top/images'"),
        (zipped(GOOD)[:-30], "damaged"),
        (zipped({"top/images/x": BODY}).replace(BODY[1000:1010], b"0123456789"), "damaged|limit of"),
        (tarred({"../x": b""}), "outside of the target folder"),
        (tarred(GOOD, link="top/images/link"), "link"),
        (tarred(GOOD, link="top/images/dev", kind=tarfile.CHRTYPE), "device"),
        (tarred({"top/images/bomb": b"0" * 5_000_000}), "limit of 1,000 unpacked bytes"),
        (tarred(GOOD)[:60], "damaged"),
        (b"", "damaged"),
    ],
)
def test_hostile_and_broken_archives_leave_nothing_behind(tmp_path: Path, data: bytes, says: str) -> None:
    root = tmp_path / "deep" / "root"
    root.mkdir(parents=True)
    (tmp_path / "a.zip").write_bytes(data)
    with pytest.raises(DuplexError, match=says):
        unpack(tmp_path / "a.zip", TAKE, root, 1000)
    assert list(root.iterdir()) == []
    assert {path.name for path in tmp_path.rglob("*")} == {"a.zip", "deep", "root"}


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("pack", [zipped, tarred])
def test_damaged_archives_raise_an_error_or_give_their_files(tmp_path: Path, pack: object, data: st.DataObject) -> None:
    whole = pack(GOOD)  # type: ignore[operator]
    at, cut = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.booleans())
    path, root = tmp_path / "a", tmp_path / "root"
    path.write_bytes(whole[:at] if cut else whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
    try:
        unpack(path, TAKE, root, 1000)
    except DuplexError as error:
        assert str(path) in str(error)
        assert not (root / "images").exists()
    shutil.rmtree(root, ignore_errors=True)


def archive(server: Server, *paths: str) -> BenchmarkArchive:
    return BenchmarkArchive("a.zip", tuple(server.url(path) for path in paths), TAKE, 1000, "https://example.org/page")


def test_the_first_working_mirror_is_used(server: Server, tmp_path: Path) -> None:
    server.files |= {"/page.zip": b"<html>this site has moved</html>", "/a.zip": zipped(GOOD)}
    said: list[str] = []
    download_archive(archive(server, "/gone.zip", "/page.zip", "/a.zip"), tmp_path, said.append)
    assert (tmp_path / "images/old dog/é.jpg").read_bytes() == b"1" * 10
    assert any("404" in line for line in said) and any("not serve an archive" in line for line in said)
    before = len(server.asked)
    download_archive(archive(server, "/a.zip"), tmp_path, said.append)
    assert len(server.asked) == before and "already in" in said[-1]


def test_the_hash_of_a_damaged_archive_is_not_recorded(server: Server, tmp_path: Path) -> None:
    path = tmp_path / ARCHIVES / "a.zip"
    path.parent.mkdir()
    path.write_bytes(zipped(GOOD)[:-30])
    with pytest.raises(DuplexError, match="delete it"):
        download_archive(archive(server), tmp_path, lambda _: None)
    path.write_bytes(zipped(GOOD))
    download_archive(archive(server), tmp_path, lambda _: None)
    assert (tmp_path / "images").is_dir()


def test_a_second_download_of_the_same_file_is_refused(server: Server, tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; from duplex.data.download import fetch; fetch(sys.argv[1], pathlib.Path(sys.argv[2]))"
    )
    call = [sys.executable, "-c", script, server.url(), str(tmp_path / "file.zip")]
    with sole_writer(tmp_path / "file.zip", "download"):
        second = subprocess.run(call, capture_output=True, text=True, check=False)
    assert second.returncode and "another download is writing" in second.stderr
    assert not (tmp_path / "file.zip").exists()
    assert fetch(server.url(), tmp_path / "file.zip").read_bytes() == BODY


def test_without_a_working_link_the_error_names_page_and_folder(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DuplexError) as caught:
        download_archive(archive(server, "/gone.zip"), tmp_path, lambda _: None)
    assert "https://example.org/page" in str(caught.value) and str(tmp_path / ARCHIVES) in str(caught.value)
    (tmp_path / ARCHIVES).mkdir(exist_ok=True)
    (tmp_path / ARCHIVES / "a.zip").write_bytes(zipped(GOOD))
    download_archive(archive(server, "/gone.zip"), tmp_path, lambda _: None)
    assert (tmp_path / "images").is_dir()
