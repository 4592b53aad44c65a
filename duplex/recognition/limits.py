"""Limits of the HTTP server."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of the HTTP server for one request, and for the number of connections."""

    bytes: int = 32 * 2**20  # of the request
    pixels: int = 40_000_000  # per image
    images: int = 32
    seconds: float = 20.0  # for the body to arrive and be answered
    connections: int = 256
