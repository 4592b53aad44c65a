"""The encoders there are: width of their features, and which of their weights are on disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from duplex.encoders.source import PACKAGED, find_source
from duplex.encoders.vision_ops import ensure_torchvision
from duplex.errors import DuplexError

ensure_torchvision()

import open_clip  # noqa: E402
from huggingface_hub import try_to_load_from_cache  # noqa: E402
from open_clip.constants import HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME  # noqa: E402

DOWNLOADS = Path("~/.cache/clip")  # where open_clip puts what does not come from the hub


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
    present = tuple(tag for tag in tags if _is_present(open_clip.get_pretrained_cfg(name, tag)))
    return CatalogEntry(name, int(open_clip.get_model_config(name)["embed_dim"]), tags, present)


def _is_present(published: dict[str, Any]) -> bool:
    url, hub = published.get("url", ""), published.get("hf_hub", "")
    if url and (DOWNLOADS.expanduser() / url.rsplit("/", 1)[-1]).is_file():
        return True
    owner, _, file = hub.rpartition("/")
    names = (file,) if file else (HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME)
    return bool(owner) and any(isinstance(try_to_load_from_cache(owner, name), str) for name in names)
