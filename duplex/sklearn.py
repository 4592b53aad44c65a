"""`CompositionClassifier`: a scikit-learn estimator of states and objects, fitted in closed form (without gradients).

    from duplex.sklearn import CompositionClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import Normalizer

    model = make_pipeline(Normalizer(), CompositionClassifier())   # CLIP features are compared by direction
    model.fit(X, y)                                                # X [n, d], y [n, 2]: state and object of each image
    model.predict(X_new)                                           # [n, 2], unseen pairs among them

The model is linear discriminant analysis; means of unseen pairs are composed (duplex/layers/gaussian_prototypes.py):

    log p(c|x) = g_c(x) + bias [c is unseen] - log Z

where g_c(x) is the Gaussian log-likelihood of the features x for the pair c, up to a constant, and Z normalises over
the candidate pairs. The mean of an unseen pair is the overall mean plus the effects of its state and its object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.errors import UsageError, install_command
from duplex.labels import Ints
from duplex.layers.class_statistics import ClassStatistics
from duplex.layers.gaussian_prototypes import ClosedForm, FitSettings
from duplex.options import OptionError, Options, Positive

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise UsageError(f"duplex.sklearn needs scikit-learn 1.6 or later; run {install_command('sklearn')}") from error

Array = NDArray[Any]
Floats = NDArray[np.float64]
Self = TypeVar("Self", bound="CompositionClassifier")
BLOCK = 1 << 24  # number of scores computed at a time
TOO_LARGE = "the features are so large that products of them overflow; scale them, as Normalizer does"
LEAST = 1e-5  # smaller features may have a variance below 1e-12, which `shared_whitening` counts as none
TOO_SMALL = "the features are so small that their variance vanishes; multiply them by a large number"


@dataclass(frozen=True)
class EstimatorOptions(Options):
    """Parameters of `CompositionClassifier` other than `candidates`, as options that `fit` and `partial_fit` check."""

    ridge: Positive
    shrinkage: Positive | None
    prior: bool
    bias: float


class CompositionClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Classifier of states and objects by class means in closed form; it also predicts pairs without training images.

    Features are not normalised: put `Normalizer()` before the classifier for CLIP features. Training features whose
    variance vanishes or overflows are refused: values of about 1e75 and more, and features whose absolute values are
    all below 1e-5, though not all zero. With a single column of labels, it is linear discriminant analysis with
    shrunken means.

    candidates: pairs to choose from, [C, 2]; "seen": those of the training images; None: every state with every object.
    ridge: number of images at which a state's or an object's effect on the mean feature is halved (shrinkage).
    shrinkage: number of images at which the mean of a seen pair is shrunk halfway to the sum of its state's and its
        object's effects; None: chosen by marginal likelihood.
    prior: whether pairs with more training images get higher scores.
    bias: number added to the scores of unseen pairs. Their true frequency is unknown: choose it by validation.

    As in scikit-learn, parameters that `set_params` changes act at the next `fit` or `partial_fit`. Labels may be a
    DataFrame; later labels, and `candidates`, must then have the same columns in the same order.
    """

    closed_form_: ClosedForm | None
    label_names_: list[str] | None  # columns of `y`, if it was a DataFrame
    statistics_: ClassStatistics  # of the features less `origin_`
    origin_: Floats  # mean of the first images [d], subtracted against cancellation in the moment
    largest_: float  # largest absolute value of the features

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

    def fit(self: Self, X: Any, y: Any) -> Self:
        """Fit the model to the features of training images; earlier fits are discarded.

        X: features [n, d].
        y: labels [n, 2], the state and the object of each image.
        """
        self._update(X, y, None, first=True)
        self.fitted_closed_form()
        return self

    def partial_fit(self: Self, X: Any, y: Any, classes: Any = None) -> Self:
        """Add training images: the result equals that of `fit` on all images so far.

        This only updates sums of features per pair; the model is fitted from them when it is next needed.

        X: features [n, d].
        y: labels [n, 2]; states and objects that did not occur before are added.
        classes: states and objects to expect, a list of two arrays of labels; for a single column of labels one array.
            They must include all labels of this `y`.
        """
        self._update(X, y, classes, first=not hasattr(self, "statistics_"))
        return self

    def _update(self, X: Any, y: Any, classes: Any, *, first: bool) -> None:
        """Add images to the sums of features per pair, from which the model is fitted, or start new sums if `first`.

        A call that raises an error leaves the earlier sums and settings as they were.
        """
        options = EstimatorOptions(self.ridge, self.shrinkage, self.prior, self.bias)
        label_names = None if first else self.label_names_
        for table, parameter in ((y, "y"), (self.candidates, "candidates")):
            label_names = _checked_names(table, label_names, parameter)
        _check_missing(y)
        X, y = validate_data(self, X, y, reset=first, dtype=np.float64, multi_output=True)
        _check_labels(y)
        labels, before = y.reshape(len(y), -1), [] if first else self._names()
        if labels.shape[1] not in (1, 2) or (before and len(before) != labels.shape[1]):
            expected = f"{len(before)} as before" if before else "two, state and object, or a single label"
            raise OptionError(f"the labels have {labels.shape[1]} columns; expected {expected}", "y")
        parts = [list(labels.T), before, _listed_classes(classes, labels.shape[1])]
        names = [_sorted_labels(columns) for columns in zip(*filter(None, parts), strict=True)]
        _check_listed(parts[0], parts[2])
        states, objects = _two_names(names)
        shape = len(states), len(objects)
        numbers = torch.from_numpy(composition_numbers(_two_columns(labels), states, objects))
        origin = X.mean(0) if first else self.origin_
        statistics = ClassStatistics.of(torch.from_numpy(X - origin), numbers, *shape)
        if not first:
            old = _two_names(before)
            m, n = (torch.from_numpy(np.searchsorted(*each)) for each in ((states, old[0]), (objects, old[1])))
            statistics = self.statistics_.relabelled(m, n, shape) + statistics
        if not statistics.moment.trace().square().isfinite():  # the covariance is shrunk by its squared trace
            raise OptionError(TOO_LARGE, "X")
        candidates = self._numbered_candidates(names, statistics.pairs.numpy())
        self.settings_ = FitSettings(ridge=options.ridge, shrinkage=options.shrinkage, prior=options.prior)
        self.closed_form_, self.bias_, self.label_names_ = None, options.bias, label_names
        self.origin_, self.statistics_, self.single_column_ = origin, statistics, y.ndim == 1
        self.largest_ = max(float(np.abs(X).max()), 0.0 if first else self.largest_)
        self.classes_ = names if len(names) == 2 else names[0]
        self.candidate_numbers_ = torch.from_numpy(candidates)  # m N + n [C]
        pairs = np.column_stack([states[candidates // len(objects)], objects[candidates % len(objects)]])
        self.candidates_ = pairs[:, : len(names)]

    def fitted_closed_form(self) -> ClosedForm:
        """Return the closed-form model of all training images so far; fit it first if images were added."""
        check_is_fitted(self)
        if self.closed_form_ is None:
            if 0 < self.largest_ < LEAST:
                raise OptionError(TOO_SMALL, "X")
            try:
                self.closed_form_ = ClosedForm.fit(self.statistics_, self.settings_)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                problem = f"it is {self.settings_.ridge}, too small for these features; raise it"
                raise OptionError(problem, "ridge") from None
        return self.closed_form_

    def _names(self) -> list[Array]:
        """Return the sorted distinct labels of each column of the training labels `y`."""
        return self.classes_ if isinstance(self.classes_, list) else [self.classes_]

    def _numbered_candidates(self, names: list[Array], seen: Ints) -> Ints:
        """Return the pairs to choose from as sorted composition numbers `m N + n` [C] (state m, object n of N).

        names: sorted labels per column of `y`.
        seen: sorted numbers of the compositions of training images.
        """
        states, objects = _two_names(names)
        if self.candidates is None:
            return np.arange(len(states) * len(objects))
        if isinstance(self.candidates, str):
            if self.candidates != "seen":
                raise OptionError(f"it is {self.candidates!r}; expected pairs [C, 2], 'seen' or None", "candidates")
            return seen
        try:
            listed = np.asarray(self.candidates)
        except ValueError:
            raise OptionError(f"rows have different lengths; expected [C, {len(names)}]", "candidates") from None
        if listed.ndim != 2 or listed.shape[1] != len(names) or not len(listed):
            raise OptionError(f"the shape is {listed.shape}; expected [C, {len(names)}], one per row", "candidates")
        return np.unique(composition_numbers(_two_columns(listed), states, objects))

    def composition_scores(self, X: Any) -> Floats:
        """Return the log probability of each candidate pair for each image [n, C], in the order of `candidates_`.

        X: features [n, d].
        """
        return self._by_blocks(X, lambda scores: scores.log_softmax(-1))

    def predict(self, X: Any) -> Array:
        """Return the state and the object [n, 2] of the likeliest candidate pair of each image.

        X: features [n, d].
        """
        best = self._by_blocks(X, lambda scores: scores.argmax(-1))
        labels: Array = self.candidates_[best]
        return labels[:, 0] if self.single_column_ else labels

    def predict_proba(self, X: Any) -> Any:
        """Return the probabilities of states [n, M] and of objects [n, N] as a list, in the order of `classes_`.

        Each probability is a sum over candidate pairs. With a single column of labels, return one array.

        X: features [n, d].
        """
        check_is_fitted(self)
        states, objects = map(len, _two_names(self._names()))
        m, n = self.candidate_numbers_ // objects, self.candidate_numbers_ % objects

        def marginals(scores: Tensor) -> Tensor:
            p = scores.softmax(-1)
            return p.new_zeros(len(p), states + objects).index_add_(1, m, p).index_add_(1, states + n, p)

        parts = np.split(self._by_blocks(X, marginals), [states], axis=1)
        return parts if len(self._names()) == 2 else parts[0]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the share of images whose state and object are both right.

        X: features [n, d].
        y: labels [n, 2].
        sample_weight: weights of the images [n]; None: all equal.
        """
        predicted = self.predict(X)
        _checked_names(y, self.label_names_, "y")
        y = np.asarray(y)
        columns, labels = predicted.reshape(len(predicted), -1), y.reshape(len(y), -1) if y.ndim else y
        if columns.shape != labels.shape:
            raise OptionError(f"the shape is {y.shape}; expected {predicted.shape}, as predicted", "y")
        for names, column in zip(self._names(), labels.T, strict=True):
            _sorted_labels([names, np.asarray(column.tolist())])  # raises for numbers in place of text
        return float(np.average((columns == labels).all(axis=1), weights=_checked_weights(sample_weight, len(y))))

    def _by_blocks(self, X: Any, reduce: Callable[[Tensor], Tensor]) -> Array:
        """Return `reduce(scores)` [n, ...] for features `X` [n, d], computed in blocks of images to bound the memory.

        reduce: function of the candidates' scores [images, C], such as a softmax.
        """
        closed_form = self.fitted_closed_form()
        X = validate_data(self, X, reset=False, dtype=np.float64)
        with np.errstate(over="ignore"):
            if not np.isfinite(np.square(X - self.origin_).sum(axis=1)).all():
                raise OptionError(TOO_LARGE, "X")
        scorer = closed_form.scorer(self.candidate_numbers_)
        bias = self.bias_ * (~torch.isin(self.candidate_numbers_, self.statistics_.pairs)).double()
        blocks = torch.from_numpy(X - self.origin_).split(max(1, BLOCK // len(bias)))
        return np.asarray(torch.cat([reduce(scorer(z) + bias) for z in blocks]).numpy())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def composition_numbers(pairs: Array, states: Array, objects: Array) -> Ints:
    """Return the number `m N + n` of each of C pairs (state m, object n); raise OptionError for an unknown label.

    pairs: labels of states and objects [C, 2].
    states, objects: all labels, sorted [M], [N].
    """
    numbers = np.zeros(len(pairs), dtype=np.int64)
    for column, (names, kind) in enumerate(((states, "state"), (objects, "object"))):
        places = {name: place for place, name in enumerate(names.tolist())}
        for label in pairs[:, column].tolist():
            if label not in places:
                raise OptionError(f"the {kind} {label!r} is in no training image; leave it out", "candidates")
        numbers = numbers * len(names) + np.array([places[label] for label in pairs[:, column].tolist()])
    return numbers


def _checked_names(table: Any, names: list[str] | None, parameter: str) -> list[str] | None:
    """Return the column names of a table of labels, or the expected `names` if the table has none.

    Raises OptionError if the table's column names differ from the expected names of the first fit.
    """
    columns = list(getattr(table, "columns", ()))
    if not columns or not all(isinstance(column, str) for column in columns):
        return names
    if names is not None and columns != names:
        raise OptionError(f"the columns are {columns}; expected {names}, as in the first fit", parameter)
    return columns


def _check_listed(columns: Sequence[Array], classes: Sequence[Array]) -> None:
    """Raise OptionError if a label of a column of `y` is missing in the column's `classes`.

    `classes`: the argument of `partial_fit`, an array per column; if it is empty, nothing is checked.
    """
    for column, listed in zip(columns, classes or columns, strict=True):
        for label in np.setdiff1d(column, listed).tolist()[:1]:
            expected = "all labels of y, a list per column and in the order of the columns"
            raise OptionError(f"the label {label!r} of y is missing; expected {expected}", "classes")


def _check_missing(y: Any) -> None:
    """Raise OptionError if a label is pandas' NA, which scikit-learn's checks cannot handle."""
    if any(label is pd.NA for label in np.asarray(y, dtype=object).flat):
        raise OptionError("a label is missing (NA); leave its image out", "y")


def _checked_weights(weights: Any, images: int) -> Floats | None:
    """Return weights of images as an array [n]; raise OptionError if one is negative or not finite, or all are 0."""
    if weights is None:
        return None
    try:
        values = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError):
        raise OptionError("expected numbers", "sample_weight") from None
    if values.shape != (images,):
        raise OptionError(f"the shape is {values.shape}; expected ({images},)", "sample_weight")
    if not np.isfinite(values).all() or (values < 0).any() or not values.any():
        raise OptionError("expected finite numbers, none negative and some positive", "sample_weight")
    return values


def _check_labels(y: Array) -> None:
    try:
        check_classification_targets(y)
    except TypeError:
        raise OptionError("labels are of different types; expected one type, such as text", "y") from None


def _sorted_labels(columns: Sequence[Array]) -> Array:
    """Return the distinct labels of all arrays, sorted; raise OptionError if text and numbers are mixed."""
    if len({column.dtype.kind in "biuf" for column in columns}) > 1:
        raise OptionError("labels are numbers in one place and text in another; expected one type", "y")
    return np.unique(np.concatenate(columns))


def _listed_classes(classes: Any, columns: int) -> list[Array]:
    """Return the argument `classes` of `partial_fit` as one array per column of labels; an empty list for None."""
    if classes is None:
        return []
    try:
        parts = [np.asarray(part) for part in ([classes] if columns == 1 else classes)]
    except (TypeError, ValueError):
        parts = []
    if len(parts) != columns or any(part.ndim != 1 for part in parts):
        raise OptionError("expected a list of two arrays, the labels of states and of objects", "classes")
    return parts


def _two_columns(labels: Array) -> Array:
    """Return labels as two columns [n, 2]; a single column gets a second one, a dummy object that all images share."""
    return labels if labels.shape[1] == 2 else np.column_stack([labels, np.zeros(len(labels), labels.dtype)])


def _two_names(names: Sequence[Array]) -> tuple[Array, Array]:
    """Return the sorted labels of states and of objects; with a single column of labels, one dummy object."""
    return names[0], names[1] if len(names) == 2 else np.zeros(1, names[0].dtype)
