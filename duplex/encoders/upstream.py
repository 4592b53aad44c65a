"""All imports from timm and from submodules of open_clip and torchvision, the one module to check at new releases."""

from __future__ import annotations

from duplex.encoders.vision_ops import import_open_clip

import_open_clip()

# ruff: noqa: E402, PLC0414
import open_clip as open_clip
import timm as timm
from open_clip.constants import HF_SAFE_WEIGHTS_NAME as HF_SAFE_WEIGHTS_NAME
from open_clip.constants import HF_WEIGHTS_NAME as HF_WEIGHTS_NAME
from open_clip.factory import load_state_dict as load_state_dict
from open_clip.model import CLIP as CLIP
from open_clip.modified_resnet import ModifiedResNet as ModifiedResNet
from open_clip.tokenizer import SimpleTokenizer as SimpleTokenizer
from open_clip.transform import PreprocessCfg as PreprocessCfg
from open_clip.transform import image_transform_v2 as image_transform_v2
from open_clip.transform import merge_preprocess_dict as merge_preprocess_dict
from open_clip.transformer import VisionTransformer as VisionTransformer
from torchvision import transforms as transforms
