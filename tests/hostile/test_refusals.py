"""Careless arguments and values: one line that names them, before any work, and nothing left out in silence."""

from __future__ import annotations

import io
import json
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from duplex.encoders.base import resolve_device
from duplex.encoders.open_clip import missing_weights
from duplex.errors import DuplexError
from duplex.options import FinetuneOptions, TrainingOptions
from duplex.project import doctor, sweep
from duplex.recognition import inputs
from duplex.system.entry import escape_unprintable
from duplex.system.files import replace_folder, write_tensors
from tests.hostile.conftest import Command, files

HUGE = 10**22
TRAINING = {"learning_rate": 0.1, "batch_size": 2, "epochs": 1}


@pytest.mark.parametrize(
    "words",
    ["cache info P", "cache verify P -d pics", "cache join P", "cache import f.npy -d pics --out P",
     "cache import P -d pics", "extract -d pics --out P", "extract -d pics --weights P", "score P",
     "predict f.npy --out P", "data add own P", "data relabel pics f.npy --out P"],
)  # fmt: skip
def test_a_folder_in_place_of_a_file_is_refused(pics: Path, command: Command, words: str) -> None:
    np.save("f.npy", np.ones((12, 4), np.float32))
    before = files(pics)
    assert command(*("." if word == "P" else word for word in words.split())).refused("")
    assert files(pics) == before


def test_skipped_files_are_counted_and_long_listings_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.jpg", "b.heic", "c.HEIC", "noname", ".hidden"):
        (tmp_path / name).write_bytes(b"x")
    log: list[str] = []
    assert inputs.list_images([str(tmp_path)], io.StringIO(), log.append) == [tmp_path / "a.jpg"]
    assert log == ["3 files skipped: 2 .heic, 1 without a suffix"]
    monkeypatch.setattr(inputs, "INTERVAL", 0.0)
    inputs.list_images([str(tmp_path)], io.StringIO(), log.append)
    assert log[1] == f"listing {tmp_path}: 1 images and 3 other files so far"


def test_linked_folders_are_counted_and_hidden_files_ignored(tmp_path: Path) -> None:
    (tmp_path / "pics" / ".cache").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "pics" / "linked").symlink_to(tmp_path / "elsewhere")
    for name in ("pics/a.jpg", "pics/._a.jpg", "pics/.cache/b.jpg", "elsewhere/c.jpg"):
        (tmp_path / name).write_bytes(b"x")
    log: list[str] = []
    listed = inputs.list_images([str(tmp_path / "pics")], io.StringIO(), log.append)
    assert listed == [tmp_path / "pics" / "a.jpg"]
    assert log == ["1 file skipped: 1 linked folders"]


def test_weights_of_encoders_with_their_own_are_refused(pics: Path, command: Command) -> None:
    assert command("extract", "-d", "pics", "--weights", "NOSUCH").refused(
        "encoder 'tiny' has its own weights", "NOSUCH"
    )
    with pytest.raises(DuplexError, match="has its own weights"):
        missing_weights("local-dir:.", "NOSUCH")


@pytest.mark.parametrize("value", ["null", "3", "true", "[1]", "text"])
@pytest.mark.parametrize("section", ["training", "source", "encoder"])
def test_a_section_that_is_no_table_is_refused(pics: Path, command: Command, section: str, value: str) -> None:
    lines = Path("params.yaml").read_text().splitlines()
    Path("params.yaml").write_text(
        "\n".join(f"    {section}: {value}" if line.startswith(f"    {section}:") else line for line in lines)
    )
    assert command("params", "--check").refused(f"datasets.pics.{section}: ")


@pytest.mark.parametrize("key", ["batch_size", "accumulate", "epochs", "decay_every", "patience", "threads", "width"])
def test_numbers_without_use_are_refused(key: str) -> None:
    limit = 1024 if key == "threads" else 1_000_000
    with pytest.raises(DuplexError, match=rf"{key}: input should be less than or equal to {limit} \(it is {HUGE}\)"):
        FinetuneOptions(blocks=1, width=HUGE) if key == "width" else TrainingOptions.from_dict({**TRAINING, key: HUGE})


@pytest.mark.parametrize("key", ["batch_size", "num_workers", "block_inputs"])
def test_numbers_of_extraction_have_limits(pics: Path, command: Command, key: str) -> None:
    assert command("extract", "-d", "pics", f"--{key.replace('_', '-')}", HUGE).refused(str(HUGE))


def test_a_label_that_fits_no_prompt_is_refused_when_added(pics: Path, command: Command) -> None:
    Path("table.csv").write_text(f"image,state,object\n00000.jpg,{'very ' * 300}red,star\n")
    assert command("data", "add", "own", "table.csv", "--images", "pictures").refused("1503 characters", "at most 100")


