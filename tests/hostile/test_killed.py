"""Commands killed at random moments and run again, and two at once, give the same bytes as an undisturbed run."""

import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.makers import make_folder
from tests.hostile.conftest import PARAMS, files
from tests.subprocesses import ENVIRONMENT, ROOT

pytestmark = pytest.mark.long  # nine minutes
DUPLEX = [sys.executable, "-c", "from duplex.cli import main; main()"]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
SPLIT = "split: {val_unseen: 0.2, test_unseen: 0.2}"
TABLE = "source: {kind: table, root: pictures, table: table.csv}"
FOLDER = f"source: {{kind: folder, root: pictures, {SPLIT}}}"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("whole", "broken"):
        make_folder(tmp_path / name / "pictures", "nested")
        (tmp_path / name / "params.yaml").write_text(PARAMS.replace(TABLE, FOLDER))
    return tmp_path / "whole", tmp_path / "broken"


def run(folder: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def kill(folder: Path, words: list[str], seconds: float, number: signal.Signals) -> tuple[int, str]:
    process = subprocess.Popen(
        words, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(seconds)
    process.send_signal(number)
    _, err = process.communicate(timeout=600)  # DVC ends its stage first
    return process.returncode, err


COMMANDS = {
    "prepare": [[*DUPLEX, "prepare", "-d", "pics"]],
    "extract": [[*DUPLEX, "prepare", "-d", "pics"], [*DUPLEX, "extract", "-d", "pics"]],
    "script": [[sys.executable, str(ROOT / "pipeline/prepare.py"), "pics"]],
    "add": [[*DUPLEX, "data", "add", "more", "pictures", "--encoder", "tiny"]],
    "remove": [[*DUPLEX, "data", "add", "more", "pictures", "--encoder", "tiny"], [*DUPLEX, "data", "remove", "more"]],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_gives_the_same_files_when_run_again(folders: tuple[Path, Path], name: str) -> None:
    whole, broken = folders
    *before, words = COMMANDS[name]
    for folder in folders:
        for first in before:
            assert run(folder, first).returncode == 0
    began = time.monotonic()
    assert run(whole, words).returncode == 0
    length = time.monotonic() - began
    rng = random.Random(name)
    for number in SIGNALS:
        code, err = kill(broken, words, rng.uniform(0.1, 1.0) * length, number)
        # 1 or -number: killed before duplex handles signals
        assert code in (0, 1, 2, 130, 143, -number), err
        if name in ("add", "remove") and code == 0:
            break
    again = run(broken, words)
    if name == "remove" and again.returncode == 2:  # it was finished before it was killed
        assert "unknown data set 'more'" in again.stderr
    else:
        assert again.returncode == 0, again.stderr
    mine, theirs = files(broken), files(whole)
    assert {name: data.replace(b"/broken/", b"/whole/") for name, data in mine.items()} == theirs


def project(folder: Path) -> Path:
    for name in ("dvc.yaml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("duplex", "pipeline"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "params.yaml").read_text()
    start, end = text.index("  shapes:\n"), text.index("  # Expect (paper, ViT-L/14): closed AUC 23.7")
    entry = f"  shapes:\n    {FOLDER}\n    encoder: {{name: tiny}}\n"
    entry += "    training: {learning_rate: 0.001, batch_size: 64, epochs: 2}\n\n"
    text = text[:start] + entry + text[end:]
    text, methods = re.subn(
        r"\n  methods: \[linear, .*\]\n(  products: .*\n)  seeds: .*\n",
        r"\n  methods: [clip, csp]\n\1  seeds: [0]\n",
        text,
    )
    assert methods == 1
    (folder / "params.yaml").write_text(text.replace("bootstrap: 1000", "bootstrap: 50"))
    for words in (["git", "init", "-q", "."], [sys.executable, "-m", "dvc", "init", "-q"]):
        assert run(folder, words).returncode == 0
    return folder


REPRO = [sys.executable, "-m", "dvc", "repro"]
SAME = ("manifest.csv", "labels.json", "statistics.json", "features.h5", "checkpoint.safetensors", "metrics.json")


def results(folder: Path) -> dict[str, bytes]:
    return {place: data for place, data in files(folder / "artifacts").items() if place.endswith(SAME)}


def test_a_killed_pipeline_run_twice_at_once_gives_the_same_results(folders, monkeypatch) -> None:
    whole, broken = map(project, folders)
    path = str(Path(sys.executable).parent)
    monkeypatch.setitem(ENVIRONMENT, "PATH", f"{path}:{ENVIRONMENT['PATH']}")
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", "")
    for folder in (whole, broken):
        monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", str(folder))
        if folder is whole:
            began = time.monotonic()
            done = run(folder, REPRO)
            assert done.returncode == 0, done.stderr
            length = time.monotonic() - began
    rng = random.Random(0)
    for number in (*SIGNALS, signal.SIGKILL):
        kill(broken, REPRO, rng.uniform(0.2, 0.7) * length, number)
        time.sleep(1)
    both = [subprocess.Popen(REPRO, cwd=broken, env=ENVIRONMENT, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert 0 in [process.wait(timeout=600) for process in both] or run(broken, REPRO).returncode == 0
    last = run(broken, REPRO)
    assert last.returncode == 0, last.stderr
    assert results(broken) == results(whole) and len(results(whole)) >= 8
    assert not list((broken / "artifacts").rglob("*.partial"))
