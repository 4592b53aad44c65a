import json
import os
from pathlib import Path

import pytest
import requests
import torch

from duplex.encoders.base import encoder_identity, load_encoder
from duplex.encoders.libraries import open_clip
from duplex.encoders.open_clip import ClipFamily, convert_weights
from duplex.errors import DuplexError, UsageError
from tests.encoders.small import ARCHITECTURE, add_architecture, write_folder


def test_moving_a_folder_keeps_the_identity(tmp_path: Path) -> None:
    before = encoder_identity(write_folder(tmp_path / "a"))
    (tmp_path / "a").rename(tmp_path / "b")
    assert encoder_identity(f"local-dir:{tmp_path / 'b'}") == before
    assert before.dim == 16 and len(before.weights) == 64
    assert before == load_encoder(f"local-dir:{tmp_path / 'b'}", towers="image").identity


@pytest.mark.parametrize("wrong", [{"towers": "side"}, {"precision": "fp8"}])
def test_unknown_towers_and_precisions_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=f"unknown {next(iter(wrong))} '"):
        load_encoder("tiny", **wrong)


@pytest.mark.parametrize("change", ["weights", "preprocess", "precision"])
def test_weights_preprocessing_and_precision_change_the_identity(tmp_path: Path, change: str) -> None:
    first = encoder_identity(write_folder(tmp_path / "a")).to_dict()
    other = write_folder(
        tmp_path / "b", seed=int(change == "weights"), **({"fill_color": 9} if change == "preprocess" else {})
    )
    second = encoder_identity(other, precision="tf32" if change == "precision" else "fp32").to_dict()
    differing = {key for key in first if first[key] != second[key]}
    assert differing == {{"weights": "weights", "preprocess": "preprocessing", "precision": "precision"}[change]}


def test_a_replaced_weights_file_is_hashed_again(tmp_path: Path) -> None:
    name = write_folder(tmp_path)
    before = encoder_identity(name).weights
    write_folder(tmp_path, seed=1)
    os.utime(tmp_path / "open_clip_model.safetensors", ns=(1, 1))
    assert encoder_identity(name).weights != before


def test_missing_weights_are_never_made_up(tmp_path: Path) -> None:
    name = write_folder(tmp_path)
    (tmp_path / "open_clip_model.safetensors").unlink()
    with pytest.raises(DuplexError, match="holds no weights"):
        load_encoder(name)
    with pytest.raises(UsageError, match=r"needs weights.*openai"):
        load_encoder("ViT-B-32")
    with pytest.raises(UsageError, match="neither a file nor a tag"):
        load_encoder("ViT-B-32", "no-such-tag")
    with pytest.raises(UsageError, match="unknown encoder"):
        load_encoder("ViT-Z")


def test_offline_mode_downloads_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DuplexError, match=r"not on disk and could not be downloaded.*HF_HUB_OFFLINE"):
        load_encoder("ViT-B-32", "laion2b_s34b_b79k")


@pytest.mark.parametrize(
    ("name", "tag", "right"),
    [("ViT-L-14", "openai", "ViT-L-14-quickgelu"), ("RN50", "openai", "RN50-quickgelu"),
     ("ViT-B-32-quickgelu", "laion2b_e16", None)],
)  # fmt: skip
def test_a_wrong_activation_names_the_right_encoder(name: str, tag: str, right: str | None) -> None:
    with pytest.raises(UsageError, match=f"use the encoder '{right}'" if right else "neither a file nor a tag"):
        load_encoder(name, tag)


def test_a_bare_file_needs_unambiguous_preprocessing(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save({}, file)
    with pytest.raises(UsageError, match=r"does not state its preprocessing.*encoders convert.*--tag"):
        ClipFamily().find("ViT-L-14", str(file))  # its published weights disagree
    assert ClipFamily().find("ViT-L-14-quickgelu", str(file)).preprocess["mean"][0] == pytest.approx(0.48145466)


def test_weights_of_another_architecture_are_an_error(tmp_path: Path) -> None:
    name = write_folder(tmp_path)
    config = json.loads((tmp_path / "open_clip_config.json").read_text())
    config["model_cfg"]["vision_cfg"]["layers"] = 3
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(DuplexError, match=r"safetensors does not fit .*config\.json"):
        load_encoder(name)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_cfg": {}}', '{"model_cfg": {}, "preprocess_cfg": {}}'])
def test_a_broken_config_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    name = write_folder(tmp_path)
    (tmp_path / "open_clip_config.json").write_text(text)
    with pytest.raises(DuplexError, match=r"open_clip_config\.json"):
        load_encoder(name)


def test_unreachable_weights_fail_after_one_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub that nobody answers for: one refused connection, not a minute of them, and the whole sentence."""
    asked = []

    def refuse(url: str, **options: object) -> None:
        asked.append(url)
        raise requests.ConnectionError("refused")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("duplex.encoders.base.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("duplex.encoders.open_clip.DOWNLOAD_FOLDER", tmp_path / "clip")
    monkeypatch.setattr("requests.head", refuse)
    with pytest.raises(DuplexError, match=r"does not answer; download them .*local-dir:FOLDER") as caught:
        load_encoder("ViT-L-14-quickgelu", "openai")
    assert len(asked) == 1 and isinstance(caught.value.__cause__, requests.ConnectionError)


def test_usual_names_and_safetensors_are_preferred(tmp_path: Path) -> None:
    name = write_folder(tmp_path)
    wanted = encoder_identity(name).weights
    for other in ("aaa.safetensors", "open_clip_model.bin", "model.safetensors"):
        (tmp_path / other).write_bytes(b"other")
    assert encoder_identity(name).weights == wanted


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
    add_architecture(monkeypatch, tmp_path, "small-quickgelu")
    add_architecture(monkeypatch, tmp_path, "small", quick_gelu=False)
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
    with pytest.raises(
        DuplexError, match=f"may run code and is not loaded; .* `duplex encoders convert {archive[0]} FOLDER"
    ):
        load_encoder(architecture, str(archive[0]))


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
