"""A pretended device: tensors that report to be on it, computed on the CPU.

    def test_a_step(pretended: Pretended) -> None:  # the fixture enters it
        network = build().to(pretended.name)
        pretended.reset()
        one_step(network)
        assert pretended.synchronisations == {}
        assert pretended.operations.total() < 100

It refuses what a GPU refuses: operations over tensors of two devices (a tensor without dimensions may come from the
CPU), a generator of another device, NumPy's view of a tensor. Waits of the host are counted by operation and by the
calling line of `duplex/` or a benchmark: a copy between devices unless it is `non_blocking`, a value read, and
operations whose result's shape depends on values. Operations are counted when they are dispatched, except views. As on
a GPU, an optimiser updates all its parameters together, and the gradient of silu is one operation.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.subprocesses import ROOT

NAME = "pretended"
UNCOUNTED = {"_unsafe_view", "_reshape_alias"}  # views whose schema does not say so
COPIES = {"_to_copy", "copy_", "set_", "_copy_from"}
WAITS = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
}
INDEXED = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}
KERNELS = Library("aten", "IMPL")


class Pretended(TorchDispatchMode):
    """Context in which `name` is a device; `operations` and `synchronisations` count since the last `reset`."""

    name = f"{NAME}:0"

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.synchronisations: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Pretended:
        """Replace inference mode by `no_grad`: its tensors have no version, which wrapper tensors need."""
        self._around = ExitStack()
        patch = self._around.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(torch._C, "_InferenceMode", lambda mode: torch.no_grad() if mode else nullcontext())
        patch.setattr(optimizer, "_foreach_supported_types", [*optimizer._foreach_supported_types, Elsewhere])
        self._around.enter_context(Constants())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._around.close()

    def reset(self) -> None:
        self.operations.clear()
        self.synchronisations.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        ours: list[Tensor] = [tensor for tensor in given if isinstance(tensor, Elsewhere)]
        target = kwargs.get("device")
        here = bool(ours) if target is None else _is_ours(target)
        if name == "_pin_memory":
            return args[0]
        self._check(name, args, given, ours)
        if ours or here:
            self._count(func, name, args, kwargs, given, ours, here)
        if target is not None:
            kwargs = {**kwargs, "device": torch.device("cpu") if _is_ours(target) else target}
        result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        return _wrapped(func, args, kwargs, result, here)

    def waits(self, operation: str) -> None:
        self.synchronisations[operation, _place()] += 1

    def _check(self, name: str, args: Any, given: list[Tensor], ours: list[Tensor]) -> None:
        others = [tensor for tensor in given if not isinstance(tensor, Elsewhere) and tensor.dim() > 0]
        if not ours or not others or name in COPIES:
            return
        if name in INDEXED and isinstance(args[0], Elsewhere) and all(other is not args[0] for other in others):
            self.waits(f"{name} by an index on the CPU")
            return
        shapes = [(tuple(tensor.shape), str(tensor.device)) for tensor in given]
        raise RuntimeError(f"expected all tensors to be on the same device: {name} of {shapes} at {_place()}")

    def _count(
        self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor], ours: list[Tensor], here: bool
    ) -> None:
        generator = kwargs.get("generator")
        if generator is not None and not _is_ours(generator.device):
            raise RuntimeError(f"expected a generator on {NAME}: {name} at {_place()}")
        aliases = [returned.alias_info for returned in func._schema.returns]
        if name not in UNCOUNTED and not any(alias is not None and not alias.is_write for alias in aliases):
            self.operations[name] += 1
        crosses = len(ours) < len(given) if name == "copy_" else name == "_to_copy" and bool(ours) != here
        asynchronous = kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2])
        if crosses and not asynchronous:
            self.waits("copy to the device" if here and not isinstance(args[-1], Elsewhere) else "copy to the CPU")
        masks = name in INDEXED and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in WAITS or masks or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.waits(name)


class Constants(TorchFunctionMode):
    """Make `torch.tensor` copy to its device by an operation that the dispatch mode sees."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.new_tensor and isinstance(args[0], Elsewhere):
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)).to(args[0].device)
        if func is Tensor.__getitem__ and isinstance(args[0], Elsewhere) and isinstance(args[1], list):
            return args[0][torch.tensor(args[1])]
        if func not in (torch.tensor, torch.as_tensor) or not _is_ours(kwargs.get("device") or "cpu"):
            return func(*args, **kwargs)
        device, grad = kwargs.pop("device"), kwargs.pop("requires_grad", False)
        return func(*args, **kwargs).to(device).requires_grad_(grad)


class Elsewhere(Tensor):
    """A tensor on the pretended device; `inner` holds its values."""

    inner: Tensor  # type: ignore[assignment]  # torch's method of this name is not used

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        wrapped: Elsewhere = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device(Pretended.name)
        )  # fmt: skip
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} met a tensor of the pretended device outside `with Pretended()`")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        """Copy all values with one wait."""
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert a tensor on {NAME} to NumPy; copy it to the CPU first")

    __array__ = numpy  # type: ignore[assignment]


def register() -> bool:
    """Register the device with torch, once per process; return False if this torch takes none from Python.

    Call it before the first backward pass, at which autograd starts a thread for each registered device."""
    setup: Callable[[str], None] | None = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is not None:
        setup(NAME)
        getattr(torch, NAME).get_amp_supported_dtype = list  # checkpointing calls it for every device
        KERNELS.impl("silu_backward", _kernel, "PrivateUse1")
    return setup is not None


def _kernel(*_: Any) -> None:
    """Stand for a kernel that GPUs have and that torch decomposes elsewhere; the dispatch mode computes it instead."""
    raise AssertionError("a tensor of the pretended device outside `with Pretended()`")


def _is_ours(device: Any) -> bool:
    return torch.device(device).type == NAME


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Elsewhere) else value


def _wrapped(func: Any, args: Any, kwargs: Any, result: Any, here: bool) -> Any:
    """Return the results of an operation: the given tensors where it wrote in place, others on their device."""
    schema = func._schema
    written = [
        kwargs.get(argument.name) if argument.kwarg_only else args[position] if position < len(args) else None
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if written and schema.returns and schema.returns[0].alias_info is not None:
        return written[0] if isinstance(result, Tensor) else tuple(written)
    return tree_map(lambda value: Elsewhere(value) if here and isinstance(value, Tensor) else value, result)


def _place() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith((f"{ROOT}/duplex/", f"{ROOT}/benchmarks/")):
            return f"{'/'.join(name.split('/')[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"
