"""Which settings of a stranger's encoder are accepted: known ones, so that none of its code runs.

open_clip and transformers pass unknown fields on, and import Python files of a model's folder or
repository if a field says so (`trust_remote_code`, `auto_map`). `FIELDS` lists what open_clip 3 reads
from an `open_clip_config.json`, `BLIP` what transformers' BLIP reads from a config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from duplex.encoders.base import Config, read_config, require_keys
from duplex.encoders.libraries import open_clip, timm
from duplex.errors import DuplexError

CODE = ("auto_map", "trust_remote_code")  # fields by which transformers imports a model's code
BLOCKS = """
    layers width mlp_ratio ls_init_value pool_type final_ln_after_pool output_tokens act_kwargs
    norm_kwargs block_type qk_norm scaled_cosine_attn scale_heads scale_attn_inner scale_attn scale_fc
"""
TEXT = f"""{BLOCKS}
    context_length vocab_size heads embed_cls pad_id eos_id no_causal_mask proj_bias proj_type
"""
GROUPS = {
    "model_cfg": """
        embed_dim vision_cfg text_cfg multimodal_cfg custom_text quick_gelu init_logit_scale
        init_logit_bias nonscalar_logit_scale
    """,
    "preprocess_cfg": "size mode mean std interpolation resize_mode fill_color",
    "vision_cfg": f"""{BLOCKS}
        head_width patch_size image_size patch_dropout attentional_pool attn_pooler_queries
        attn_pooler_heads no_ln_pre pos_embed_type timm_model_name timm_model_pretrained timm_pool
        timm_proj timm_proj_bias timm_drop timm_drop_path
    """,
    "text_cfg": f"""{TEXT}
        hf_tokenizer_name tokenizer_mode tokenizer_kwargs hf_model_name hf_model_pretrained
        hf_proj_type hf_pooler_type
    """,
    "multimodal_cfg": f"{TEXT} dim_head n_queries attn_pooler_heads",
    "act_kwargs": "approximate",
    "norm_kwargs": "eps elementwise_affine bias",
    "tokenizer_kwargs": "clean strip_sep_token language",
}
FIELDS = {group: frozenset(names.split()) for group, names in GROUPS.items()}
BLIP = {
    "": "projection_dim logit_scale_init_value image_text_hidden_size label_smoothing",
    "text_config": """
        vocab_size hidden_size encoder_hidden_size intermediate_size projection_dim
        num_hidden_layers num_attention_heads max_position_embeddings hidden_act layer_norm_eps
        hidden_dropout_prob attention_probs_dropout_prob initializer_range initializer_factor
        bos_token_id eos_token_id pad_token_id sep_token_id is_decoder use_cache label_smoothing
        chunk_size_feed_forward position_embedding_type
    """,
    "vision_config": """
        hidden_size intermediate_size projection_dim num_hidden_layers num_attention_heads
        num_channels image_size patch_size hidden_act layer_norm_eps dropout attention_dropout
        initializer_range initializer_factor
    """,
}


def refuse(path: Path, field: str, reason: str = "which may run a stranger's code") -> NoReturn:
    problem = f"{path} has the field {field!r}, {reason}"
    raise DuplexError(f"{problem}; remove the field or choose another encoder")


def read_open_clip(path: Path) -> tuple[Config, Config]:
    """Read `model_cfg` and `preprocess_cfg`; DuplexError for unknown fields."""
    config = read_config(path, ("model_cfg", "preprocess_cfg"))
    architecture = config["model_cfg"]
    require_keys(path, architecture, ("embed_dim", "vision_cfg", "text_cfg"))
    check_fields(path, config)
    image_model = architecture["vision_cfg"].get("timm_model_name")
    if image_model and not timm.is_model(str(image_model)):
        refuse(path, "model_cfg.vision_cfg.timm_model_name", "which names no model of timm")
    text_model = architecture["text_cfg"].get("hf_model_name")
    own = [open_clip.get_model_config(name)["text_cfg"] for name in open_clip.list_models()]
    if text_model not in [text.get("hf_model_name") for text in own]:
        reason = "which names no text model of open_clip's own encoders"
        refuse(path, "model_cfg.text_cfg.hf_model_name", reason)
    return architecture, config["preprocess_cfg"]


def check_fields(path: Path, config: Config) -> None:
    """Raise DuplexError if a configuration of open_clip, read from `path`, has an unknown field."""
    for group in ("model_cfg", "preprocess_cfg"):
        _check_group(path, group, config[group])


def _check_group(path: Path, place: str, values: Any) -> None:
    if not isinstance(values, dict):
        refuse(path, place, "which is no JSON object")
    for name, value in values.items():
        field = f"{place}.{name}"
        if name not in FIELDS[place.rpartition(".")[2]]:
            refuse(path, field)
        if name in FIELDS and not (value is None and name.endswith("_kwargs")):
            _check_group(path, field, value)
        elif isinstance(value, dict):
            refuse(path, field, "which is a JSON object instead of a value")


def refuse_code(path: Path) -> None:
    """Raise DuplexError if a JSON file exists and has a field of `CODE` at any depth."""
    if path.is_file():
        _refuse_code(path, "", read_config(path))


def _refuse_code(path: Path, place: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name in CODE:
            refuse(path, place + name)
        if isinstance(value, dict):
            _refuse_code(path, f"{place}{name}.", value)


def known_blip_options(config: Config) -> Config:
    """The fields of `BLIP`; older versions of transformers wrote many others, which are left out."""
    options = {name: config[name] for name in BLIP[""].split() if name in config}
    for group in ("text_config", "vision_config"):
        values = config.get(group) or {}
        options[group] = {name: values[name] for name in BLIP[group].split() if name in values}
    return options
