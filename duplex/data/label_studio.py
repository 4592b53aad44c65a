"""Exchange labels with Label Studio: read its exported labels, and write a model's answers as pre-annotations.

The labelling config must have controls named `state` and `object`, for the whole image or for
rectangles on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from duplex.data.images import read_text
from duplex.errors import DuplexError

LOCAL = "/data/local-files/?d="  # address of a file below the folder that Label Studio reads local files from
UPLOAD = re.compile(r"/data/upload/\d+/(?:[0-9a-f]{8}-)?")  # begins the address of an uploaded file
CONTROLS = ("state", "object")


def read_tasks(path: Path) -> list[list[Any]]:
    """Read a JSON export: [image, state, object, x, y, width, height] per label; the box is in pixels, or all None."""
    try:
        tasks = json.loads(read_text(path))
        return list(chain.from_iterable(_task_rows(task, f"{path}, task {task.get('id')}") for task in tasks))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DuplexError(
            f"{path} is not Label Studio's JSON export (a list of tasks with 'data' and 'annotations'); export as JSON"
        ) from error


def _task_rows(task: Mapping[str, Any], place: str) -> list[list[Any]]:
    done = [each["result"] for each in task["annotations"] if not each.get("was_cancelled")]
    parts = done[-1] if done else []
    rectangles = {part["id"] for part in parts if "width" in part["value"]}
    regions: dict[str, dict[str, Any]] = {}  # id of a rectangle, "" for the whole image -> labels and sides
    for part in parts:
        value = part["value"]
        region = regions.setdefault(part["id"] if part.get("id") in rectangles else "", {})
        names = value.get("choices") or value.get("rectanglelabels")
        if names:
            region[part["from_name"]] = names[0]
        if "width" in value:
            if value.get("rotation"):
                raise DuplexError(f"{place} has a rotated rectangle; draw it again without rotation")
            width = part["original_width"] / 100  # values are percentages
            height = part["original_height"] / 100
            region |= {"x": value["x"] * width, "y": value["y"] * height}
            region |= {"width": value["width"] * width, "height": value["height"] * height}
    rows = []
    for region in regions.values():
        lacking = [name for name in CONTROLS if name not in region]
        if lacking:
            labels = [name for name, value in region.items() if isinstance(value, str)]
            found = ", ".join(sorted(labels)) or "none"
            raise DuplexError(
                f"{place} has no {' and no '.join(lacking)} (labels found: {found}); give it a state and an object, "
                "with controls named `state` and `object` in the labelling config"
            )
        sides = [region.get(name) for name in ("x", "y", "width", "height")]
        at = task["data"]["image"]
        image = parse_qs(urlsplit(at).query)["d"][0] if at.startswith(LOCAL) else unquote(UPLOAD.sub("", at))
        rows.append([image, *(region[name] for name in CONTROLS), *sides])
    return rows


def pre_annotated(image: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """A Label Studio task for `image` that suggests the first composition, if any, in `record`, an answer as a dict."""
    best = record["top"][0] if "top" in record else {}
    common = {"to_name": "image", "type": "choices"}
    result = [{**common, "from_name": name, "value": {"choices": [best[name]]}} for name in CONTROLS if best]
    predictions = [{"model_version": "duplex", "score": best.get("probability"), "result": result}] if best else []
    return {"data": {"image": LOCAL + quote(image)}, "predictions": predictions}
