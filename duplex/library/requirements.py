"""Inputs that a method needs and a data set lacks, found from params.yaml before anything is loaded."""

from __future__ import annotations

from duplex.config.params import Params
from duplex.errors import DuplexError, UsageError
from duplex.features.identity import IMPORTED
from duplex.methods.registry import find_method


def missing_needs(params: Params, dataset: str, method: str) -> list[str]:
    """Return which of `text` tower, `words` (word vectors), `patch` tokens a method needs and a data set lacks.

    Features of an unknown encoder have no text tower, and no word vectors unless params.yaml names a file; imported
    features have no patch tokens. Encoders are not loaded, so an encoder without a text tower is not noticed.
    """
    entry = params.dataset(dataset)
    is_unknown = entry.encoder.name == IMPORTED
    lacking = {
        "text": is_unknown,
        "words": is_unknown and params.evaluation.word_vectors is None,
        "patch": is_unknown or entry.features is not None,
    }
    needs = set(find_method(params.entry(method).kind).needs(params.method(method, dataset)))
    for member in params.entry(method).members:
        needs.update(missing_needs(params, dataset, member))
    return [need for need in lacking if lacking[need] and need in needs]


def require_inputs(params: Params, dataset: str, method: str) -> None:
    """Raise UsageError if, by params.yaml, a data set lacks an input that a method needs; the message has a remedy."""
    missing = missing_needs(params, dataset, method)
    if not missing:
        return
    remedies = {
        "text": f"the text tower of the encoder that made the features: name it as datasets.{dataset}.encoder",
        "words": "word vectors: set evaluation.word_vectors to a file in GloVe format",
        "patch": f"patch tokens, which imported features lack: let datasets.{dataset} encode its images",
    }
    others = supported_methods(params, dataset)
    advice = f"or choose a method such as {', '.join(others[:3])}" if others else "or choose another method"
    raise UsageError(f"{method} on {dataset} needs {remedies[missing[0]]} in params.yaml, {advice}")


def supported_methods(params: Params, dataset: str) -> list[str]:
    """Return the names of the methods of params.yaml that can be trained with the inputs that a data set has."""
    return [name for name in params.methods if _is_supported(params, dataset, name)]


def _is_supported(params: Params, dataset: str, method: str) -> bool:
    try:
        return not missing_needs(params, dataset, method)
    except DuplexError:  # of a plug-in that cannot be imported
        return False
