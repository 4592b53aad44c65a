"""Checks of the values that a method's code returns, and of the inputs that it must not change; errors name the method.

All checks but `checked_probabilities` and `unchanged_inputs`, which are made once per run, are cheap enough for every
step: they do not read a tensor's values.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from duplex.errors import DuplexError, UsageError
from duplex.methods.base import Inputs, Method

LARGEST_COMPARED = 2**31  # bytes; larger inputs have no checksum
SUM_TOLERANCE = 1e-3  # of the sum of an image's probabilities

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


def checked_probabilities(method: Method[Any], scores: Tensor) -> Tensor:
    """Let a method compute probabilities [images, candidates] from its scores; check and return them.

    Raises `DuplexError` for another shape or type, and for probabilities that are negative or do not sum to about 1 per
    image. NaN is not an error here.
    """
    p, place = method.probabilities(scores), f"{method.class_name}.probabilities()"
    if not (isinstance(p, Tensor) and p.shape == scores.shape and p.is_floating_point() and not p.is_meta):
        raise DuplexError(f"{place} returned {_describe(p)}; expected a floating tensor {list(scores.shape)}")
    if (p < 0).any():
        raise DuplexError(f"{place} returned {float(p[p < 0][0]):.3g}; expected probabilities of at least 0")
    sums = p.sum(1)
    if (wrong := sums[(sums - 1).abs() > SUM_TOLERANCE]).numel():
        raise DuplexError(f"{place} returned values whose sum over an image's candidates is {wrong[0]:.3g}; expected 1")
    return p


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
    """Context manager: raise `DuplexError` if the `with` block writes into `inputs`, features that several runs read.

    Writes through `.numpy()` and `.data` are not noticed; see `unchanged_inputs`.
    """
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and not value.is_inference()}
    before = {name: tensor._version for name, tensor in tensors.items()}
    yield
    for name, tensor in tensors.items():
        if tensor._version != before[name]:
            raise _write_error(place, name)


class ChangedInput(DuplexError):
    """Error: a method's code wrote into the image features that it was given, which other training runs read too."""


@dataclass(frozen=True)
class InputChecksums:
    """Checksums of features that several runs read, to notice that a method changed them, also through `.numpy()`.

    Inputs on the disk and inputs of more than 2 GiB have no checksum. On a CPU, 1 GB takes about 0.15 s. On a GPU,
    another order of the same bytes within a row is not noticed.
    """

    entries: tuple[tuple[str, Tensor, int], ...]  # name, values and checksum of each input

    @classmethod
    def of(cls, *splits: Inputs) -> InputChecksums:
        """Compute the checksums of the inputs (features by name) of each split."""
        tensors = [item for inputs in splits for item in inputs.items() if isinstance(item[1], Tensor)]
        small = [(name, x) for name, x in tensors if x.numel() * x.element_size() <= LARGEST_COMPARED]
        return cls(tuple((name, tensor, _checksum(tensor)) for name, tensor in small))

    def require_unchanged(self, method: str) -> None:
        """Raise `DuplexError` if features that a method reads have changed since their checksums were computed.

        method: name of the method, for the message.
        """
        for name, tensor, before in self.entries:
            if _checksum(tensor) != before:
                raise _write_error(method, name)


@contextmanager
def unchanged_inputs(method: str, *splits: Inputs) -> Iterator[None]:
    """Context manager: raise `DuplexError` at the end of the block, which runs a method's code, if inputs have changed.

    They are compared also if the block raises an error: a caller that goes on would use the changed inputs.

    method: name of the method, for the message.
    splits: the inputs (features by name) of each split.
    """
    checksums = InputChecksums.of(*splits)
    try:
        yield
    except ChangedInput:  # which names the function
        raise
    except BaseException:
        checksums.require_unchanged(method)
        raise
    checksums.require_unchanged(method)


def _checksum(tensor: Tensor) -> int:
    """Return a checksum of the bytes of a tensor [n, ...]; on a GPU, each row's bytes are summed before copying."""
    values = tensor.detach().contiguous().flatten(1).view(torch.uint8)
    if values.device.type != "cpu":
        values = values.sum(1).cpu()  # in int64
    return zlib.crc32(values.numpy().data)


def _write_error(place: str, name: str) -> ChangedInput:
    advice = "clone it first, and load the data set again"
    return ChangedInput(f"{place} writes into its input {name!r}, which other runs read too; {advice}")


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        place = " without values (on meta)" if value.is_meta else ""
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}{place}"
    return "None" if value is None else f"a {type(value).__name__}"
