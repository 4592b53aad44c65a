"""Make torchvision importable beside a torch that its compiled library was not built for.

A CPU build of torch beside a CUDA build of torchvision cannot load torchvision's library, and importing torchvision
then fails at two unregistered operators. Nothing in this package calls them: their schemas suffice.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[torch.library.Library] = []  # a schema lives as long as the library object that declared it


def ensure_torchvision() -> bool:
    """Make `import torchvision` work: load torchvision's compiled library, or declare its operators if that fails.
    Return whether operators had to be declared."""
    if _declared:
        return True
    if _registered() or _load_compiled_library():
        return False
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS.values():
        library.define(schema)
    _declared.append(library)
    return True


def _registered() -> bool:
    return all(hasattr(torch.ops.torchvision, name) for name in SCHEMAS)


def _load_compiled_library() -> bool:
    """Load `torchvision/_C*` without importing torchvision; return False if it cannot be loaded or lacks operators."""
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
