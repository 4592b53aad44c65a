"""Folders of encoders whose code writes a file when it runs, and a stand-in for transformers that would run it."""

from __future__ import annotations

import json
import pickle
import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from duplex.encoders.libraries import open_clip
from tests.encoders.small import write_folder

CODE = {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None], "AutoConfig": "code.Config"}}


@dataclass
class Trap:
    """A stranger's folder; `is_sprung` tells whether its file `code.py` ran or its pickle was opened."""

    folder: Path
    marker: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.marker = self.folder.with_name(f"{self.folder.name}_ran")
        (self.folder / "code.py").write_text(f"open({str(self.marker)!r}, 'w').close()\n")

    @property
    def is_sprung(self) -> bool:
        return self.marker.exists()

    def write(self, name: str, config: Mapping[str, Any]) -> None:
        (self.folder / name).write_text(json.dumps(config))

    def write_clip(self, **changes: Mapping[str, Any]) -> str:
        """Write a small CLIP with changed groups of model_cfg, such as text_cfg; return the encoder's name."""
        name = write_folder(self.folder)
        config = json.loads((self.folder / "open_clip_config.json").read_text())
        for group, values in changes.items():
            config["model_cfg"][group] |= values
        self.write("open_clip_config.json", config)
        self.write("config.json", CODE)
        self.write("tokenizer_config.json", CODE)
        return name

    def write_tokenizer_trap(self, **kwargs: Any) -> str:
        options = {"trust_remote_code": True, **kwargs}
        return self.write_clip(text_cfg={"hf_tokenizer_name": str(self.folder), "tokenizer_kwargs": options})

    def write_pickle(self, name: str) -> Path:
        path = self.folder / name
        path.write_bytes(pickle.dumps({"weight": OpenedPickle(self.marker)}, protocol=2))
        return path


class OpenedPickle:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


class Auto:
    """Stands in for AutoTokenizer, AutoConfig and AutoModel; somebody answers "yes" where transformers would ask."""

    @classmethod
    def from_pretrained(cls, place: Any, trust_remote_code: bool | None = None, **_: Any) -> Auto:
        for name in ("config.json", "tokenizer_config.json"):
            path = Path(place) / name
            if path.is_file() and "auto_map" in json.loads(path.read_text()):
                if trust_remote_code is False:
                    raise ValueError(f"loading {place} requires you to execute its code. Set trust_remote_code=True")
                runpy.run_path(str(path.with_name("code.py")))
        return cls()


class BlipConfig:
    """Stands in for the class of transformers, which can load attention from a repository."""

    def __init__(self, **options: Any) -> None:
        for group in (options, options.get("text_config", {}), options.get("vision_config", {})):
            if "attn_implementation" in group:
                runpy.run_path(f"{group['attn_implementation']}/code.py")


class BlipForImageTextRetrieval(nn.Module):
    def __init__(self, config: BlipConfig) -> None:
        super().__init__()
        for name in ("vision_model", "vision_proj", "text_encoder", "text_proj"):
            self.add_module(name, nn.Identity())


def pretend_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("transformers")
    module.__spec__ = ModuleSpec("transformers", None)
    parts = {"AutoTokenizer": Auto, "AutoConfig": Auto, "AutoModel": Auto, "BlipConfig": BlipConfig}
    parts["BlipForImageTextRetrieval"] = BlipForImageTextRetrieval
    for name, part in parts.items():
        setattr(module, name, part)
        monkeypatch.setattr(open_clip.hf_model, name, part, raising=False)
    monkeypatch.setattr(open_clip.hf_model, "transformers", module)
    monkeypatch.setitem(sys.modules, "transformers", module)
