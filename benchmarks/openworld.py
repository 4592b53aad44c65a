"""Measure the open world without storing its product: sizes of files, scoring time and memory.

    python -m benchmarks.openworld --json [--no-huge]

C-GQA's size: 413 states, 674 objects, its own pair lists if DUPLEX_SHARED names the folder with them, generated ones
otherwise; features of 768 dimensions, a small text tower with random weights. `checkpoint_mb` and `state_mb` (10^6
bytes) are files written after the first steps of `duplex`, trained for the closed world; `checkpoint_mb_refined` that
of a run that refined every prototype. `speedup_open_scoring` compares `z . h / tau` over all 278,362 pairs by outer
sums with matrix products, alternating; `largest_difference` is between their cosines. `peak_gib_1e8` is the peak memory
of a process that built labels of 5,000 x 20,000 generated words and the method, refined the prototypes of a batch and
found the best three pairs of 100 images by `p(c^h|x) + p(s|x) p(o|x)`; `peak_gib_1e8_thresholds` that of one that
calibrated it on 10 images with 50 thresholds of feasibility.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.closed_form import labels as cgqa_labels
from benchmarks.measure import alternate, emit, memory, say
from duplex.encoders.clip_text import ClipTextTower
from duplex.encoders.vision_ops import ensure_torchvision
from duplex.features.examples import Examples
from duplex.labels import LabelSpace
from duplex.layers.codebook import Codebook
from duplex.methods.base import Batch, MethodContext, PrimitiveVectors
from duplex.methods.duplex import Duplex, DuplexOptions
from duplex.options import TrainingOptions
from duplex.system.allocator import keep_freed_memory
from duplex.training.calibration import calibrate
from duplex.training.checkpoint import Record, save_checkpoint
from duplex.training.epoch import optimiser_step
from duplex.training.optimiser import make_optimiser, make_schedule
from duplex.training.resume import TrainingState
from duplex.training.scoring import BLOCK_COLUMNS, TopCandidates

DIM, STEPS, IMAGES, CALIBRATED = 768, 3, 100, 10
HUGE = 5_000, 20_000
SETTINGS = TrainingOptions(learning_rate=1e-4, batch_size=32, epochs=1)
Z = torch.nn.functional.normalize


def small_tower(width: int, device: str = "cpu") -> ClipTextTower:
    """Return CLIP's text tower with two layers and random weights."""
    ensure_torchvision()
    from open_clip.model import CLIPTextCfg, _build_text_tower

    torch.manual_seed(0)
    config = CLIPTextCfg(context_length=16, width=width, heads=width // 64, layers=2)
    return ClipTextTower(_build_text_tower(DIM, config).to(device))


def begun(
    labels: LabelSpace, width: int, images: int = 2_000, device: str = "cpu", **options: Any
) -> tuple[Duplex, Batch]:
    """Return a method after its first images of every seen pair."""
    torch.manual_seed(0)
    tower = small_tower(width, device)
    method = Duplex(MethodContext(labels, {"cls": (DIM,)}, tower), DuplexOptions(**options)).to(device)
    own = np.resize(labels.pairs["train"], max(images, len(labels.pairs["train"])))
    z = Z(torch.randn(len(own), DIM), dim=-1).to(device)
    train = Batch({"cls": z}, torch.from_numpy(own).to(device), own)
    method.start(train)
    return method, train


def sizes(folder: Path) -> dict[str, float]:
    """Return the MB of the files of a run over C-GQA, with the real width of everything trained."""
    labels, lists = cgqa_labels()
    method, train = begun(labels, DIM)
    optimiser = make_optimiser(method, SETTINGS)
    state = TrainingState(
        "key", method, optimiser, make_schedule(optimiser, SETTINGS), torch.Generator(), torch.device("cpu")
    )
    for _ in range(STEPS):
        optimiser_step(method, train, torch.randperm(len(train))[: SETTINGS.batch_size], SETTINGS, optimiser)
    state.best = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    state.save(folder / "partial")
    found = {"checkpoint_mb": written(method, folder), "state_mb": (folder / "partial").stat().st_size / 1e6}
    codebook, listed = method.codebook, method.candidates.compositions  # of the closed world
    assert isinstance(codebook, Codebook)
    kept = codebook.stored_count
    codebook.write_back(listed, codebook.prototypes(listed))
    found["checkpoint_mb_refined"] = written(method, folder)
    say(f"files ({lists}, {kept} and {codebook.stored_count} rows kept): {found}")
    return {**found, "rows_kept": kept, "rows_kept_refined": codebook.stored_count}


def written(method: Duplex, folder: Path) -> float:
    path = folder / "checkpoint.safetensors"
    save_checkpoint(path, method, Record("duplex", "", method.options, method.labels, {}, 0, 1, 0.5))
    return path.stat().st_size / 1e6


def scoring(rounds: int) -> dict[str, float]:
    """Measure visual logits over C-GQA's open world."""
    labels, _ = cgqa_labels()
    method, _ = begun(labels, 64)
    scale, images = method.paths.scale, max(1, 2**24 // labels.size)  # as many as an evaluation scores at a time
    z = Z(torch.randn(images, DIM), dim=-1)
    rows = method.codebook.prototypes(np.arange(labels.size))
    sums = method.codebook.logits_over(None)
    with torch.no_grad():
        far = float((sums(z, 1.0) - z @ rows.T).abs().max())
        works = {"dense": lambda: scale * (z @ rows.T), "sums": lambda: sums(z, scale)}
        times = alternate(works, rounds)
    found = {"speedup_open_scoring": times["dense"] / times["sums"], "largest_difference": far}
    found |= {f"{name}_ms_per_image": 1e3 * seconds / images for name, seconds in times.items()}
    say(f"open world of {labels.size} pairs: {found}")
    return found


def huge() -> dict[str, float]:
    """Run everything that 10^8 pairs need, in this process."""
    start = time.perf_counter()
    m, n = HUGE
    train = np.unique(np.random.default_rng(0).integers(0, m * n, 40_000))
    pairs = [(f"state{c // n}", f"object{c % n}") for c in train.tolist()]
    labels = LabelSpace.from_pairs({"train": [*pairs, *((f"state{i % m}", f"object{i}") for i in range(n))]})
    method, images = begun(labels, 64, losses=("state", "object"), inference=("visual", "factors"), refine_over="open")
    with torch.no_grad():
        method.losses(images[torch.arange(32)], method.shared())
    method.after_batch()
    built = time.perf_counter() - start
    sweep = method.eval().score_blocks(max(1, BLOCK_COLUMNS // n))
    assert sweep is not None
    best = TopCandidates(IMAGES, 3, torch.device("cpu"))
    for first, scores in sweep({"cls": images.cls[:IMAGES]}):
        best.add(scores, slice(0, IMAGES), first)
    seconds = time.perf_counter() - start - built
    return {"peak_gib_1e8": memory("VmHWM") / 2**30, "built_seconds_1e8": built, "scored_seconds_1e8": seconds}


def thresholds() -> dict[str, float]:
    """Calibrate the open world over 10^8 pairs with 50 thresholds of feasibility, in this process."""
    start = time.perf_counter()
    m, n = HUGE
    rng = np.random.default_rng(0)
    drawn = rng.permutation(np.unique(rng.integers(0, m * n, 6_000)))
    seen = np.union1d(drawn[500:], np.arange(n) % m * n + np.arange(n))
    names = tuple(f"s{i}" for i in range(m)), tuple(f"o{i}" for i in range(n))
    labels = LabelSpace(*names, {"train": seen, "val": np.union1d(seen[::100], drawn[:500])})
    method, train = begun(labels, 64, losses=("state", "object"), inference=("visual", "factors"), refine_over="open")
    words = PrimitiveVectors(
        *(torch.randn(count, 64, generator=torch.Generator().manual_seed(count)) for count in HUGE)
    )
    own = torch.from_numpy(np.r_[seen[::100][: CALIBRATED // 2], drawn[: CALIBRATED // 2]])
    val = Examples(np.arange(CALIBRATED), {"cls": train.cls[:CALIBRATED]}, own)
    found = calibrate(method, val, labels, "open", words, 50)
    assert found.threshold is not None
    return {"peak_gib_1e8_thresholds": memory("VmHWM") / 2**30, "seconds_1e8_thresholds": time.perf_counter() - start}


def apart(work: str) -> dict[str, float]:
    """Run a part in its own process, so that its peak memory can be read."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.openworld", "--part", work], stdout=-1, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    say(f"{work}: {found}")
    return found


APART = {"huge": huge, "thresholds": thresholds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-huge", dest="huge", action="store_false", help="skip 10^8 pairs")
    parser.add_argument("--part", choices=list(APART), help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    keep_freed_memory()
    if wanted.part:
        emit(APART[wanted.part]())
        return
    with tempfile.TemporaryDirectory() as folder:
        record: dict[str, Any] = {**sizes(Path(folder)), **scoring(wanted.rounds)}
    for part in APART if wanted.huge else ():
        record |= apart(part)
    record["threads"] = torch.get_num_threads()
    if wanted.json:
        emit(record)


if __name__ == "__main__":
    main()
