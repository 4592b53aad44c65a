"""Each in a process that has imported torch and nothing of torchvision: the state of a process is what is looked at."""

import subprocess
import sys
import textwrap

import pytest

from tests.subprocesses import ENVIRONMENT


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=ENVIRONMENT)


@pytest.mark.slow
def test_open_clip_and_timm_are_imported_without_the_compiler_which_works_afterwards() -> None:
    done = run(
        "-c",
        "import sys, duplex.project.extract; early = 'open_clip' in sys.modules\n"
        "import duplex.encoders.open_clip; before = 'torch._dynamo' in sys.modules or 'sympy' in sys.modules\n"
        "import torch, torch._dynamo; from torch._dynamo.utils import is_compile_supported\n"
        "double = torch.compile(lambda x: 2 * x, backend='eager')\n"
        "print(early, before, torch._dynamo.__file__ is not None, double(torch.ones(1)).item())",
    )
    assert done.stdout.split() == ["False", "False", "True", "2.0"], done.stderr


@pytest.mark.slow
def test_worker_processes_prepare_images(tmp_path) -> None:
    """Forked ones, and ones that start from nothing."""
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(f"""
        import torch
        from PIL import Image
        from torch.utils.data import DataLoader
        from duplex.encoders.open_clip import ResizeAndCrop
        from duplex.features.encode import ImageRows
        from pathlib import Path
        if __name__ == "__main__":
            Image.new("RGB", (9, 9), "red").save({str(tmp_path / "a.png")!r})
            transform = ResizeAndCrop(dict(size=8, mode="RGB", mean=(0,)*3, std=(1,)*3, interpolation="bicubic",
                                              resize_mode="shortest", fill_color=0))
            images = ImageRows(["a.png"], Path({str(tmp_path)!r}), transform)
            for method in ("fork", "spawn"):
                for pixels, marks, _ in DataLoader(images, num_workers=1, multiprocessing_context=method):
                    print(method, tuple(pixels.shape), pixels[0, 0, 0, 0].item(), marks.tolist())
    """)
    )
    done = run(str(script))
    said = "(1, 3, 8, 8) 255 [1]"
    assert done.stdout.splitlines() == [f"fork {said}", f"spawn {said}"], done.stderr
