from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.text import made_up, random_tower, read_pairs


def test_a_generated_list_has_the_requested_size() -> None:
    pairs = made_up(115, 245, 1262)
    assert len(set(pairs)) == 1262
    assert (len({s for s, _ in pairs}), len({o for _, o in pairs})) == (115, 245)


def test_a_pair_list_is_read(tmp_path: Path) -> None:
    (tmp_path / "pairs.txt").write_text("sliced apple\nFaux.Fur Boots.Mid-Calf\n\n")
    assert read_pairs(tmp_path / "pairs.txt") == [("sliced", "apple"), ("Faux.Fur", "Boots.Mid-Calf")]


def test_a_random_tower_has_no_image_tower() -> None:
    tower = random_tower("ViT-L-14-quickgelu", layers=1, width=64)
    assert (tower.width, tower.dim, tower.shares_prefixes) == (64, 768, True)


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], ["--vocabulary", "fixed"], ["--steps", "--checkpoint"]])
def test_the_command_prints_json(tmp_path: Path, extra: list[str]) -> None:
    (tmp_path / "pairs.txt").write_text("sliced apple\nripe apple\nripe pear\n")
    quick = ["--layers", "1", "--width", "64", "--rounds", "1", "--warmup", "0", "--sample", "2"]
    command = [sys.executable, "-m", "benchmarks.text", "--json", "--pairs", str(tmp_path / "pairs.txt")]
    result = json.loads(subprocess.run([*command, *quick, *extra], check=True, capture_output=True, text=True).stdout)
    if "--steps" in extra:
        assert result["cgqa"]["prompts"] == 5592 + 413 + 674
    else:
        assert result["max_error"] < 1e-5
