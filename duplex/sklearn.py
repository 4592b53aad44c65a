"""`CompositionClassifier`: a scikit-learn classifier of states and objects, fitted in closed form.

    from duplex.sklearn import CompositionClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import Normalizer

    model = make_pipeline(Normalizer(), CompositionClassifier())   # CLIP features: only directions
    model.fit(X, y)                            # X [n, d], y [n, 2]: state and object of each image
    model.predict(X_new)                       # [n, 2], unseen pairs among them

The model is linear discriminant analysis with composed means of unseen pairs
(duplex/methods/gaussian.py):

    log p(c|x) = g_c(x) + bias [c is unseen] - log Z

where g_c(x) is the Gaussian log-likelihood of the features x for the pair c, up to a constant, and
Z normalises over the candidate pairs. The mean of an unseen pair is the overall mean plus the
effects of its state and its object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.errors import UsageError, install_command
from duplex.labels import Ints
from duplex.methods.gaussian import ClassStatistics, ClosedForm, FitSettings
from duplex.options import OptionError, Options, Positive

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise UsageError(f"duplex.sklearn needs scikit-learn 1.6 or later; run {install_command('sklearn')}") from error

Array = NDArray[Any]
Floats = NDArray[np.float64]
BLOCK = 1 << 24  # number of scores computed at a time


@dataclass(frozen=True)
class EstimatorOptions(Options):
    """Checked parameters of `CompositionClassifier`: all except `candidates`."""

    ridge: Positive
    shrinkage: Positive | None
    prior: bool
    bias: float


class CompositionClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Classifier of state–object pairs by class means in closed form, also of unseen pairs.

    Features are not normalised: put `Normalizer()` before the classifier for CLIP features. With a
    single column of labels, it is linear discriminant analysis with shrunken means.

    Args:
        candidates: pairs to choose from, [C, 2]; "seen": those of the training images; None: all
            pairs.
        ridge: number of images at which a state's or an object's effect on the mean feature is
            halved.
        shrinkage: number of images at which the mean of a seen pair is shrunk halfway to the sum
            of its state's and its object's effects; None: chosen by marginal likelihood.
        prior: whether pairs with more training images get higher scores.
        bias: number added to the scores of unseen pairs. Their true frequency is unknown: choose
            it by validation.
    """

    closed_form_: ClosedForm | None
    width_: int  # number of columns of labels, 1 or 2
    names_: list[Array]  # sorted states and objects; one object if y has one column
    statistics_: ClassStatistics  # of the features minus `origin_`
    origin_: Floats  # mean feature [d] of the first images, subtracted from all

    def __init__(
        self,
        candidates: Any = None,
        *,
        ridge: float = 0.1,
        shrinkage: float | None = None,
        prior: bool = True,
        bias: float = 0.0,
    ) -> None:
        self.candidates = candidates
        self.ridge = ridge
        self.shrinkage = shrinkage
        self.prior = prior
        self.bias = bias

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to features X [n, d] and labels y [n, 2], the state and object of each image."""
        self._update(X, y, None, first=True)
        self.fitted_closed_form()
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Self:
        """Add training images: the result equals that of `fit` on all images so far.

        Args:
            X: features [n, d].
            y: labels [n, 2]; states and objects that did not occur before are added.
            classes: all states and objects to expect, those of `y` included: a list of two arrays,
                or one array if there is a single column of labels.
        """
        self._update(X, y, classes, first=not hasattr(self, "statistics_"))
        return self

    def _update(self, X: Any, y: Any, classes: Any, *, first: bool) -> None:
        # to the sums (`first`: to empty sums); an error leaves earlier sums and settings as they were
        options = EstimatorOptions(self.ridge, self.shrinkage, self.prior, self.bias)
        X, y = validate_data(self, X, y, reset=first, dtype=np.float64, multi_output=True)
        check_classification_targets(y)
        width = 1 if y.ndim == 1 else y.shape[1]
        if width > 2 or not (first or width == self.width_):
            expected = "two (state and object) or one" if first else f"{self.width_}, as in earlier calls"
            raise OptionError(f"the labels have {width} columns; expected {expected}", "y")
        labels = _two_columns(y.reshape(len(y), width))
        names = [np.unique(column) for column in labels.T]
        each_listed = [classes] if width == 1 else classes
        for column, listed in enumerate([] if classes is None else each_listed):
            names[column] = _with_listed(names[column], np.asarray(listed))
        if not first:
            names = [_union(*each) for each in zip(names, self.names_, strict=True)]
        shape = len(names[0]), len(names[1])
        origin = X.mean(0) if first else self.origin_
        numbers = torch.from_numpy(_composition_numbers(labels, names))
        statistics = ClassStatistics.of(torch.from_numpy(X - origin), numbers, *shape)
        if not first:
            states = torch.from_numpy(np.searchsorted(names[0], self.names_[0]))
            objects = torch.from_numpy(np.searchsorted(names[1], self.names_[1]))
            statistics = self.statistics_.relabelled(states, objects, shape) + statistics
        candidates = self._numbered_candidates(names, width, statistics.pairs.numpy())
        self.settings_ = FitSettings(ridge=options.ridge, shrinkage=options.shrinkage, prior=options.prior)
        self.closed_form_ = None
        self.bias_ = options.bias
        self.names_ = names
        self.width_ = width
        self.single_column_ = y.ndim == 1
        self.classes_ = names if width == 2 else names[0]
        self.origin_ = origin
        self.statistics_ = statistics
        self.candidate_numbers_ = torch.from_numpy(candidates)  # m N + n [C]
        pairs = np.column_stack([names[0][candidates // shape[1]], names[1][candidates % shape[1]]])
        self.candidates_ = pairs[:, :width]

    def fitted_closed_form(self) -> ClosedForm:
        """The closed-form model of all images so far; fitted first if images were added."""
        check_is_fitted(self)
        if self.closed_form_ is None:
            self.closed_form_ = ClosedForm.fit(self.statistics_, self.settings_)
        return self.closed_form_

    def _numbered_candidates(self, names: list[Array], width: int, seen: Ints) -> Ints:
        if self.candidates is None:
            return np.arange(len(names[0]) * len(names[1]))
        if isinstance(self.candidates, str) and self.candidates == "seen":
            return seen
        listed = np.asarray(self.candidates)
        if listed.ndim != 2 or listed.shape[1] != width or not len(listed):
            expected = f"expected an array of shape [C, {width}], a row per pair, or 'seen' or None"
            raise OptionError(f"the shape is {listed.shape}; {expected}", "candidates")
        return np.unique(_composition_numbers(_two_columns(listed), names))

    def composition_scores(self, X: Any) -> Floats:
        """Log probabilities [n, C] of the C candidate pairs, in the order of `candidates_`, for the n rows of `X`."""
        return self._by_blocks(X, lambda scores: scores.log_softmax(-1))

    def predict(self, X: Any) -> Array:
        """State and object [n, 2] of the likeliest pair for each row of `X`; [n] if `y` in `fit` had one dimension."""
        best = self._by_blocks(X, lambda scores: scores.argmax(-1))
        labels: Array = self.candidates_[best]
        return labels[:, 0] if self.single_column_ else labels

    def predict_proba(self, X: Any) -> Any:
        """Probabilities of states [n, M] and of objects [n, N] for `X`; one array if `y` in `fit` had one column."""
        check_is_fitted(self)
        states, objects = map(len, self.names_)
        m = self.candidate_numbers_ // objects
        n = self.candidate_numbers_ % objects

        def marginals(scores: Tensor) -> Tensor:
            p = scores.softmax(-1)
            return p.new_zeros(len(p), states + objects).index_add_(1, m, p).index_add_(1, states + n, p)

        parts = np.split(self._by_blocks(X, marginals), [states], axis=1)
        return parts if self.width_ == 2 else parts[0]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Share of the rows of `X` whose state and object are both predicted as in `y`, weighted by `sample_weight`."""
        predicted = self.predict(X)
        labels = np.asarray(y)
        if labels.size != predicted.size or len(labels) != len(predicted):
            raise OptionError(
                f"the shape is {labels.shape}; expected {predicted.shape}, one row of labels per row of X", "y"
            )
        labels = labels.reshape(predicted.shape)
        for names, column in zip(self.names_[: self.width_], labels.reshape(-1, self.width_).T, strict=True):
            _union(names, np.asarray(column.tolist()))  # raises for numbers in place of text
        right = (labels == predicted).reshape(len(labels), -1).all(axis=1)
        if sample_weight is not None:
            sample_weight = _check_sample_weight(sample_weight, right, dtype=np.float64, ensure_non_negative=True)
        return float(np.average(right, weights=sample_weight))

    def _by_blocks(self, X: Any, reduce: Callable[[Tensor], Tensor]) -> Array:
        # `reduce` of the candidates' scores, one block of images after another
        closed_form = self.fitted_closed_form()
        X = validate_data(self, X, reset=False, dtype=np.float64)
        scorer = closed_form.scorer(self.candidate_numbers_)
        bias = self.bias_ * (~torch.isin(self.candidate_numbers_, self.statistics_.pairs)).double()
        blocks = torch.from_numpy(X - self.origin_).split(max(1, BLOCK // len(bias)))
        return np.asarray(torch.cat([reduce(scorer(z) + bias) for z in blocks]).numpy())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _two_columns(labels: Array) -> Array:
    return labels if labels.shape[1] == 2 else np.column_stack([labels, np.zeros(len(labels), labels.dtype)])


def _composition_numbers(labels: Array, names: Sequence[Array]) -> Ints:
    numbers = np.zeros(len(labels), dtype=np.int64)
    for column, values, kind in zip(labels.T, names, ("state", "object"), strict=True):
        places = pd.Index(values).get_indexer(pd.Index(column))
        if (places < 0).any():
            label = column[places < 0].tolist()[0]
            raise OptionError(
                f"the {kind} {label!r} is in no training image; omit candidates that have it", "candidates"
            )
        numbers = numbers * len(values) + places
    return numbers


def _with_listed(names: Array, listed: Array) -> Array:
    for label in np.setdiff1d(names, listed).tolist()[:1]:
        expected = "all labels of y: one list for each column of y, in the order of the columns"
        raise OptionError(f"the label {label!r} of y is missing; expected {expected}", "classes")
    return _union(names, listed)


def _union(names: Array, more: Array) -> Array:
    if (names.dtype.kind in "biuf") != (more.dtype.kind in "biuf"):  # else all become text
        raise OptionError("labels are numbers in one argument or call and text in another; make all of them text", "y")
    return np.union1d(names, more)
