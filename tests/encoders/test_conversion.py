import json
from pathlib import Path

import pytest
import torch

from duplex.encoders import load_encoder
from duplex.encoders.open_clip_source import convert_weights, open_clip
from duplex.errors import DuplexError, UsageError
from tests.encoders.small import ARCHITECTURE

Archive = tuple[Path, torch.nn.Module]


class Scripted(torch.nn.Module):
    """The form of OpenAI's files: a scripted module, in half precision, with three numbers beside the weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        numbers = dict.fromkeys(("input_resolution", "context_length", "vocab_size"), torch.tensor(7))
        for name, value in {**dict(model.named_parameters()), **numbers}.items():
            *folders, leaf = name.split(".")
            module: torch.nn.Module = self
            for folder in folders:
                if not hasattr(module, folder):
                    module.add_module(folder, torch.nn.Module())
                module = getattr(module, folder)
            module.register_buffer(leaf, value.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.fixture
def architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("open_clip.factory._MODEL_CONFIGS", {**open_clip.factory._MODEL_CONFIGS})
    monkeypatch.setattr("open_clip.factory._MODEL_CONFIG_PATHS", [*open_clip.factory._MODEL_CONFIG_PATHS])
    (tmp_path / "small-quickgelu.json").write_text(json.dumps(ARCHITECTURE))
    (tmp_path / "small.json").write_text(json.dumps({**ARCHITECTURE, "quick_gelu": False}))
    open_clip.add_model_config(tmp_path / "small-quickgelu.json")
    open_clip.add_model_config(tmp_path / "small.json")
    published = {"url": "", "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "quick_gelu": True}
    for name in ("small", "small-quickgelu"):
        monkeypatch.setitem(open_clip.pretrained._PRETRAINED, name, {"openai": published})
    return "small-quickgelu"


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    torch.manual_seed(3)
    model = open_clip.CLIP(**json.loads(json.dumps(ARCHITECTURE))).eval()
    path = tmp_path / "archive.pt"
    torch.jit.save(torch.jit.script(Scripted(model).half()), path)
    return path, model.float()


def test_a_torchscript_archive_becomes_a_folder(tmp_path: Path, architecture: str, archive: Archive) -> None:
    path, model = archive
    convert_weights(path, tmp_path / "out", architecture)
    encoder = load_encoder(f"local-dir:{tmp_path / 'out'}", towers="image")
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    wanted = model.encode_image((pixels.float() / 255 - 0.5) / 0.5)
    assert torch.nn.functional.cosine_similarity(encoder.encode_images(pixels), wanted).min() > 0.9999
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "open_clip_config.json",
        "open_clip_model.safetensors",
    ]


def test_a_torchscript_archive_is_not_loaded_unconverted(architecture: str, archive: Archive) -> None:
    with pytest.raises(DuplexError, match=f"TorchScript archive; `duplex encoders convert {archive[0]}"):
        load_encoder(architecture, str(archive[0]))


def test_the_activation_is_checked(tmp_path: Path, architecture: str, archive: Archive) -> None:
    with pytest.raises(UsageError, match="use the encoder 'small-quickgelu'"):
        convert_weights(archive[0], tmp_path / "out", "small")


def test_a_wrong_archive_leaves_no_folder_that_loads(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "other.pt"
    torch.save({"a": torch.zeros(2)}, path)
    with pytest.raises(UsageError, match="--tag"):
        convert_weights(path, tmp_path / "out", architecture)
    with pytest.raises(DuplexError, match="does not hold the weights"):
        convert_weights(path, tmp_path / "out", architecture, "openai")
    assert not list((tmp_path / "out").iterdir())
    path.write_bytes(b"nothing")
    with pytest.raises(DuplexError, match="cannot be read as weights"):
        convert_weights(path, tmp_path / "out", architecture, "openai")
    with pytest.raises(UsageError, match="does not exist"):
        convert_weights(tmp_path / "absent.pt", tmp_path / "out", architecture)
