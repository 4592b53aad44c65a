"""Duplex: compositional zero-shot learning over cached CLIP features.

Public names, such as `duplex.fit`, are imported when they are first used (docs/library.md explains them).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from duplex.system.version import __version__ as __version__

if TYPE_CHECKING:
    from duplex.encoders import load_encoder as load_encoder
    from duplex.errors import DuplexError as DuplexError
    from duplex.evaluation.accumulator import ScoreAccumulator as ScoreAccumulator
    from duplex.evaluation.curve import Curve as Curve
    from duplex.evaluation.metrics import measure as measure
    from duplex.features.store import open_features as open_features
    from duplex.labels import LabelSpace as LabelSpace
    from duplex.library.dataset import Dataset as Dataset
    from duplex.library.dataset import load_dataset as load_dataset
    from duplex.library.evaluate import evaluate as evaluate
    from duplex.library.fit import fit as fit
    from duplex.library.result import Result as Result
    from duplex.library.result import compare as compare
    from duplex.library.run_training import Run as Run
    from duplex.options import Options as Options
    from duplex.recognition.answers import Answer as Answer
    from duplex.recognition.recognizer import Recognizer as Recognizer

PUBLIC = {
    "Answer": "duplex.recognition.answers",
    "Curve": "duplex.evaluation.curve",
    "Dataset": "duplex.library.dataset",
    "DuplexError": "duplex.errors",
    "LabelSpace": "duplex.labels",
    "Options": "duplex.options",
    "Recognizer": "duplex.recognition.recognizer",
    "Result": "duplex.library.result",
    "Run": "duplex.library.run_training",
    "ScoreAccumulator": "duplex.evaluation.accumulator",
    "compare": "duplex.library.result",
    "evaluate": "duplex.library.evaluate",
    "fit": "duplex.library.fit",
    "load_dataset": "duplex.library.dataset",
    "load_encoder": "duplex.encoders",
    "measure": "duplex.evaluation.metrics",
    "open_features": "duplex.features.store",
}

__all__ = list(PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC])
