"""No door to a stranger's encoder runs the stranger's code; each refuses in one line that names field or file."""

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from duplex.encoders import tiny
from duplex.encoders.base import encoder_identity, load_encoder, read_config
from duplex.encoders.libraries import open_clip, timm
from duplex.encoders.strangers import FIELDS, check_fields
from duplex.errors import DuplexError
from tests.encoders.small import ARCHITECTURE, PREPROCESS, add_architecture
from tests.encoders.traps import CODE, Trap, pretend_transformers

VISION = {"image_size": 32, "patch_size": 16, "hidden_size": 16}


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trap:
    pretend_transformers(monkeypatch)
    return Trap(tmp_path / "stranger")


def refused(trap: Trap, name: str, weights: str | None = None, towers: str = "both") -> str:
    """Load the encoder, which must fail without running the folder's code; return the message."""
    with pytest.raises(Exception) as caught:
        load_encoder(name, weights, towers=towers)
        assert not trap.is_sprung
    assert not trap.is_sprung
    assert isinstance(caught.value, DuplexError), caught.value
    assert "\n" not in str(caught.value)
    return str(caught.value)


def on_hub(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the folder be what was downloaded from every repository of the hub."""

    def cached(_: str, name: str) -> str | None:
        path = trap.folder / name
        return str(path) if path.is_file() else None

    monkeypatch.setattr("duplex.encoders.base.try_to_load_from_cache", cached)
    monkeypatch.setattr("duplex.encoders.base.hf_hub_download", missing_on_hub)
    monkeypatch.setattr("duplex.encoders.base.check_reachable", lambda *_: None)
    downloaded = trap.folder / "open_clip_config.json"
    monkeypatch.setattr("open_clip.factory.download_pretrained_from_hf", lambda *_, **__: downloaded)


def missing_on_hub(owner: str, name: str) -> None:
    from duplex.encoders.base import EntryNotFoundError

    raise EntryNotFoundError(f"{owner} has no {name}")


@pytest.mark.parametrize("door", ["local-dir:", "hf-hub:"])
@pytest.mark.parametrize("towers", ["both", "image"])
def test_trust_in_remote_code_is_refused(trap: Trap, monkeypatch: pytest.MonkeyPatch, door: str, towers: str) -> None:
    name = trap.write_tokenizer_trap()
    if door == "hf-hub:":
        on_hub(trap, monkeypatch)
        name = "hf-hub:stranger/model"
    said = refused(trap, name, towers=towers)
    assert "'model_cfg.text_cfg.tokenizer_kwargs.trust_remote_code'" in said and "remove" in said


@pytest.mark.parametrize("door", ["local-dir:", "hf-hub:"])
def test_a_tokenizer_with_code_of_its_own_is_refused(trap: Trap, monkeypatch: pytest.MonkeyPatch, door: str) -> None:
    """Somebody would answer "yes" where transformers asks."""
    name = trap.write_clip(text_cfg={"hf_tokenizer_name": str(trap.folder)})
    if door == "hf-hub:":
        on_hub(trap, monkeypatch)
        name = "hf-hub:stranger/model"
    said = refused(trap, name)
    assert "tokenizer" in said and ("'auto_map'" in said or "execute its code" in said)


def test_the_checked_configuration_of_the_hub_is_the_one_that_is_used(
    trap: Trap, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The repository changes after the configuration was read: no code runs."""
    trap.write_clip()
    on_hub(trap, monkeypatch)
    later = Trap(tmp_path / "later")
    later.write_tokenizer_trap()
    changed = later.folder / "open_clip_config.json"
    monkeypatch.setattr("open_clip.factory.download_pretrained_from_hf", lambda *_, **__: changed)
    assert load_encoder("hf-hub:stranger/model").text.tokens("red apple")
    assert not later.is_sprung


@pytest.mark.parametrize(
    ("group", "values", "said"),
    [
        ("text_cfg", {"hf_model_name": "{folder}"}, "'model_cfg.text_cfg.hf_model_name'"),
        ("vision_cfg", {"timm_model_name": "local-dir:{folder}"}, "'model_cfg.vision_cfg.timm_model_name'"),
        ("vision_cfg", {"auto_map": {}}, "'model_cfg.vision_cfg.auto_map'"),
        ("vision_cfg", {"layers": {"trust_remote_code": True}}, "'model_cfg.vision_cfg.layers'"),
        ("text_cfg", {"tokenizer_kwargs": {"bpe_path": "/etc/passwd"}}, "tokenizer_kwargs.bpe_path'"),
        ("text_cfg", {"act_kwargs": {"inplace": True}}, "act_kwargs.inplace'"),
    ],
)
def test_unknown_fields_and_models_are_refused(trap: Trap, group: str, values: Any, said: str) -> None:
    values = json.loads(json.dumps(values).replace("{folder}", str(trap.folder)))
    assert said in refused(trap, trap.write_clip(**{group: values}))


@pytest.mark.parametrize("file", ["open_clip_model.bin", "model.pth", "pytorch_model.bin"])
def test_pickled_weights_of_a_folder_are_refused(trap: Trap, file: str) -> None:
    name = trap.write_clip()
    (trap.folder / "open_clip_model.safetensors").unlink()
    trap.write_pickle(file)
    said = refused(trap, name)
    assert file in said and "safetensors" in said


def test_pickled_weights_of_the_hub_are_refused(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    trap.write_clip()
    (trap.folder / "open_clip_model.safetensors").unlink()
    trap.write_pickle("open_clip_pytorch_model.bin")
    on_hub(trap, monkeypatch)
    assert "has no open_clip_model.safetensors" in refused(trap, "hf-hub:stranger/model")


@pytest.mark.parametrize("name", ["timm:test_resnet", "small-quickgelu"])
@pytest.mark.parametrize("suffix", [".pth", ".bin", ".pt"])
def test_code_in_a_weights_file_does_not_run(
    trap: Trap, monkeypatch: pytest.MonkeyPatch, name: str, suffix: str
) -> None:
    add_architecture(monkeypatch, trap.folder, "small-quickgelu")
    published = {"url": "", "mean": (0.5,) * 3, "std": (0.5,) * 3, "quick_gelu": True}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "small-quickgelu", {"openai": published})
    file = trap.write_pickle(f"weights{suffix}")
    assert str(file) in refused(trap, name, str(file), "image")


@pytest.mark.parametrize("name", ["timm:hf-hub:stranger/model", "timm:local-dir:stranger", "timm:stranger.code"])
def test_timm_loads_its_own_models_alone(trap: Trap, name: str) -> None:
    assert "unknown encoder" in refused(trap, name, "random:0", "image")


def write_blip(trap: Trap, **changes: Any) -> str:
    trap.write("config.json", {"text_config": {}, "vision_config": VISION, "image_text_hidden_size": 8} | changes)
    trap.write("preprocessor_config.json", {"image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    (trap.folder / "vocab.txt").write_text("a\n")
    save_file({"weight": torch.zeros(1)}, trap.folder / "model.safetensors")
    return f"blip:{trap.folder}"


@pytest.mark.parametrize("door", ["folder", "hub"])
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (CODE, "auto_map"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"vision_config": VISION | CODE}, "vision_config.auto_map"),
    ],
)
def test_code_in_a_blip_model_is_refused(
    trap: Trap, monkeypatch: pytest.MonkeyPatch, door: str, changes: Any, field: str
) -> None:
    name = write_blip(trap, **changes)
    if door == "hub":
        on_hub(trap, monkeypatch)
        name = "blip:stranger/model"
    said = refused(trap, name)
    assert f"'{field}'" in said and "config.json" in said and "choose another encoder" in said


