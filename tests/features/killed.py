"""An extraction in a process of its own, to be killed: `python -m tests.features.killed ENCODER ROOT OUT`."""

import sys
import time
from pathlib import Path

from duplex.encoders import load_encoder
from duplex.errors import DuplexError
from duplex.features.extraction import extract


class Slow:
    """An encoder that takes its time, so that a kill finds it at work."""

    def __init__(self, encoder) -> None:
        self.encoder = encoder

    def __getattr__(self, name: str):
        return getattr(self.encoder, name)

    def encode_images(self, pixels):
        time.sleep(0.02)
        return self.encoder.encode_images(pixels)


def main(name: str, root: Path, out: Path) -> None:
    encoder = Slow(load_encoder(name, towers="image"))
    images = sorted(path.name for path in root.iterdir())
    print("ready", flush=True)
    report = extract(
        images,
        root,
        out,
        encoder,
        manifest_sha256="m" * 64,
        batch_size=8,
        num_workers=1,
        commit_seconds=0.0,
        max_bad=1.0,
    )
    print(f"done {report.resumed}", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    except DuplexError as error:
        sys.exit(str(error))
