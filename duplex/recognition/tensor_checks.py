"""Checks that the tensors of an export can score images, before they are used.

Their checksum shows damage, but not that another tool wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from duplex.labels import LabelSpace
from duplex.recognition.added_words import portable_terms
from duplex.recognition.candidates import sum_of

CANDIDATE_TYPES = {"state_of": torch.int64, "object_of": torch.int64, "seen": torch.bool, "feasible": torch.bool}
PRIOR = "log_prior"  # -inf for excluded candidates


def check_tensors(tensors: Mapping[str, Tensor], labels: LabelSpace, dim: int) -> None:
    """Raise `ValueError` if the tensors of an export cannot score features of width `dim`, or score them as NaN."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and (tensor.isnan() if name == PRIOR else ~tensor.isfinite()).any():
            raise ValueError(f"{name} has NaN or infinity")
    size = _check_candidates(tensors, labels)
    features = torch.full((1, dim), dim**-0.5, device=tensors["state_of"].device)
    try:
        scores = sum_of(portable_terms(tensors))({"cls": features})
    except (RuntimeError, IndexError, KeyError) as error:
        raise ValueError(f"its tensors do not fit each other: {str(error).splitlines()[0]}") from error
    if scores.shape != (1, size) or scores.isnan().any():
        raise ValueError(f"its scores of an image are {tuple(scores.shape)} or NaN; expected {(1, size)}")


def _check_candidates(tensors: Mapping[str, Tensor], labels: LabelSpace) -> int:
    """Return the number C of candidates in the tensors of an export.

    Raise `ValueError` if a tensor that describes the candidates has a wrong shape, type or index, or all are excluded.
    """
    size = len(tensors["state_of"])
    if not size:
        raise ValueError("it has no candidates")
    for name, dtype in CANDIDATE_TYPES.items():
        shape, stored = tuple(tensors[name].shape), tensors[name].dtype
        if shape != (size,) or stored != dtype:
            raise ValueError(f"{name} is {shape} of {stored}; expected {(size,)} of {dtype}")
    for name, words in (("state_of", labels.states), ("object_of", labels.objects)):
        if not ((tensors[name] >= 0) & (tensors[name] < len(words))).all():
            raise ValueError(f"{name} has numbers that are not in 0 to {len(words) - 1}")
    if not tensors["feasible"].any():
        raise ValueError("it excludes every candidate")
    return size
