"""Duplex: compositional zero-shot learning over cached CLIP features.

Public names, such as `duplex.fit`, are imported when they are first used (docs/library.md explains them).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from duplex.system.version import __version__ as __version__

if TYPE_CHECKING:
    from duplex.encoders.base import load_encoder as load_encoder
    from duplex.errors import DuplexError as DuplexError
    from duplex.evaluation.accumulate import ScoreAccumulator as ScoreAccumulator
    from duplex.evaluation.curve import Curve as Curve
    from duplex.evaluation.metrics import measure as measure
    from duplex.features.file import read_features as read_features
    from duplex.labels import LabelSpace as LabelSpace
    from duplex.library import Dataset as Dataset
    from duplex.library import Run as Run
    from duplex.library import evaluate as evaluate
    from duplex.library import fit as fit
    from duplex.library import load_dataset as load_dataset
    from duplex.options import Options as Options
    from duplex.recognition.answers import Answer as Answer
    from duplex.recognition.fit import fit_folder as fit_folder
    from duplex.recognition.recognizer import Recognizer as Recognizer
    from duplex.report.result import Result as Result
    from duplex.report.result import compare as compare

PUBLIC = {
    "Answer": "duplex.recognition.answers",
    "Curve": "duplex.evaluation.curve",
    "Dataset": "duplex.library",
    "DuplexError": "duplex.errors",
    "LabelSpace": "duplex.labels",
    "Options": "duplex.options",
    "Recognizer": "duplex.recognition.recognizer",
    "Result": "duplex.report.result",
    "Run": "duplex.library",
    "ScoreAccumulator": "duplex.evaluation.accumulate",
    "compare": "duplex.report.result",
    "evaluate": "duplex.library",
    "fit": "duplex.library",
    "fit_folder": "duplex.recognition.fit",
    "load_dataset": "duplex.library",
    "load_encoder": "duplex.encoders.base",
    "measure": "duplex.evaluation.metrics",
    "read_features": "duplex.features.file",
}

__all__ = list(PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; dir({__name__}) lists its names")
    return getattr(import_module(PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC])
