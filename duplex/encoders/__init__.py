"""Frozen image and text towers, loaded by name."""

import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # of tqdm in notebooks; no bar here needs its widget

from duplex.encoders.base import Encoder, EncoderIdentity, load_encoder, resolve_device  # noqa: E402

__all__ = ["Encoder", "EncoderIdentity", "load_encoder", "resolve_device"]
