"""Scores of cached features by an exported model, with numpy alone: python recognize.py FEATURES.npy"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file


def unit(x: Any) -> Any:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def layers(t: Any, first: str, second: str, x: Any) -> Any:
    hidden = np.maximum(x @ t[f"{first}.weight"].T + t[f"{first}.bias"], 0)
    return hidden @ t[f"{second}.weight"].T + t[f"{second}.bias"]


def scores(t: Any, features: Any) -> Any:
    """[B, d] -> [B, C]: p(c^h|x) + p(c^t|x) + p(s|x) p(o|x), of the terms that the model has."""
    z = unit(np.asarray(features, np.float32))
    if "adapter.scale" in t:
        z = unit(z + t["adapter.scale"] * layers(t, "adapter.down", "adapter.up", z))
    total = sum(softmax(t["scale"] * z @ t[name].T) for name in ("visual", "semantic") if name in t)
    if "states" in t:
        z_s, z_o = (unit(layers(t, f"{k}.first", f"{k}.second", z) + t["residual"] * z) for k in ("state", "object"))
        p_s, p_o = softmax(t["scale"] * z_s @ t["states"].T), softmax(t["scale"] * z_o @ t["objects"].T)
        total = total + p_s[:, t["state_of"]] * p_o[:, t["object_of"]]
    return total


def main() -> None:
    folder = Path(__file__).parent
    t, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    states, objects = config["labels"]["states"], config["labels"]["objects"]
    ranked = scores(t, np.atleast_2d(np.load(sys.argv[1]))) + config["calibration"]["bias"] * ~t["seen"]
    for best in np.where(t["live"], ranked, -np.inf).argmax(axis=1):
        print(states[t["state_of"][best]], objects[t["object_of"][best]])


if __name__ == "__main__":
    main()
