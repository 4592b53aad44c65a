"""Print the composition that an exported model recognises in each feature, with numpy and safetensors.

Usage: python recognize.py FEATURES.npy [--new-share SHARE]

SHARE: expected share (0-1) of images of unseen pairs, or auto, which estimates it; default: auto
for 50 features or more, the model's for fewer. The share is printed on stderr if it is estimated.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from duplex.evaluation.new_share import ENOUGH, estimate_share
from duplex.methods.score_formula import answer_logits, log_softmax, score_terms, unit

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


def split_arguments(words: list[str]) -> tuple[list[str], str | None]:
    """Return a command's other words and the value of `--new-share`, None without it."""
    if "--new-share" not in words:
        return words, None
    place = words.index("--new-share")
    value = words[place + 1] if place + 1 < len(words) else ""
    try:
        usable = value == "auto" or 0 < float(value) < 1
    except ValueError:
        usable = False
    if not usable:
        sys.exit(f"{SCRIPT}: --new-share is {value!r}; expected a number between 0 and 1, such as 0.1, or auto")
    return words[:place] + words[place + 2 :], value


def best_candidates(t: Any, header: Any, scores: Any, share: str | None) -> Any:
    """Positions [B] of the most probable candidates, from float64 scores [B, C], at a share of new pairs."""
    confidence = header["confidence"]
    stored = confidence["new_share"]
    logits = answer_logits(t, scores, confidence["temperature"], np)  # with the prior log odds of `stored`
    even = logits - ~t["seen"] * np.log(stored / (1 - stored))
    wanted = stored if share in (None, "auto") else float(share)
    if share == "auto" or (share is None and len(scores) >= ENOUGH):
        q = np.exp(log_softmax(even, np))[:, ~t["seen"]].sum(1)
        estimate = estimate_share(q, confidence.get("unseen_mass", {}).get(header["world"]), stored)
        print(estimate, file=sys.stderr)
        wanted = estimate.value
    return (even + ~t["seen"] * np.log(wanted / (1 - wanted))).argmax(axis=1)


def main() -> None:
    words, share = split_arguments(sys.argv[1:])
    if len(words) != 1 or words[0] in ("-h", "--help"):
        usage = "usage: recognize.py FEATURES.npy [--new-share SHARE|auto]"
        sys.exit(f"{usage} (one feature per row; README.md names the encoder)")
    t, header = load_model(Path(__file__).parent)
    states, objects = header["labels"]["states"], header["labels"]["objects"]
    features = read_features(words[0], int(header["encoder"]["dim"]))
    totals = scores(t, features).astype(np.float64)
    for best in best_candidates(t, header, totals, share):
        print(states[t["state_of"][best]], objects[t["object_of"][best]])


if __name__ == "__main__":
    main()
