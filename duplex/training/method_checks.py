"""Checks of the values that a method's code returns, and of the inputs that it must not change; errors name the method.

The checks are cheap enough for every step: nothing here reads a tensor's values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from duplex.errors import DuplexError, UsageError
from duplex.methods.base import Inputs

Value = TypeVar("Value")


def checked_instance(place: str, value: Any, kind: type[Value]) -> Value:
    """Return `value` if it is an instance of `kind`, else raise `DuplexError`.

    place: source of the value for the message, such as `Knn.groups()`.
    """
    if not isinstance(value, kind):
        raise DuplexError(f"{place} returned {_describe(value)}; expected a {kind.__name__}")
    return value


def checked_groups(place: str, groups: Any) -> list[dict[str, Any]]:
    """Return a method's parameter groups, with `params` as lists; raise `DuplexError` unless they are valid groups.

    place: source of the groups for the message, such as `Knn.groups()`.
    """
    checked = []
    for group in checked_instance(place, groups, list):
        params = group.get("params") if isinstance(group, dict) else None
        listed = list(params) if isinstance(params, Iterable) and not isinstance(params, Tensor) else [None]
        if not all(isinstance(parameter, Tensor) for parameter in listed):
            kind = "a dict without a list of parameters" if isinstance(group, dict) else _describe(group)
            raise UsageError(
                f'{place} returned a list with {kind}; expected dicts such as {{"params": list(self.parameters())}}'
            )
        checked.append({**group, "params": listed})
    return checked


def checked_losses(place: str, losses: Any) -> Tensor:
    """Return a method's loss terms, a dict of scalars, as one tensor [number of terms].

    Raises `DuplexError` unless they are floating-point scalars on one device that depend on a parameter.
    """
    for name, value in checked_instance(place, losses, dict).items():
        if not (isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()):
            raise DuplexError(f"{place} returned {_describe(value)} as {name!r}; expected a scalar floating tensor")
    devices = {str(value.device) for value in losses.values()}
    if len(devices) > 1 or "meta" in devices:
        raise DuplexError(f"{place} returned tensors on {', '.join(sorted(devices))}; expected the parameters' device")
    values = torch.stack(list(losses.values())) if losses else torch.zeros(0)
    if not values.requires_grad:
        problem = "losses that depend on no parameter" if losses else "an empty dict"
        raise DuplexError(
            f"{place} returned {problem}; expected loss terms by name; a method without training returns [] in groups()"
        )
    return values


def checked_scores(place: str, scores: Any, images: int, columns: int | None = None) -> Tensor:
    """Return a method's scores [images, candidates], detached; raise `DuplexError` for another shape or type.

    `columns`: expected number of candidates; None: any number.
    """
    shape = f"[{images}, {'candidates' if columns is None else columns}]"
    right = isinstance(scores, Tensor) and scores.dim() == 2 and len(scores) == images and not scores.is_meta
    if not right or columns not in (None, scores.shape[1]) or scores.dtype not in (torch.float32, torch.float64):
        raise DuplexError(f"{place} returned {_describe(scores)}; expected a float32 tensor {shape}")
    values: Tensor = scores.detach()
    return values


def check_shapes(place: str, built_for: Mapping[str, tuple[int, ...]], inputs: Inputs) -> None:
    """Raise `UsageError` if images have inputs of other shapes than a method was built for.

    place: name of the method for the message. built_for: shapes of one image's inputs, by name.
    """
    for name in built_for.keys() & inputs.keys():
        expected, present = list(built_for[name]), list(inputs[name].shape[1:])
        if present != expected:
            raise UsageError(
                f"the images' input {name!r} has the shape {present} per image and {place} was built for {expected}; "
                "use features of the same encoder"
            )


@contextmanager
def read_only(place: str, inputs: Inputs) -> Iterator[None]:
    """Context manager: raise `DuplexError` if the `with` block writes into `inputs`, features that runs share."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and not value.is_inference()}
    before = {name: tensor._version for name, tensor in tensors.items()}
    yield
    for name, tensor in tensors.items():
        if tensor._version != before[name]:
            raise DuplexError(f"{place} writes into its input {name!r}, which other runs read too; clone it first")


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        place = " without values (on meta)" if value.is_meta else ""
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}{place}"
    return "None" if value is None else f"a {type(value).__name__}"
