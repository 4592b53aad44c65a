"""Print the composition that an exported model recognises in each feature, with numpy and safetensors.

Usage: python recognize.py FEATURES.npy
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from duplex.methods.score_formula import answer_logits, score_terms, unit

SCRIPT = Path(sys.argv[0]).name


def scores(t: Any, features: Any) -> Any:
    """Compute scores [B, C] from image features [B, d] and the model's named tensors `t`."""
    x = unit(np.asarray(features, np.float32), np)
    return sum(term for _, term in score_terms(t, x, np))


def digest(t: Any) -> str:
    """The sha256 of names, types, shapes and values of tensors `t`, as in a model file's header."""
    sha256 = hashlib.sha256()
    for name in sorted(t):
        sha256.update(f"{name} torch.{t[name].dtype} {t[name].shape}\n".encode())
        sha256.update(t[name].tobytes())
    return sha256.hexdigest()


def load_model(folder: Path) -> tuple[Any, Any]:
    """Read the tensors and the header of an export; exits with an error if either was changed."""
    path = folder / "model.safetensors"
    try:
        with safe_open(path, "np") as file:
            header = json.loads(file.metadata()["duplex"])
            t = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        sys.exit(f"{SCRIPT}: {path} cannot be read ({error}); export the run again")
    fields = {key: value for key, value in header.items() if key != "checksum"}
    checksum = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    if header.get("checksum") != checksum or header["tensors"] != digest(t):
        sys.exit(f"{SCRIPT}: {path} is damaged; export the run again")
    return t, header


def require_intact_file(path: Path, header: Any) -> Path:
    """Return `path`, a file of an export; exits unless its sha256 is the one in the header."""
    expected = header["files"].get(path.name)
    found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    if expected is None or found != expected:
        problem = "is missing, damaged or of another model"
        sys.exit(f"{SCRIPT}: {path} {problem}; export the run again")
    return path


def read_features(path: str, width: int) -> Any:
    """Read features [B, width] from a NumPy file as float32; exits if it holds other numbers."""
    features = np.atleast_2d(np.load(path))
    is_wide = features.dtype.kind == "f" and features.shape[1:] == (width,)
    if not is_wide or not np.isfinite(features).all():
        kind = f"holds an array {features.shape} of {features.dtype}"
        sys.exit(f"recognize.py: {path} {kind}; expected rows of {width} finite floats")
    return features.astype(np.float32)


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit("usage: recognize.py FEATURES.npy (one feature per row; README.md names the encoder)")
    t, header = load_model(Path(__file__).parent)
    states, objects = header["labels"]["states"], header["labels"]["objects"]
    features = read_features(sys.argv[1], int(header["encoder"]["dim"]))
    totals = scores(t, features).astype(np.float64)
    for best in answer_logits(t, totals, header["confidence"]["temperature"], np).argmax(axis=1):
        print(states[t["state_of"][best]], objects[t["object_of"][best]])


if __name__ == "__main__":
    main()