@pytest.mark.parametrize("file", ["preprocessor_config.json", "tokenizer_config.json"])
def test_code_beside_a_blip_model_is_refused(trap: Trap, file: str) -> None:
    name = write_blip(trap)
    trap.write(file, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} | CODE)
    assert file in refused(trap, name)


@pytest.mark.parametrize("group", ["", "text_config", "vision_config"])
def test_fields_that_blip_does_not_need_are_not_passed_on(trap: Trap, group: str) -> None:
    kernel = {"attn_implementation": str(trap.folder)}
    changes = {group: (VISION if group == "vision_config" else {}) | kernel} if group else kernel
    name = write_blip(trap, **changes)
    load_encoder(name, towers="image")
    assert not trap.is_sprung


def test_every_architecture_of_open_clip_has_known_fields_alone(tmp_path: Path) -> None:
    for name in open_clip.list_models():
        check_fields(tmp_path, {"model_cfg": open_clip.get_model_config(name), "preprocess_cfg": PREPROCESS})


def test_known_fields_are_fields_of_open_clip() -> None:
    classes = {
        "vision_cfg": open_clip.model.CLIPVisionCfg,
        "text_cfg": open_clip.model.CLIPTextCfg,
        "multimodal_cfg": open_clip.coca_model.MultimodalCfg,
    }
    for group, kind in {**classes, "preprocess_cfg": open_clip.transform.PreprocessCfg}.items():
        assert FIELDS[group] <= {field.name for field in fields(kind)}, group
    assert set(ARCHITECTURE) <= FIELDS["model_cfg"]


def test_a_folder_whose_model_timm_knows_loads(tmp_path: Path) -> None:
    """The fields of the packaged encoder, in a stranger's folder."""
    architecture = read_config(tiny.CONFIG)["architecture"]
    model = open_clip.CLIP(**json.loads(json.dumps(architecture)))
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "model.safetensors")
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": architecture, "preprocess_cfg": {}}))
    assert timm.is_model(architecture["vision_cfg"]["timm_model_name"])
    assert load_encoder(f"local-dir:{tmp_path}").text.tokens("red apple")
    moved = shutil.copytree(tmp_path, tmp_path / "moved")
    assert encoder_identity(f"local-dir:{tmp_path}") == encoder_identity(f"local-dir:{moved}")
