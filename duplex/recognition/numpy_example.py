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


def main() -> None:
    folder = Path(__file__).parent
    t = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    states, objects = config["labels"]["states"], config["labels"]["objects"]
    totals = scores(t, np.atleast_2d(np.load(sys.argv[1]))).astype(np.float64)
    for best in answer_logits(t, totals, config["confidence"]["temperature"], np).argmax(axis=1):
        print(states[t["state_of"][best]], objects[t["object_of"][best]])


if __name__ == "__main__":
    main()
