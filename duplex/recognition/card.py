"""The model card (README.md) of an exported model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from duplex.metric_table import METRICS, interval_text, number

SCORE_TERMS = {  # with the tensor that each needs
    "visual": "visual",
    "gaussian": "likelihood.rows",
    "semantic": "semantic",
    "factors": "states",
    "gaussian_factors": "primitives.states.weight",
}
NOTES = "<!-- Text below this line is kept when the model is written again. -->"


@dataclass(frozen=True)
class RunFacts:
    """Facts about a trained run for its model card, such as metrics, that its checkpoint lacks; empty where unknown."""

    name: str
    licence: str = "other"  # as the hub writes it: mit, apache-2.0, cc-by-4.0, ...
    metrics: Mapping[str, Any] = field(default_factory=dict)  # metrics.json of the evaluation
    counts: Mapping[str, Any] = field(default_factory=dict)  # statistics.json of the data set
    repository: str | None = None
    remark: str = ""  # on the evaluation


def read_notes(card: Path) -> str:
    """What the user wrote below the generated text of a model card; empty if there is no card."""
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    return text.partition(NOTES)[2]


def model_card(config: Mapping[str, Any], tensors: Mapping[str, Tensor], facts: RunFacts, notes: str = "") -> str:
    """The Markdown text of an export's model card, from its config.json and tensors, with the user's `notes`."""
    labels = config["labels"]
    world = config["world"]
    encoder = config["encoder"]
    terms = [name for name, key in SCORE_TERMS.items() if key in tensors]
    place = f"hf-hub:{facts.repository}" if facts.repository else "FOLDER"
    seen = int(tensors["seen"].sum())
    weights = f" with the weights `{encoder['tag']}`" if encoder["tag"] else ""
    return f"""---
license: {facts.licence}
library_name: duplex
tags: [compositional-zero-shot-learning, clip]
---

# {facts.name}

Recognises compositions of {len(labels["states"])} states and {len(labels["objects"])} objects, including pairs without
training images. `duplex` trained it as `{config["kind"]}`; it chooses among
{len(tensors["state_of"])} compositions of the {world} world, of which {seen} label training images.

## Use

```sh
duplex predict image.jpg --model {place}
```

```python
from duplex import Recognizer

answers = Recognizer.load("{place}")("image.jpg", top=3)
```

From a feature vector, with numpy and safetensors alone: `python recognize.py features.npy`. Features are those of
`{encoder["name"]}`{weights} ({encoder["precision"]}), rounded to float16, of width {encoder["dim"]}.
{_finetuning(config.get("finetune"))}
## Files

* `model.safetensors`: tensors of the score terms {", ".join(terms)}: prototypes, temperature, adapter and factors.
* `config.json`: labels, encoder, and the temperature {config["confidence"]["temperature"]:.4g} of the probabilities,
  fitted on validation images. {100 * config["confidence"]["new_share"]:.0f} % of images are expected to
  show unseen pairs.

## Training data

{_counts(facts.counts)}

## Evaluation

On test images, in the {world} world:

{_metrics(facts.metrics.get(world, {}))}

S and U: accuracy on seen and unseen pairs at the ends of the calibration curve; HM: the best harmonic mean on it; AUC:
the area under it. The numbers hold for images like those of the test split only.
{facts.remark}

{NOTES}
""" + notes.removeprefix("\n")


def _finetuning(options: Mapping[str, Any] | None) -> str:
    if options is None:
        return ""
    blocks = "last block" if options["blocks"] == 1 else f"last {options['blocks']} blocks"
    return f"""
The image tower's {blocks} were fine-tuned, and no cache holds the resulting features: features for `recognize.py`
are those of `encoder.onnx`, which `duplex export --onnx-encoder` writes, not rounded.
"""


def _counts(counts: Mapping[str, Any]) -> str:
    flat: dict[Any, Any] = pd.json_normalize(dict(counts), sep=" ").to_dict("records")[0] if counts else {}
    numbers = {key.replace("_", " "): value for key, value in flat.items() if isinstance(value, (int, float))}
    if not numbers:
        return "Not recorded."
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value:g} |" for key, value in numbers.items())])


def _metrics(metrics: Mapping[str, Any]) -> str:
    rows = [
        f"| {title} | {number(metrics[key])} | {interval_text(metrics, key, '.2f')} |"
        for key, title in METRICS.items()
        if f"{key}_low" in metrics
    ]
    return "\n".join(["| | % | 95 % |", "|---|---|---|", *rows]) if rows else "The run was not evaluated."
