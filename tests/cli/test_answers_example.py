"""The example that turns a language model's answers into files for `duplex score`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from duplex.data.tables import labels_of, write_manifest
from tests.subprocesses import ENVIRONMENT, ROOT

ROWS = [
    ("red", "big star", "train"), ("dark blue", "moon", "train"), ("red", "moon", "val"), ("red", "big star", "val"),
    ("dark blue", "big star", "test"), ("red", "big star", "test"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    table = pd.DataFrame(ROWS, columns=["state", "object", "split"])
    table["image"] = [f"{row}.png" for row in range(len(table))]
    (tmp_path / "artifacts/own").mkdir(parents=True)
    write_manifest(table, tmp_path / "artifacts/own/manifest.csv")
    labels_of(table).save(tmp_path / "artifacts/own/labels.json")
    return tmp_path


def example(folder: Path, *words: str) -> Any:
    command = [sys.executable, str(ROOT / "examples/answers.py"), *words, "--dataset", "own"]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def test_the_prompt_lists_all_words_and_words_are_split_by_them(folder, command, monkeypatch):
    monkeypatch.chdir(folder)
    asked = example(folder, "prompt").stdout
    assert "dark blue, red" in asked and "big star, moon" in asked
    (folder / "said.csv").write_text("image,answer\n4.png,Dark blue big star.\n5.png,a star\n")
    assert example(folder, "words", "said.csv", "out.csv").returncode == 0
    found = json.loads(command("score", "out.csv", "--json").out)
    assert (found["pair"], found["state"], found["object"]) == (50.0, 50.0, 50.0)
    (folder / "said.csv").write_text("image,answer\n4.png,red big star\n")
    assert "1 of 2 test images have no answer" in example(folder, "words", "said.csv", "out.csv").stderr
    assert json.loads(command("score", "out.csv", "--json").out)["object"] == 50.0


def test_likelihoods_of_all_candidates_become_a_score_file(folder, command, monkeypatch):
    monkeypatch.chdir(folder)
    candidates = [("red", "big star"), ("dark blue", "moon"), ("dark blue", "big star")]
    rows = [(f"{k}.png", *pair, -0.5 * place - k) for k in (4, 5) for place, pair in enumerate(candidates)]
    table = pd.DataFrame(rows, columns=["image", "state", "object", "log_likelihood"])
    table.to_csv(folder / "said.csv", index=False)
    assert example(folder, "likelihoods", "said.csv", "out.npz").returncode == 0
    stored = np.load(folder / "out.npz")
    assert stored["scores"].tolist() == [[-5.0, -4.5, -4.0], [-6.0, -5.5, -5.0]]
    assert stored["target"].tolist() == [0, 2] and stored["seen"].tolist() == [False, True, True]
    assert command("score", "out.npz", "--rounds", "0").code == 0
    table[1:].to_csv(folder / "said.csv", index=False)
    assert "1 pairs of image and candidate" in example(folder, "likelihoods", "said.csv", "out.npz").stderr
