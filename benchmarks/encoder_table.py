"""Width, size, licence and abilities of encoders, from their architectures: the table that `duplex encoders` prints.

    python -m benchmarks.encoder_table     # writes duplex/recognition/encoders.csv, in two minutes

One row per published weights: all of open_clip and the DINOs of timm. Each architecture is built without memory for its
weights. `megabytes` are those of its parameters in float32. `text` and `blocks` say whether prompts can be encoded (not
by text towers of transformers) and whether the last blocks of the image tower can be fine-tuned. Licences are timm's
entries for the same file, or for all weights of the same image tower if they agree, and OpenAI's; where neither says
anything, the cell is empty.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pandas as pd
import torch

from benchmarks.measure import say
from duplex.encoders.base import PACKAGED, load_encoder
from duplex.encoders.image_blocks import block_count
from duplex.encoders.libraries import open_clip, timm
from duplex.encoders.open_clip import offline_model_arguments, open_clip_class
from duplex.encoders.tiny import TAG
from duplex.errors import UsageError
from duplex.recognition.offers import COLUMNS, TABLE

DINOS = ("*dinov2*", "*dinov3*")
UNKNOWN = (None, "unknown")
OPENAI = "mit"  # of https://github.com/openai/CLIP


@cache
def licences_by_repository() -> dict[str, str]:
    """Licence of each repository of the Hugging Face hub that timm lists."""
    found = [timm.get_pretrained_cfg(name) for name in timm.list_pretrained()]
    listed = [config for config in found if config is not None and config.hf_hub_id]
    return {config.hf_hub_id.strip("/"): config.license for config in listed if config.license not in UNKNOWN}


@cache
def tower_licence(model: str) -> str:
    """The licence of all weights that timm lists for an image tower; empty if they differ."""
    configs = [timm.get_pretrained_cfg(name) for name in timm.list_pretrained(f"{model}.*")]
    licences = {config.license for config in configs if config is not None}
    licence = licences.pop() if len(licences) == 1 else None
    return "" if licence in UNKNOWN else str(licence)


def open_clip_licence(name: str, tag: str) -> str:
    """The licence of published weights of open_clip; empty where it is not known."""
    if tag == "openai":
        return OPENAI
    repository = open_clip.get_pretrained_cfg(name, tag).get("hf_hub", "").strip("/")
    if licence := licences_by_repository().get(repository):
        return licence
    tower = open_clip.get_model_config(name)["vision_cfg"].get("timm_model_name")
    return tower_licence(tower) if tower else ""


def megabytes(model: Any) -> int:
    """Size of a model's parameters in float32."""
    return round(4 * sum(parameter.numel() for parameter in model.parameters()) / 1e6)


def has_blocks(visual: Any) -> bool:
    """Whether the last blocks of an image tower can be fine-tuned."""
    try:
        return block_count(SimpleNamespace(visual=visual, name="")) > 0
    except UsageError:
        return False


def yes(value: bool) -> str:
    return "yes" if value else "no"


def open_clip_rows(name: str) -> list[dict[str, Any]]:
    architecture = open_clip.get_model_config(name)
    facts: dict[str, Any] = {"width": architecture["embed_dim"]}
    with torch.device("meta"):
        if architecture["text_cfg"].get("hf_model_name"):  # of transformers, whose configuration is on the hub
            vision = offline_model_arguments(architecture)["vision_cfg"]
            visual = open_clip.model._build_vision_tower(architecture["embed_dim"], vision)
            facts |= {"megabytes": "", "text": "no"}
        else:
            model = open_clip_class(architecture)(**offline_model_arguments(architecture))
            visual = model.visual
            facts |= {"megabytes": megabytes(model), "text": "yes"}
    facts["blocks"] = yes(has_blocks(visual))
    tags = open_clip.list_pretrained_tags_by_model(name)
    rows = [{"encoder": name, "weights": tag, "licence": open_clip_licence(name, tag), **facts} for tag in tags]
    return rows or [{"encoder": name, "weights": "", "licence": "", **facts}]


def timm_row(published: str) -> dict[str, Any]:
    name, _, tag = published.partition(".")
    with torch.device("meta"):
        model: Any = timm.create_model(name, pretrained=False, num_classes=0)
    licence = licences_by_repository().get(f"timm/{published}", "")
    width = getattr(model, "head_hidden_size", model.num_features)
    row = {"encoder": f"timm:{name}", "weights": tag, "licence": licence, "width": width}
    return row | {"megabytes": megabytes(model), "text": "no", "blocks": yes(has_blocks(model))}


def packaged_row() -> dict[str, Any]:
    encoder = load_encoder(PACKAGED)
    blocks = yes(has_blocks(encoder.visual))
    row = {"encoder": PACKAGED, "weights": TAG, "licence": "mit", "width": encoder.dim}
    return row | {"megabytes": 7, "text": "yes", "blocks": blocks}


def main() -> None:
    rows = [packaged_row()]
    for name in open_clip.list_models():
        rows += open_clip_rows(name)
    for pattern in DINOS:
        rows += [timm_row(published) for published in timm.list_pretrained(pattern)]
    pd.DataFrame(rows, columns=COLUMNS).to_csv(TABLE, index=False, lineterminator="\n")
    say(f"wrote {len(rows)} rows to {TABLE}")


if __name__ == "__main__":
    main()
