"""Duplex: compositional zero-shot learning over cached CLIP features."""

__version__ = "0.1.0"
