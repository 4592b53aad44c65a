"""Numbers that a change of structure must not change: metrics, trained tensors, a fit and an export.

    make repro && python -m benchmarks.oracle > before.json         # the code before, in one checkout
    make repro && python -m benchmarks.oracle | diff before.json -  # the code after, in another, on the same machine

The default project's metrics.json; the tensors of the checkpoints of five methods, two seeds each; the tensors of one
`duplex fit` on drawn images and of one export. Equal tensors have equal types, shapes and bytes; names may change.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.recognition.drawn_folder import draw_folder
from tests.subprocesses import ROOT

METHODS = ("clip", "cso", "duplex", "closed_form", "dual_finetuned")
SEEDS = (0, 1)


def tensor_digests(folder: Path) -> list[str]:
    """One digest per tensor of all safetensors files below a folder, sorted."""
    digests = []
    for path in sorted(folder.rglob("*.safetensors")):
        for tensor in load_file(path).values():
            content = f"{tensor.dtype} {tensor.shape} ".encode() + tensor.tobytes()
            digests.append(hashlib.sha256(content).hexdigest()[:16])
    return sorted(digests)


def measure() -> dict[str, Any]:
    """Everything that is compared, by name."""
    values: dict[str, Any] = {"metrics": json.loads((ROOT / "artifacts" / "metrics.json").read_text())}
    for method in METHODS:
        for seed in SEEDS:
            values[f"{method}, seed {seed}"] = tensor_digests(ROOT / "artifacts" / "shapes" / method / str(seed))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # with so little time no blocks of the tower are tried, however fast the machine is
        fit = ("duplex", "fit", draw_folder(folder / "shop"), "--out", folder / "fitted", "--minutes", "0.001")
        subprocess.run(fit, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        values["fit"] = tensor_digests(folder / "fitted")
        export = ("duplex", "export", "artifacts/shapes/duplex/0", folder / "exported")
        subprocess.run(export, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        values["export"] = tensor_digests(folder / "exported")
    return values


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
