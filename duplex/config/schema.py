"""The JSON schema of params.yaml, by which editors complete keys and mark mistakes."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from duplex.config.params import Params
from duplex.options import AutoFinetune, FinetuneOptions, TrainingOptions


def json_schema() -> dict[str, Any]:
    """JSON schema of params.yaml; methods' options are unchecked."""
    schema = Params.model_json_schema()
    parts = {}
    for options in (TrainingOptions, FinetuneOptions, AutoFinetune):
        parts[options] = {**TypeAdapter(options).json_schema(), "required": [], "additionalProperties": False}
    tables: dict[str, Any] = {"training": parts[TrainingOptions]}
    tables["finetune"] = {"anyOf": [{"const": "auto"}, parts[FinetuneOptions], parts[AutoFinetune]]}
    for name in ("MethodChanges", "MethodEntry"):
        schema["$defs"][name]["properties"] |= tables
    entry = schema["$defs"]["DatasetParams"]
    entry["properties"]["training"] = parts[TrainingOptions]
    encoder = entry["properties"]["encoder"]
    entry["properties"]["encoder"] = {"anyOf": [encoder, {"type": "array", "items": encoder}]}
    del entry["required"]  # datasets/NAME.yaml may have the other keys
    return schema
