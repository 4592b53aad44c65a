"""Print the composition that an exported model finds for each feature, with numpy alone: recognize.py FEATURES.npy"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from duplex.layers.score_formula import answer_logits, score_terms, unit


def scores(t: Any, features: Any) -> Any:
    """Return the scores [B, C] of features [B, d]: the sum of the model's terms."""
    x = unit(np.asarray(features, np.float32), np)
    return sum(term for _, term in score_terms(t, x, np))


def read_features(path: str, width: int) -> Any:
    """Return the features [B, width] in a NumPy file; end the program with one line if it holds anything else."""
    try:
        features = np.atleast_2d(np.load(path))
    except (OSError, ValueError, EOFError) as error:
        sys.exit(f"recognize.py: {path} cannot be read as an array of numpy: {error}")
    if not isinstance(features, np.ndarray) or features.ndim != 2 or features.shape[1] != width:
        sys.exit(f"recognize.py: {path} has the shape {np.shape(features)}; expected rows of width {width}")
    usable = np.isfinite(features).all(axis=1) & (features != 0).any(axis=1)
    if not usable.all():
        sys.exit(f"recognize.py: {path}, row {int(usable.argmin())}: the feature is zero or not finite")
    return features


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit("usage: recognize.py FEATURES.npy (one feature per row; README.md names the encoder)")
    folder = Path(__file__).parent
    t = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    states, objects = config["labels"]["states"], config["labels"]["objects"]
    features = read_features(sys.argv[1], int(config["encoder"]["dim"]))
    totals = scores(t, features).astype(np.float64)
    for best in answer_logits(t, totals, config["confidence"]["temperature"], np).argmax(axis=1):
        print(states[t["state_of"][best]], objects[t["object_of"][best]])


if __name__ == "__main__":
    main()
