"""Recognition with a trained model: the recognizer, its exports and its server."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The HTTP server's limits for a request, and for the number of connections; the values are the defaults."""

    bytes: int = 32 * 2**20
    pixels: int = 40_000_000  # per image
    images: int = 32
    seconds: float = 20.0  # for the body to arrive and be answered
    connections: int = 256
