"""The model card of an export, made from what the run left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

EVIDENCE = (  # and the tensor that it takes
    *(("visual", "visual"), ("visual", "likelihood.rows"), ("semantic", "semantic")),
    *(("factors", "states"), ("primitives", "primitives.states.weight")),
)
HEADLINE = (("S", "seen"), ("U", "unseen"), ("HM", "hm"), ("AUC", "auc"))


@dataclass(frozen=True)
class Facts:
    """What is known of a run beside its checkpoint; what is not stays empty."""

    name: str
    licence: str = "other"  # as the hub writes it: mit, apache-2.0, cc-by-4.0, ...
    metrics: Mapping[str, Any] = field(default_factory=dict)  # metrics.json of the evaluation
    counts: Mapping[str, Any] = field(default_factory=dict)  # statistics.json of the data set
    repository: str | None = None


def card(config: Mapping[str, Any], tensors: Mapping[str, Tensor], facts: Facts) -> str:
    labels, world, encoder = config["labels"], config["world"], config["encoder"]
    terms = [name for name, key in EVIDENCE if key in tensors]
    place = f"hf-hub:{facts.repository}" if facts.repository else "FOLDER"
    compositions, seen = len(tensors["state_of"]), int(tensors["seen"].sum())
    weights = f" with the weights `{encoder['tag']}`" if encoder["tag"] else ""
    return f"""---
license: {facts.licence}
library_name: duplex
tags: [compositional-zero-shot-learning, clip]
---

# {facts.name}

Recognises compositions of {len(labels["states"])} states and {len(labels["objects"])} objects, also of pairs that it
never saw in training. It was trained by `duplex` as `{config["kind"]}` and chooses among
{compositions} compositions of the {world} world, of which {seen} label training pictures.

## Use

```sh
duplex predict picture.jpg --model {place}
```

```python
from duplex import Recognizer

answers = Recognizer.load("{place}")("picture.jpg", top=3)
```

From a feature vector, with numpy and safetensors alone: `python recognize.py features.npy`. Features are those of
`{encoder["name"]}`{weights} ({encoder["precision"]}), rounded to float16; their width is {encoder["dim"]}.
{_moved(config.get("tail"))}
## What is inside

* `model.safetensors`: evidence {", ".join(terms)}; prototypes, temperature, adapter and factors.
* `config.json`: labels, encoder, and the bias {config["calibration"]["bias"]:.4g} on unseen compositions, at which
  validation had its best harmonic mean.

## Training data

{_counted(facts.counts)}

## Evaluation

{_measured(facts.metrics.get(world, {}))}

S and U: accuracy on seen and unseen pairs at the ends of the calibration curve; HM: the best harmonic mean on it; AUC:
the area under it. They hold for pictures like those of the test split and say nothing of others.
"""


def _moved(tail: Mapping[str, Any] | None) -> str:
    """What is to be known of features where the end of the image tower was trained too."""
    if tail is None:
        return ""
    blocks = "last block" if tail["depth"] == 1 else f"last {tail['depth']} blocks"
    return f"""
The image tower's {blocks} had a part in training, and no cache holds what they make now: features for `recognize.py`
are those of `encoder.onnx`, which `duplex export --onnx-encoder` writes, not rounded.
"""


def _counted(counts: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in _flat(counts).items() if isinstance(value, (int, float))}
    if not plain:
        return "Not recorded."
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value:g} |" for key, value in plain.items())])


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in record.items():
        name = f"{prefix}{key}".replace("_", " ")
        found |= _flat(value, name + " ") if isinstance(value, Mapping) else {name: value}
    return found


def _measured(metrics: Mapping[str, Any]) -> str:
    rows = [
        f"| {spoken} | {metrics[key]:.2f} | {metrics[f'{key}_low']:.2f}–{metrics[f'{key}_high']:.2f} |"
        for spoken, key in HEADLINE
        if f"{key}_low" in metrics
    ]
    return "\n".join(["| | % | 95 % |", "|---|---|---|", *rows]) if rows else "The run was not evaluated."
