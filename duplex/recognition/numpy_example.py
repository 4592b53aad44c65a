"""Scores of cached features by an exported model, with numpy alone: python recognize.py FEATURES.npy"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

FLOOR = np.float32(np.log(1e-30))  # of a logarithm that enters a product


def unit(x: Any) -> Any:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def log_softmax(x: Any) -> Any:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def layers(t: Any, first: str, second: str, x: Any) -> Any:
    hidden = np.maximum(x @ t[f"{first}.weight"].T + t[f"{first}.bias"], 0)
    return hidden @ t[f"{second}.weight"].T + t[f"{second}.bias"]


def of_paths(t: Any, x: Any) -> Any:
    """Logarithms of p(c^h|x), p(c^t|x) and p(s|x) p(o|x) [B, C], of those that the model has."""
    z = x
    if "adapter.scale" in t:
        z = unit(z + t["adapter.scale"] * layers(t, "adapter.down", "adapter.up", z))
    for name in ("visual", "semantic"):
        if name in t:
            yield name, log_softmax(t["scale"] * z @ t[name].T)
    if "states" in t:
        z_s, z_o = (unit(layers(t, f"{k}.first", f"{k}.second", z) + t["residual"] * z) for k in ("state", "object"))
        p_s, p_o = log_softmax(t["scale"] * z_s @ t["states"].T), log_softmax(t["scale"] * z_o @ t["objects"].T)
        yield "factors", p_s[:, t["state_of"]] + p_o[:, t["object_of"]]


def of_closed_form(t: Any, x: Any) -> Any:
    """Logarithms of p_g(c|x) and p_g(s|x) p_g(o|x)."""
    if "likelihood.rows" in t:
        w = x @ t["likelihood.whitening"] - t["effects.mean"]
        yield "visual", log_softmax(w @ t["likelihood.rows"].T + t["likelihood.offset"])
    if "primitives.states.weight" in t:
        p_s, p_o = (
            np.maximum(log_softmax(x @ t[f"primitives.{k}.weight"] + t[f"primitives.{k}.offset"]), FLOOR)
            for k in ("states", "objects")
        )
        yield "primitives", p_s[:, t["state_of"]] + p_o[:, t["object_of"]]


def scores(t: Any, features: Any) -> Any:
    """[B, d] -> [B, C]: the sum of the terms' probabilities, or of their logarithms where terms multiply."""
    x, floor = unit(np.asarray(features, np.float32)), FLOOR if "product" in t else -np.inf
    logs = [*((name, np.maximum(log, floor)) for name, log in of_paths(t, x)), *of_closed_form(t, x)]
    return sum(t.get(f"weights.{name}", 1) * (log if "product" in t else np.exp(log)) for name, log in logs)


def main() -> None:
    folder = Path(__file__).parent
    t, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text(encoding="utf-8")),
    )
    states, objects = config["labels"]["states"], config["labels"]["objects"]
    ranked = scores(t, np.atleast_2d(np.load(sys.argv[1]))) + config["calibration"]["bias"] * ~t["seen"]
    for best in np.where(t["live"], ranked, -np.inf).argmax(axis=1):
        print(states[t["state_of"][best]], objects[t["object_of"][best]])


if __name__ == "__main__":
    main()
