import subprocess
import sys
import textwrap

import pytest

from tests.subprocesses import ENVIRONMENT


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torchvision_imports_and_repeats() -> None:
    assert (
        run("""
        from duplex.encoders.vision_ops import ensure_torchvision
        first = ensure_torchvision()
        assert ensure_torchvision() == first
        import torchvision
        print("ok")
    """)
        == "ok"
    )


def test_where_its_library_loads_nothing_is_declared() -> None:
    """A library that registers the operators, as a matching build does: ours must then declare none."""
    assert (
        run("""
        import torch
        from duplex.encoders import vision_ops
        def load(path):
            vision_ops._kept = torch.library.Library("torchvision", "FRAGMENT")
            for schema in vision_ops.SCHEMAS.values():
                vision_ops._kept.define(schema)
        torch.ops.load_library = load
        assert vision_ops.ensure_torchvision() is False
        assert not vision_ops._declared
        print("untouched")
    """)
        == "untouched"
    )


def test_where_it_cannot_load_the_schemas_are_declared() -> None:
    assert (
        run("""
        import torch
        from duplex.encoders import vision_ops
        def load(path):
            raise OSError("libcudart is missing")
        torch.ops.load_library = load
        assert vision_ops.ensure_torchvision() is True
        import torchvision
        print("declared")
    """)
        == "declared"
    )


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_prepare_pictures(method: str, tmp_path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(f"""
        import torch
        from PIL import Image
        from torch.utils.data import DataLoader
        from duplex.encoders.clip import PictureTransform
        from duplex.features.decoding import Pictures
        from pathlib import Path
        if __name__ == "__main__":
            Image.new("RGB", (9, 9), "red").save({str(tmp_path / "a.png")!r})
            transform = PictureTransform(dict(size=8, mode="RGB", mean=(0,)*3, std=(1,)*3, interpolation="bicubic",
                                              resize_mode="shortest", fill_color=0))
            pictures = Pictures(["a.png"], Path({str(tmp_path)!r}), transform)
            for pixels, marks in DataLoader(pictures, num_workers=1, multiprocessing_context={method!r}):
                print(tuple(pixels.shape), pixels[0, 0, 0, 0].item(), marks.tolist())
    """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.stdout.strip() == "(1, 3, 8, 8) 255 [1]", done.stderr
