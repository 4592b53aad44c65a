"""Numbers that a change of structure must not change: metrics, trained tensors, a fit and an export.

    make repro && python -m benchmarks.oracle write before.json     # the code before, in one checkout
    make repro && python -m benchmarks.oracle compare before.json   # the code after, in another, on the same machine

The default project's metrics.json; the tensors of the checkpoints of five methods, two seeds each; the tensors of one
`duplex fit` on drawn images and of one export. Equal tensors have equal types, shapes and bytes; names may change.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.recognition.drawn_folder import draw_folder
from tests.subprocesses import ROOT, duplex

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


def run_duplex(*words: object, folder: Path) -> None:
    done = duplex(*words, cwd=folder)
    if done.returncode:
        raise SystemExit(done.stderr)


def measure() -> dict[str, Any]:
    """Everything that is compared, by name."""
    values: dict[str, Any] = {"metrics": json.loads((ROOT / "artifacts" / "metrics.json").read_text())}
    for method in METHODS:
        for seed in SEEDS:
            values[f"{method}, seed {seed}"] = tensor_digests(ROOT / "artifacts" / "shapes" / method / str(seed))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # with so little time no blocks of the tower are tried, however fast the machine is
        run_duplex("fit", draw_folder(folder / "shop"), "--out", folder / "fitted", "--minutes", 0.001, folder=folder)
        values["fit"] = tensor_digests(folder / "fitted")
        run_duplex("export", "artifacts/shapes/duplex/0", folder / "exported", folder=ROOT)
        values["export"] = tensor_digests(folder / "exported")
    return values


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line per value that differs."""
    return [
        f"{name}: {json.dumps(before.get(name))[:200]} became {json.dumps(after.get(name))[:200]}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def main(action: str, name: str) -> None:
    path, values = Path(name), measure()
    if action == "write":
        path.write_text(json.dumps(values, indent=1) + "\n")
        return
    found = differences(json.loads(path.read_text()), values)
    print("\n".join(found) or f"all {len(values)} values are equal")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
