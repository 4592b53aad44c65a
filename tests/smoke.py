"""Test an installed package without the repository: `make wheel` runs this in a fresh environment."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np


def command(*words: str) -> str:
    done = subprocess.run(
        [Path(sys.executable).with_name("duplex"), *words], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def project() -> None:
    """Run a new project to the report and a prediction, on a small table of drawn images."""
    from ruamel.yaml import YAML

    from duplex.data.shapes import render_images, shapes_manifest

    command("init", "new")
    os.chdir("new")
    pictures = shapes_manifest(scale=0.06)
    render_images(pictures, Path("pictures"))
    pictures.to_csv("pictures.csv", index=False)
    yaml, params = YAML(), Path("params.yaml")
    record = yaml.load(params)
    record["run"] = {"datasets": ["own"], "methods": ["dual"], "products": [], "seeds": [0]}
    record["evaluation"]["bootstrap"] = 20
    record["datasets"]["own"] = {
        "source": {"kind": "table", "root": "pictures", "table": "pictures.csv"},
        "encoder": {"name": "tiny"},
        "training": {"learning_rate": 0.001, "batch_size": 64, "epochs": 1},
    }
    yaml.dump(record, params)
    assert "Running stage 'train@own-dual-0'" in repro()
    assert Path("artifacts/report/index.html").is_file()
    assert "dual" in command("metrics")
    assert command("predict", f"pictures/{pictures['image'][0]}")
    command("doctor")
    assert set(re.findall(r"Running stage '([^']+)'", repro())) == {"plan"}  # runs each time, and finds no change


def repro() -> str:
    done = subprocess.run([sys.executable, "-m", "dvc", "repro"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def main() -> None:
    import duplex
    from duplex.data.shapes import draw
    from duplex.encoders.base import load_encoder

    assert command("--version") == f"duplex {duplex.__version__}\n"
    rng = np.random.default_rng(0)
    np.savez("s.npz", scores=rng.random((40, 8)), target=np.arange(40) % 8, seen=np.arange(8) < 4)
    assert "auc" in command("score", "s.npz", "--rounds", "10")
    assert "ViT-L-14-quickgelu" in command("encoders")
    encoder = load_encoder("tiny")  # its weights are in the wheel
    picture = encoder.image_transform(draw("red_star/0000.png"))[None]
    assert encoder.encode_images(picture).shape == (1, encoder.dim)
    from duplex.report.blocks import _environment

    assert {"page.html.j2", "notebook.html.j2"} <= set(_environment().list_templates())
    blocked = "import sys; sys.modules.update(dict.fromkeys(('dvc', 'openTSNE', 'pyarrow')))"
    code = f"{blocked}; import duplex.evaluation.metrics, duplex.evaluation.score_files"
    subprocess.run([sys.executable, "-c", code], check=True)  # evaluation needs no extra
    project()
    print(f"duplex {duplex.__version__} works in {sys.prefix}")


if __name__ == "__main__":
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # dvc.yaml says `python`
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        main()
        os.chdir("/")
