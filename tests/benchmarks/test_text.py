import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.text import made_up


def test_a_generated_list_has_the_requested_size() -> None:
    pairs = made_up(115, 245, 1262)
    assert len(set(pairs)) == 1262
    assert (len({s for s, _ in pairs}), len({o for _, o in pairs})) == (115, 245)


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
