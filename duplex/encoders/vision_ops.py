"""Import torchvision and open_clip fast, and also if torch is not the build that torchvision was compiled for.

A CPU build of torch beside a CUDA build of torchvision cannot load its compiled library, and importing torchvision
then fails at two unregistered operators; nothing here calls them, so declaring their signatures suffices.

torchvision and timm import torch's compiler for one function each, two thirds of the time of `import open_clip`;
stubs replace both. Do not compile timm's NaFlex models in this process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[torch.library.Library] = []  # a schema lives as long as the library object that declared it


def ensure_torchvision() -> bool:
    """Make `import torchvision` work; returns whether operators had to be declared."""
    if _declared:
        return True
    if _registered() or _load_compiled_library():
        return False
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS.values():
        library.define(schema)
    _declared.append(library)
    return True


def import_open_clip() -> None:
    """Import open_clip and timm without torch's compiler."""
    ensure_torchvision()
    with _compiler_deferred():
        import open_clip  # noqa: F401


@contextmanager
def _compiler_deferred() -> Iterator[None]:
    names = ("torch._dynamo", "torch._dynamo.utils")
    if names[0] in sys.modules:
        yield
        return
    compiler, utilities = modules = [ModuleType(name) for name in names]
    compiler.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
    utilities.is_compile_supported = _is_compile_supported  # type: ignore[attr-defined]
    sys.modules.update(zip(names, modules, strict=True))
    try:
        yield
    finally:
        for name, module in zip(names, modules, strict=True):
            if sys.modules.get(name) is module:
                del sys.modules[name]


def _is_compile_supported(device_type: str) -> bool:
    from torch._dynamo.utils import is_compile_supported

    return bool(is_compile_supported(device_type))


def _registered() -> bool:
    return all(hasattr(torch.ops.torchvision, name) for name in SCHEMAS)


def _load_compiled_library() -> bool:
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torchvision is not installed", name="torchvision")
    for path in sorted(Path(spec.origin).parent.glob("_C.*")):
        try:
            torch.ops.load_library(str(path))
        except OSError:
            continue
        return _registered()
    return False
