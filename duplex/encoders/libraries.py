"""open_clip and timm, imported faster, and with a torchvision compiled for another build of torch.

Such a torchvision cannot load its compiled library, and importing it fails at two unregistered
operators; nothing calls them, so declaring their signatures suffices. torchvision and timm each import
torch's compiler for one function, which takes two thirds of the time; stubs replace both functions.
Do not compile timm's NaFlex models in this process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

__all__ = ["open_clip", "timm", "transforms"]
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def operators_torch_lacks() -> list[str]:
    """Load torchvision's library if it fits torch; returns signatures that torch still lacks."""
    package = find_spec("torchvision")
    for folder in package.submodule_search_locations or ():  # type: ignore[union-attr]
        for path in sorted(Path(folder).glob("_C.*")):
            with suppress(OSError):
                torch.ops.load_library(str(path))
    known = torch.ops.torchvision
    return [signature for signature in OPERATORS if not hasattr(known, signature.split("(")[0])]


@contextmanager
def without_compiler() -> Iterator[None]:
    """Context manager that replaces torch's compiler by stubs, unless it has been imported."""
    names = ("torch._dynamo", "torch._dynamo.utils")
    if names[0] in sys.modules:
        yield
        return
    compiler = ModuleType(names[0])
    utilities = ModuleType(names[1])
    compiler.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
    utilities.is_compile_supported = is_compile_supported  # type: ignore[attr-defined]
    sys.modules |= {names[0]: compiler, names[1]: utilities}
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def is_compile_supported(device_type: str) -> bool:
    from torch._dynamo.utils import is_compile_supported

    return bool(is_compile_supported(device_type))


declared = torch.library.Library("torchvision", "FRAGMENT")  # must live as long as its signatures
for signature in operators_torch_lacks():
    declared.define(signature)
with without_compiler():
    import open_clip
    import timm
    from torchvision import transforms
