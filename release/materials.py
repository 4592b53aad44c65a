"""Write the bill of materials of a wheel, CycloneDX JSON: the versions of all distributions with which it was tested.

    .venv-wheel/bin/python release/materials.py dist/duplex_czsl-0.1.0-py3-none-any.whl

It is written beside the wheel, without a time or a random number: the same wheel and versions give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME, EXTRAS = "duplex-czsl", ("pipeline",)
Record = dict[str, Any]


def installed(name: str, extras: tuple[str, ...]) -> dict[str, set[str]]:
    """Return the distribution and all that it requires here, directly or not: name -> names of its own requirements."""
    found: dict[str, set[str]] = {}
    visited: set[tuple[str, str]] = set()
    queue = [(canonicalize_name(name), extra) for extra in ("", *extras)]
    while queue:
        node = queue.pop()
        if node in visited:
            continue
        visited.add(node)
        edges = found.setdefault(node[0], set())
        for text in distribution(node[0]).requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": node[1]}):
                required = canonicalize_name(requirement.name)
                queue += [(required, extra) for extra in ("", *requirement.extras)]
                edges |= {required} - {node[0]}  # a distribution may require extras of itself
    return found


def licenses(metadata: Any) -> list[Record]:
    """Return the licences that a distribution's metadata declares, as CycloneDX records; long texts are left out."""
    if expression := metadata.get("License-Expression"):
        return [{"expression": expression}]
    prefix = "License :: "
    names = [name.rpartition(" :: ")[2] for name in metadata.get_all("Classifier", []) if name.startswith(prefix)]
    text = (metadata.get("License") or "").strip()
    if not names and text and "\n" not in text and len(text) <= 100:
        names = [text]
    return [{"license": {"name": name}} for name in names]


def component(dist: Distribution) -> Record:
    name, version = canonicalize_name(dist.metadata["Name"]), dist.version
    address = f"pkg:pypi/{name}@{version}"
    record = {"type": "library", "bom-ref": address, "name": name, "version": version, "purl": address}
    declared = licenses(dist.metadata)
    return record | ({"licenses": declared} if declared else {})


def bill(wheel: Path) -> Record:
    """Return the bill of materials of a wheel that is installed in this environment."""
    graph = installed(NAME, EXTRAS)
    parts = {name: component(distribution(name)) for name in sorted(graph)}
    root = parts.pop(NAME)
    root["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    address = {part["name"]: part["bom-ref"] for part in (root, *parts.values())}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": root},
        "components": list(parts.values()),
        "dependencies": [
            {"ref": address[name], "dependsOn": sorted(address[edge] for edge in graph[name])} for name in sorted(graph)
        ],
    }


def main(wheel: Path) -> None:
    target = wheel.with_suffix(".cdx.json")
    record = bill(wheel)
    target.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"{target}: {len(record['components'])} distributions")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