@pytest.mark.parametrize("protocol", ["exact", "sampled"])
def test_whole_numbers_that_floats_round_are_refused(tmp_path: Path, command: Command, protocol: str) -> None:
    scores = 2**60 + np.arange(12, dtype=np.int64).reshape(3, 4)
    np.savez(tmp_path / "a.npz", scores=scores, target=[0, 1, 2], seen=[True, True, False, False])
    assert command("score", tmp_path / "a.npz", "--protocol", protocol).refused("above 2**53", f"{2**60 + 11:,}")


def test_a_busy_pipeline_is_reported_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = "ERROR: 'artifacts' is busy, it is being blocked by:\n  (PID 123): dvc repro --force\n\nIf there are no\n"
    failed = subprocess.CompletedProcess([], 255, "", errors)
    monkeypatch.setattr(sweep.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(
        DuplexError, match=r"`dvc repro --force` \(process 123\) is using .* wait until it ends, or stop"
    ):
        sweep.DvcRepo(tmp_path).changed(["plan"])


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("'./dvc.lock' is invalid.\n\nWhile parsing a flow node\n", "flow node; `git checkout dvc.lock` restores"),
        (
            "'./dvc.lock' validation failed.\n\nrequired key not provided\n",
            "provided; `git checkout dvc.lock` restores",
        ),
        ("WARNING: slow\nERROR: no space\n", "`dvc status` failed: no space; fix this and run"),
        ("a surprise\n", "`dvc status` failed: a surprise; fix this and run"),
        (
            "Traceback:\n" + 99 * "  File module.py\n" + "ValueError: bad\n",
            "module.py ValueError: bad; fix this and run",
        ),
        ("", "`dvc status` failed: exit code 255; fix this and run"),
    ],
)
def test_what_dvc_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, says: str) -> None:
    failed = subprocess.CompletedProcess([], 255, "", written)
    monkeypatch.setattr(sweep.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(DuplexError, match=re.escape(says)):
        sweep.DvcRepo(tmp_path).changed(["plan"])


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize(
    ("file", "process", "refused"),
    [("plan/own/a.json", 1, True), ("plan/own/a.json", 2**22 + 1, False), ("own/x", 1, False)],
)
def test_the_plan_of_a_running_dvc_command_is_not_free(
    tmp_path: Path, mode: str, file: str, process: int, refused: bool
) -> None:
    holder = {"pid": process, "cmd": "dvc repro"}
    locks = {mode: {str(tmp_path / "artifacts" / file): [holder] if mode == "read" else holder}}
    (tmp_path / ".dvc" / "tmp").mkdir(parents=True)
    (tmp_path / ".dvc" / "tmp" / "rwlock").write_text(json.dumps(locks))
    with pytest.raises(DuplexError, match=r"`dvc repro` \(process 1\) is using") if refused else nullcontext():
        sweep.DvcRepo(tmp_path).require_free(tmp_path / "artifacts" / "plan")


@pytest.mark.parametrize(
    ("seconds", "message"),
    [(9.0, "slower than fp32 here"), (3.0, "about as fast as fp32 here"), (1.0, "3.0 times as fast as fp32; use")],
)
def test_doctor_compares_formats_in_words_and_stops_measuring_slow_ones(
    monkeypatch: pytest.MonkeyPatch, seconds: float, message: str
) -> None:
    times = iter([3.0, 3.0, seconds, seconds])  # two products in fp32, two in bf16
    monkeypatch.setattr(doctor.timeit, "timeit", lambda *_, **__: next(times))
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    assert message in next(finding.message for finding in doctor.examine(Path("absent")) if finding.topic == "formats")


@contextmanager
def full_disk(size: int = 2000) -> Iterator[None]:
    """Limit files to `size` bytes: writing more fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_no_half_made_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        full_disk(),
        pytest.raises(DuplexError, match="cannot be written: File too large"),
        replace_folder(tmp_path / "new") as folder,
    ):
        write_tensors(folder / "a.safetensors", {"a": torch.zeros(1000)})
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_no_list_of_suspects_without_its_page(ranked: Path, command: Command) -> None:
    with full_disk(500):  # enough for the list, not for the page
        result = command("data", "suspects", "pics")
    assert result.refused("suspects.html cannot be written: File too large") and not files(ranked)


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:x", "CPU"])
def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(DuplexError, match=f"device is '{device}'; expected auto, cpu or cuda"):
        resolve_device(device)


def test_names_of_files_do_not_steer_the_terminal(pics: Path, command: Command) -> None:
    assert escape_unprintable("\x1b[31m\n\udcff ωλ 日本") == "\\x1b[31m\\n\\udcff ωλ 日本"
    assert command("score", "\x1b]0;title\x07.npz").refused("\\x1b]0;title\\x07.npz")
    for name in (b"\xff.jpg", b"\x1b[2J.jpg", b"a\nb.jpg"):
        shutil.copy(b"pictures/00000.jpg", b"pictures/" + name)
    shutil.copy("artifacts/pics/manifest.csv", "table.csv")
    result = command("data", "check", "pics")
    assert "\\udcff.jpg" in result.out and "\\x1b[2J.jpg" in result.out and "a\\nb.jpg" in result.out
    assert not set("\x1b\x07") & set(result.out + result.err)
