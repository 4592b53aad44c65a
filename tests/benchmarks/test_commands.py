"""Each command `python -m benchmarks.NAME` that a page names runs at its smallest size."""

import importlib
import json
import os
import re
import sys

import pytest

from tests.projects import built_once, make_project
from tests.subprocesses import ENVIRONMENT, ROOT, Forked

AT_CGQA = "import benchmarks.text as t; t.SIZES['cgqa'], t.LISTED = (8, 7, 24, 20), 20; m.at_cgqa()"
IN_PROCESS = "m.apart = lambda module, part: {**m.PARTS[part](), 'peak_gib': 1.0}"
MEMORY = "m.SIZES = {'small': (4, 2, 1)}; m.apart = lambda module, part: m.peak_memory(30)"
SMALL_STEPS = "m.apart = lambda module, part: m.measure(part.split(':')[0], 1, layers=1, width=64)"
SMALLER = "from functools import partial; m.{0} = partial(m.{0}, layers=1, width=64)"
FEW_SECONDS = (
    "from pathlib import Path; m.IMAGES, m.PAIRS, run = Path('pictures'), 1, m.duplex; "
    "m.duplex = lambda *words: run(*words, *(('--minutes', 0.05) if words[0] == 'fit' else ()))"
)
COMMANDS = {  # name -> (arguments, changes of the module m before its main function runs)
    "answers": ("--run artifacts/own/duplex/0 --json", "m.IMAGES = 20"),
    "bare": ("--encoder ViT-S-32 --rounds 1 --json", ""),
    "curve": ("--json", f"m.CLOSED, m.OPEN, m.SEEN, m.IMAGES = 900, 2000, 400, 300; {IN_PROCESS}"),
    "depth": ("--json", "m.LAYERS, m.WIDTH = 4, 64"),
    "extraction": ("--json", MEMORY),
    "first_minutes": ("--splits 0 --json", FEW_SECONDS),
    "graph": ("--json", "m.DIM, b = 16, m.by_batch; m.by_batch = lambda: b((64,))"),
    "ideas": ("--splits 1 --json artifacts/own/manifest.csv:pictures", "m.SEEDS = (0,)"),
    "new_share": ("--run artifacts/own/duplex/0 --json", "m.SHARES, m.DRAWS = (0.5,), 2"),
    "paper": ("--json", "m.ENCODER, m.PAPER = 'ViT-S-32', dict(list(m.PAPER.items())[:1])"),
    "pays": ("--datasets own --images 2 --shares 0.2 --json", ""),
    "steps": ("--methods compcos,csp --json", SMALL_STEPS),
    "stream": ("--datasets own --methods duplex --seeds 0 --orders 1 --json", AT_CGQA),
    "study": ("--dataset own --methods clip,linear --of clip --seeds 0 --folder runs --json", ""),
    "suspects": ("--json", "m.SEEDS = 1"),
    "tables": ("", ""),
    "text": ("--pairs pairs.txt --layers 1 --sample 2 --json", SMALLER.format("random_tower")),
    "training": (
        "--json",
        "; ".join(
            ("m.IMAGES, m.ROUNDS = {'ut-zappos': 100}, 1", *map(SMALLER.format, ("image_encoder", "random_tower")))
        ),
    ),
    "two_encoders": ("--datasets own --json", ""),
    "unknown": ("--json own=artifacts/own/manifest.csv:pictures", "m.DRAWN = 4"),
}
NAMED_IN = ("README.md", "CONTRIBUTING.md", "Makefile", "docs/results/commands.yaml")
ELSEWHERE = {"ablation_table", "claims", "gpu", "mutants", "train_tiny_encoder"}  # with tests of their own


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    folder = built_once(tmp_path_factory, "benchmarked", lambda folder: make_project(folder, [0], ["duplex"]))
    (folder / "artifacts" / "shapes").symlink_to("own")
    (folder / "pairs.txt").write_text("red star\nblue star\nred moon\n")
    return folder


LONG = ("bare", "first_minutes")  # half a minute each


def run_command(name: str, words: str, changes: str) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    exec(changes, {"m": module})
    sys.argv = [name, *words.split()]
    module.main()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in COMMANDS]
)
def test_a_named_command_runs(name, project):
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"}
    process = Forked(run_command, name, *COMMANDS[name], cwd=project, env=environment)
    out, err = process.communicate()
    assert process.returncode == 0, err[-2000:]
    assert json.loads(out)


def test_every_command_that_a_page_names_is_run_here():
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in NAMED_IN)]
    named = {name for page in pages for name in re.findall(r"-m benchmarks\.(\w+)", page.read_text())}
    assert named <= COMMANDS.keys() | ELSEWHERE
