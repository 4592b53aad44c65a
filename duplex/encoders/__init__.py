"""Frozen image and text towers, loaded by name."""

from duplex.encoders.base import Encoder, EncoderIdentity, load_encoder, resolve_device

__all__ = ["Encoder", "EncoderIdentity", "load_encoder", "resolve_device"]
