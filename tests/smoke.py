"""An installed package at work, away from its sources: `make wheel` runs it in a fresh environment."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np


def command(*words: str) -> str:
    """The console script beside this Python."""
    done = subprocess.run(
        [Path(sys.executable).with_name("duplex"), *words], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def main() -> None:
    import duplex
    from duplex.data.shapes import draw
    from duplex.encoders import load_encoder

    assert command("--version") == f"duplex {duplex.__version__}\n"
    rng = np.random.default_rng(0)
    np.savez("s.npz", scores=rng.random((40, 8)), target=np.arange(40) % 8, seen=np.arange(8) < 4)
    assert "auc" in command("score", "s.npz", "--rounds", "10")
    assert "ViT-L-14-quickgelu" in command("encoders")
    encoder = load_encoder("tiny")  # the packaged weights are in the wheel
    picture = encoder.image_transform(draw("red_star/0000.png"))[None]
    assert encoder.encode_images(picture).shape == (1, encoder.dim)
    from duplex.report.page import _environment

    assert {"page.html.j2", "report.md.j2"} <= set(_environment().list_templates())
    blocked = "import sys; sys.modules.update(dict.fromkeys(('dvc', 'openTSNE', 'pyarrow')))"
    code = f"{blocked}; import duplex.evaluation.metrics, duplex.evaluation.scores, duplex.evaluation.sampled"
    subprocess.run([sys.executable, "-c", code], check=True)  # the evaluation needs no extra
    print(f"duplex {duplex.__version__} works in {sys.prefix}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        main()
