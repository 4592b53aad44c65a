"""Files and folders of another user, and limits of the process: one line says which file it is and what is missing."""

from __future__ import annotations

import errno
import io
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from duplex.errors import DuplexError
from duplex.features.decoding import allow_open_files
from duplex.recognition.image_paths import list_images
from duplex.recognition.sources import read_config
from duplex.runs import run_tasks
from duplex.runs.run_tasks import RunId
from duplex.system.error_report import describe_os_error
from duplex.system.lock import sole_writer
from duplex.training.checkpoint import read_checkpoint
from tests.commands import Command

NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Current folder, which other users may enter; paths in the tests are relative to it."""
    tmp_path.chmod(0o777)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def without_rights() -> Iterator[None]:
    """Run the block as a user to whom a file's mode applies; to root, none does."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_folder_that_may_not_be_listed_is_not_left_out(folder: Path) -> None:
    for name in ("open", "closed"):
        Path("pictures", name).mkdir(parents=True)
        Path("pictures", name, "a.png").write_bytes(b"")
    Path("pictures/closed").chmod(0)
    refusal = pytest.raises(DuplexError, match="pictures/closed cannot be listed: permission denied; fix that")
    for named in ("pictures", "pictures/closed"):
        with without_rights(), refusal:
            list_images([named], io.StringIO())
    Path("pictures/closed").chmod(0o755)
    assert len(list_images(["pictures"], io.StringIO())) == 2


@pytest.mark.parametrize(
    ("name", "read"),
    [("checkpoint.safetensors", read_checkpoint), ("config.json", read_config)],
)
def test_a_file_that_may_not_be_read_is_not_called_damaged(
    folder: Path, name: str, read: Callable[[Path], object]
) -> None:
    Path(name).write_bytes(b"anything")
    Path(name).chmod(0)
    with without_rights(), pytest.raises(DuplexError, match=f"^{name} cannot be read: permission denied; get access"):
        read(Path(name))


def test_the_lock_of_another_user_is_named(folder: Path) -> None:
    Path("features.h5.lock.partial").touch(0o444)
    refusal = pytest.raises(DuplexError, match=r"features\.h5\.lock\.partial cannot be written: permission denied")
    with without_rights(), refusal, sole_writer(Path("features.h5"), "extraction"):
        pass


def test_an_error_of_the_system_in_a_sweep_is_reported_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "own/csp/0/swept.partial")

    monkeypatch.setattr(run_tasks.RunExecutor, "_execute", denied)
    executor = run_tasks.RunExecutor(None, None, 1)  # type: ignore[arg-type]
    error = executor.execute(run_tasks.RunTask(RunId("own", "csp", 0), Path("own/csp/0"), {})).error
    assert error == "own/csp/0/swept.partial: permission denied; `duplex train -d own -m csp -s 0` shows more"


def test_a_file_size_limit_is_named() -> None:
    error = OSError(errno.EFBIG, "File too large", "a.h5")
    assert describe_os_error(error) == "a.h5: the disk is full, or a file may not be so large (`ulimit -f`)"


def test_a_small_limit_of_open_files_is_named_before_processes_start(
    pics: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 71))
    refused = command("extract", "--dataset", "pics", "--fresh", "--num-workers", "1")
    assert refused.refused("a process may open 71 files here", "needs 72", "`ulimit -n 72`, or decode in fewer")
    assert command("extract", "--dataset", "pics", "--fresh", "--num-workers", "0").code == 0


def test_a_small_limit_of_open_files_is_raised_where_the_system_allows_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, before[1]))
        allow_open_files(72)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (72, before[1])
        allow_open_files(70)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (72, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_empty_file_is_replaced_by_a_cache(pics: Path, command: Command) -> None:
    place = Path("artifacts/pics/features.h5")
    place.write_bytes(b"")
    assert command("cache", "info", place).refused("`duplex extract --dataset pics` makes it again")
    assert command("extract", "--dataset", "pics").code == 0
    assert place.stat().st_size > 0
