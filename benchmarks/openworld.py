"""Measure the open world without storing its product: sizes of files and scoring time.

    python -m benchmarks.openworld [--json]

C-GQA's size: 413 states, 674 objects, its own pair lists if DUPLEX_SHARED names the folder with them, generated ones
otherwise; features of 768 dimensions, a small text tower with random weights. `checkpoint_mb` and `state_mb` (10^6
bytes) are files written after the first steps of `duplex`, trained for the closed world; `checkpoint_mb_refined` that
of a run that refined every prototype. `speedup_open_scoring` compares `z . h / tau` over all 278,362 pairs by outer
sums with matrix products, alternating; `largest_difference` is between their cosines.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.closed_form import labels as cgqa_labels
from benchmarks.measure import alternate, emit, options, say
from benchmarks.text import random_tower
from duplex.labels import LabelSpace
from duplex.methods.base import Batch, MethodContext
from duplex.methods.codebook import Codebook
from duplex.methods.duplex import Duplex, DuplexOptions
from duplex.options import TrainingOptions
from duplex.system.threads import keep_freed_memory
from duplex.training.checkpoint import Record, save_checkpoint
from duplex.training.loop import TrainingState, make_optimiser, make_schedule, optimiser_step

DIM, STEPS = 768, 3
SETTINGS = TrainingOptions(learning_rate=1e-4, batch_size=32, epochs=1)
Z = torch.nn.functional.normalize


def begun(
    labels: LabelSpace, width: int, images: int = 2_000, device: str = "cpu", **options: Any
) -> tuple[Duplex, Batch]:
    """A method after its first images of every seen pair."""
    torch.manual_seed(0)
    tower = random_tower("ViT-L-14", layers=2, width=width, device=device)
    method = Duplex(MethodContext(labels, {"cls": (DIM,)}, tower), DuplexOptions(**options)).to(device)
    own = np.resize(labels.pairs["train"], max(images, len(labels.pairs["train"])))
    z = Z(torch.randn(len(own), DIM), dim=-1).to(device)
    train = Batch({"cls": z}, torch.from_numpy(own).to(device), own)
    method.start(train)
    return method, train


def sizes(folder: Path) -> dict[str, float]:
    """The MB of the files of a run over C-GQA, with the real width of everything trained."""
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


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    wanted = parser.parse_args()
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        record = {**sizes(Path(folder)), **scoring(wanted.rounds), "threads": torch.get_num_threads()}
    emit(record) if wanted.json else say(str(record))


if __name__ == "__main__":
    main()
