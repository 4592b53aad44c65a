"""Each in a process that has imported torch and nothing of torchvision: the state of a process is what is looked at."""

import subprocess
import sys
import textwrap

import pytest

from tests.subprocesses import ENVIRONMENT, ROOT

FORKS = """
import os
import sys
import types
import torch
vision_ops = types.ModuleType("vision_ops")  # without its package, which imports open_clip
exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), vision_ops.__dict__)

def repeats():
    first = vision_ops.ensure_torchvision()
    assert vision_ops.ensure_torchvision() == first
    import torchvision

def nothing_is_declared():
    '''A library that registers the operators, as a matching build does: ours must then declare none.'''
    def load(path):
        vision_ops._kept = torch.library.Library("torchvision", "FRAGMENT")
        for schema in vision_ops.SCHEMAS.values():
            vision_ops._kept.define(schema)
    torch.ops.load_library = load
    assert vision_ops.ensure_torchvision() is False
    assert not vision_ops._declared

def declared():
    def load(path):
        raise OSError("libcudart is missing")
    torch.ops.load_library = load
    assert vision_ops.ensure_torchvision() is True
    import torchvision

for work in (repeats, nothing_is_declared, declared):
    process = os.fork()
    if process == 0:
        work()
        print(work.__name__, flush=True)
        os._exit(0)
    os.waitpid(process, 0)
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=ENVIRONMENT)


@pytest.mark.slow
def test_operators_are_declared_where_the_library_lacks_them_and_nowhere_else() -> None:
    done = run("-c", FORKS, str(ROOT / "duplex" / "encoders" / "vision_ops.py"))
    assert done.stdout.split() == ["repeats", "nothing_is_declared", "declared"], done.stderr


@pytest.mark.slow
def test_open_clip_and_timm_are_imported_without_the_compiler_which_works_afterwards() -> None:
    done = run(
        "-c",
        "import sys, duplex.encoders.upstream; before = 'torch._dynamo' in sys.modules or 'sympy' in sys.modules\n"
        "import torch, torch._dynamo; from torch._dynamo.utils import is_compile_supported\n"
        "double = torch.compile(lambda x: 2 * x, backend='eager')\n"
        "print(before, torch._dynamo.__file__ is not None, double(torch.ones(1)).item())",
    )
    assert done.stdout.split() == ["False", "True", "2.0"], done.stderr


@pytest.mark.slow
def test_worker_processes_prepare_images(tmp_path) -> None:
    """Forked ones, and ones that start from nothing."""
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(f"""
        import torch
        from PIL import Image
        from torch.utils.data import DataLoader
        from duplex.encoders.base import ImageTransform
        from duplex.features.encode import ImageRows
        from pathlib import Path
        if __name__ == "__main__":
            Image.new("RGB", (9, 9), "red").save({str(tmp_path / "a.png")!r})
            transform = ImageTransform(dict(size=8, mode="RGB", mean=(0,)*3, std=(1,)*3, interpolation="bicubic",
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
