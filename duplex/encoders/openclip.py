"""All that is used of open_clip and torchvision beyond their top level: what a new release may move is mended here."""

from __future__ import annotations

import pickle
import zipfile

from safetensors import SafetensorError

from duplex.encoders.vision_ops import ensure_torchvision

ensure_torchvision()

import open_clip  # noqa: E402
from open_clip.constants import HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME  # noqa: E402
from open_clip.factory import load_state_dict  # noqa: E402
from open_clip.model import CLIP  # noqa: E402
from open_clip.modified_resnet import ModifiedResNet  # noqa: E402
from open_clip.tokenizer import SimpleTokenizer  # noqa: E402
from open_clip.transform import PreprocessCfg, image_transform_v2, merge_preprocess_dict  # noqa: E402
from open_clip.transformer import VisionTransformer  # noqa: E402
from torchvision import transforms  # noqa: E402

__all__ = [
    "CLIP",
    "HF_SAFE_WEIGHTS_NAME",
    "HF_WEIGHTS_NAME",
    "LOADING",
    "ModifiedResNet",
    "PreprocessCfg",
    "SimpleTokenizer",
    "VisionTransformer",
    "image_transform_v2",
    "load_state_dict",
    "merge_preprocess_dict",
    "open_clip",
    "transforms",
]

LOADING = (  # what torch, safetensors, pickle and zip raise on a file that holds no fitting weights
    *(OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError),
    *(pickle.UnpicklingError, zipfile.BadZipFile, SafetensorError),
)
