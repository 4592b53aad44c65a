"""The encoders there are: width of their features, and which of their weights are on disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from duplex.encoders import PACKAGED
from duplex.encoders.hub import place_on_disk
from duplex.encoders.openclip import open_clip
from duplex.encoders.source import find_source
from duplex.errors import DuplexError

FURTHER = (  # named by what they come from, too many to list
    "local-dir:FOLDER and hf-hub:OWNER/NAME of open_clip",
    "timm:MODEL (images alone)",
    "blip:OWNER/NAME or blip:FOLDER (needs pip install 'duplex[blip]')",
)


@dataclass(frozen=True)
class CatalogEntry:
    name: str
    dim: int
    tags: tuple[str, ...]  # published weights
    on_disk: tuple[str, ...]  # those that need no network

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def catalog() -> list[CatalogEntry]:
    """The packaged encoder first, then every architecture of open_clip."""
    return [*_packaged(), *(_entry(name) for name in open_clip.list_models())]


def _packaged() -> list[CatalogEntry]:
    try:
        return [CatalogEntry(PACKAGED, find_source(PACKAGED).dim, ("packaged",), ("packaged",))]
    except DuplexError:
        return []


def _entry(name: str) -> CatalogEntry:
    tags = tuple(open_clip.list_pretrained_tags_by_model(name))
    present = tuple(tag for tag in tags if place_on_disk(open_clip.get_pretrained_cfg(name, tag)))
    return CatalogEntry(name, int(open_clip.get_model_config(name)["embed_dim"]), tags, present)
