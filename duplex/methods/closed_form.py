"""Visual prototypes in closed form from training features; prompts, trained or not, may join.

    log S(c|x) = w_t log p(c^t|x) + w_so log p(s|x) p(o|x) + w_l log p_l(s|x) p_l(o|x)
               + w_g log p_g(c|x) + w_gso log p_g(s|x) p_g(o|x) - log Z

* p(c^t|x), p(s|x), p(o|x): posteriors by prompts of compositions, states and objects
* p_l(s|x), p_l(o|x): posteriors by linear heads, for encoders without a text tower; without `losses`, by
  logistic regressions (duplex/methods/linear.py), beside prompts, too
* p_g(c|x): softmax of g_c, the log-likelihood of the feature under a normal distribution around the mean of
  composition c; all compositions share a covariance (duplex/methods/gaussian.py)
* p_g(s|x), p_g(o|x): posteriors by a normal distribution per state and per object
* w: weights that maximise validation AUC;  Z normalises over the candidates

Without prompts, `losses` train the heads and fine-tuned blocks of the image tower:

    L = L_s + L_o + L_c,   f = w . z / tau + b
    p_l(s|x) ~ exp(f_s),   p_l(o|x) ~ exp(f_o),   p_l(c|x) ~ exp(f_s + f_o)

* L_s, L_o: cross-entropies over all states and all objects;  L_c: over the seen compositions
* z: unit feature;  w, b: weights of the heads, zero before training
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from duplex.labels import Ints, LabelSpace
from duplex.methods.base import Batch, Inputs, Inspectable, Method, MethodContext, ScoreTerms, tuned_weights
from duplex.methods.gaussian import ClassStatistics, ClosedForm, FitSettings, FittedStatistics, LinearDiscriminant
from duplex.methods.layers import CompositionIndex, unit, zero_initialised
from duplex.methods.linear import Linear, LinearOptions
from duplex.methods.paths import PathOptions, Paths, inspect_paths
from duplex.methods.portable import candidate_primitives, portable_closed_form, portable_paths
from duplex.methods.score_formula import FLOOR, LEAST
from duplex.options import NonNegative, Positive, refuse

Term = Literal["semantic", "factors", "linear", "gaussian", "gaussian_factors"]
HEAD_LOSSES = {"state", "object", "composition"}
TAU = 0.01  # of the heads, as CLIP's
INITIAL_WEIGHTS = {"semantic": 0.5, "factors": 0.5, "linear": 16.0, "gaussian_factors": 0.125, "gaussian": 0.25}
REGRESSIONS_WEIGHT = 0.5  # the initial one of `linear`, if its terms are logistic regressions


@dataclass(frozen=True)
class ClosedFormOptions(PathOptions):
    """Options of `kind: closed_form`, whose score multiplies powers of probabilities."""

    # of prompts; of heads if inference has neither semantic nor factors: state, object, composition;
    # none: nothing is trained, and the term linear is that of logistic regressions
    losses: tuple[Literal["state", "object", "semantic", "composition"], ...] = ("state", "object", "semantic")
    inference: tuple[Term, ...] = ("semantic", "factors", "gaussian")  # score terms
    weights: tuple[NonNegative, ...] | None = None  # one per term; null: by validation
    l2: Positive | None = None  # regularisation of the logistic regressions; null: by validation
    ridge: Positive = 0.1  # number of images at which the effect of a state is shrunk by half
    shrinkage: Positive | None = None  # the same of a pair's mean; null: by likelihood
    interactions: NonNegative | None = 0.0  # variance shared by similar words; null: by likelihood
    prior: bool = True  # whether pairs with more training images get higher scores

    def rules(self) -> Iterable[tuple[object, str]]:
        yield from super().rules()
        yield from self.path_rules(self.losses, self.inference)
        terms = list(self.inference)
        message = "inference has no term gaussian; add it, or use kind: prompts"
        yield refuse("gaussian" not in terms, message)
        if "linear" in terms:
            message = "the term linear needs state and object in losses and no semantic or factors in inference, "
            message += "or no losses"
            yield refuse(self.losses and (self.uses_text or not {"state", "object"} <= {*self.losses}), message)
        yield refuse(self.l2 is not None and not self.has_regressions, "l2 needs the term linear and no losses")
        unused = [name for name in self.losses if name not in self.used_losses()]
        message = f"losses {unused} train no term of inference {terms}; remove them or add their terms"
        yield refuse(unused, message)
        if self.weights is not None:
            message = f"weights has {len(self.weights)} numbers; expected {len(terms)}, one per term"
            yield refuse(len(self.weights) != len(terms), message)

    @property
    def uses_text(self) -> bool:
        return bool({"semantic", "factors"} & set(self.inference))

    @property
    def has_regressions(self) -> bool:
        return "linear" in self.inference and not self.losses

    def used_losses(self) -> set[str]:
        """The losses that train a term of `inference`."""
        if not self.uses_text:
            return HEAD_LOSSES
        used = {"semantic"} if "semantic" in self.inference else set[str]()
        return used | ({"state", "object"} if "factors" in self.inference else set())

    def trained_losses(self) -> set[str]:
        return super().trained_losses() if self.uses_text else HEAD_LOSSES


class LinearHeads(nn.Module):
    """Linear classifiers of states and objects; their losses also train blocks before them."""

    def __init__(self, labels: LabelSpace, dim: int) -> None:
        super().__init__()
        self.states = zero_initialised(nn.Linear(dim, len(labels.states)))
        self.objects = zero_initialised(nn.Linear(dim, len(labels.objects)))
        self.seen = CompositionIndex(labels.pairs["train"], len(labels.objects))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of states [B, M] and of objects [B, N]."""
        return self.states(z / TAU), self.objects(z / TAU)

    def losses(self, z: Tensor, compositions: Tensor) -> dict[str, Tensor]:
        place = self.seen.positions_of_listed(compositions)
        f_s, f_o = self(z)
        f_c = f_s[:, self.seen.states] + f_o[:, self.seen.objects]
        return {
            "state": cross_entropy(f_s, self.seen.states[place]),
            "object": cross_entropy(f_o, self.seen.objects[place]),
            "composition": cross_entropy(f_c, place),
        }


class ClosedFormMethod(Method[ClosedFormOptions]):
    """Scores by closed-form visual prototypes, together with trained prompts or linear heads."""

    reads_joined = True
    trains_on_buffers = False  # the statistics enter scores alone

    counts: Tensor  # number of training images per seen composition [K]
    sums: Tensor  # sums of their features [K, d]
    moment: Tensor  # sum of z z^T over all training features z [d, d]
    chosen: Tensor  # [2] fitted shrinkage and tau (variance of interactions)
    weights: Tensor  # one per score term of `inference`

    def __init__(self, context: MethodContext, options: ClosedFormOptions) -> None:
        super().__init__(context, options)
        labels = context.labels
        self.paths = Paths(labels, context.tower, options, context.world) if options.uses_text else None
        used = "linear" in options.inference or context.finetuned_blocks is not None
        has_heads = used and self.paths is None and options.losses
        self.heads = LinearHeads(labels, context.dim) if has_heads else None
        self.regressions = Linear(context, LinearOptions(l2=options.l2)) if options.has_regressions else None
        seen = len(labels.pairs["train"])
        dim = context.dim
        shapes = {"counts": (seen,), "sums": (seen, dim), "moment": (dim, dim), "chosen": (2,)}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))
        first = INITIAL_WEIGHTS | ({"linear": REGRESSIONS_WEIGHT} if options.has_regressions else {})
        weights = options.weights or tuple(first[term] for term in options.inference)
        self.register_buffer("weights", torch.tensor(weights, dtype=torch.float64))
        self._fitted: ClosedForm | None = None
        self.register_load_state_dict_post_hook(lambda module, _: setattr(module, "_fitted", None))  # type: ignore

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        needed = {"cls": True, "text": options.uses_text, "words": options.interactions != 0}
        return frozenset(name for name, present in needed.items() if present)

    @classmethod
    def scores_new_words(cls, options: ClosedFormOptions) -> bool:
        return "linear" not in options.inference and super().scores_new_words(options)

    def start(self, train: Batch) -> None:
        sizes = len(self.labels.states), len(self.labels.objects)
        statistics = ClassStatistics.of(unit(train.cls), train.compositions, *sizes)
        place = torch.searchsorted(self._seen, statistics.pairs)
        counts = torch.zeros_like(self.counts).index_copy_(0, place, statistics.counts)
        sums = torch.zeros_like(self.sums).index_copy_(0, place, statistics.sums)
        measured = {"counts": counts, "sums": sums, "moment": statistics.moment}
        same = all(torch.equal(getattr(self, name), new) for name, new in measured.items())
        if same and len(statistics.pairs):
            return  # the features have not changed
        for name, new in measured.items():
            getattr(self, name).copy_(new)
        self._fitted = None
        if self.regressions is not None:
            self.regressions.start(train)
        model = self._fit(self._settings())
        self.chosen.copy_(torch.tensor([model.shrinkage, model.tau]))

    def on_features_changed(self, train: Batch) -> None:
        self.start(train)

    def fitted(self) -> ClosedForm:
        """The classifier that `start` fitted, in float32."""
        if self._fitted is None:
            self._fitted = self._fit(self._settings(self.chosen.tolist())).to(torch.float32, self.counts.device)
        return self._fitted

    def _factor_posteriors(self) -> tuple[LinearDiscriminant, LinearDiscriminant] | None:
        if "gaussian_factors" not in self.options.inference:
            return None
        parts = self.context.parts
        states = LinearDiscriminant.fit(self._statistics().by_state(), parts)
        objects = LinearDiscriminant.fit(self._statistics().by_object(), parts)
        return states.to(torch.float32, self.counts.device), objects.to(torch.float32, self.counts.device)

    @property
    def _seen(self) -> Tensor:
        return torch.as_tensor(self.labels.pairs["train"], device=self.counts.device)

    def _statistics(self) -> ClassStatistics:
        present = self.counts > 0
        shape = len(self.labels.states), len(self.labels.objects)
        return ClassStatistics(*shape, self._seen[present], self.counts[present], self.sums[present], self.moment)

    def fitted_statistics(self) -> FittedStatistics:
        return FittedStatistics(self._statistics(), self._settings())

    def _settings(self, chosen: Sequence[float] | None = None) -> FitSettings:
        options = self.options
        shrinkage, interactions = chosen or (options.shrinkage, options.interactions)
        return FitSettings(options.ridge, shrinkage, interactions, options.prior, self.context.parts)

    def _fit(self, settings: FitSettings) -> ClosedForm:
        words = self.context.words
        device = self.counts.device
        vectors = None if words is None else (words.states.to(device), words.objects.to(device))
        return ClosedForm.fit(self._statistics(), settings, vectors)

    def groups(self) -> list[dict[str, Any]]:
        return super().groups() if self.options.losses else []

    def shared(self) -> tuple[Any, ...]:
        return self.paths.prototypes(self.options.losses, self.checkpointing) if self.paths is not None else ()

    def losses(self, batch: Batch, shared: Any) -> dict[str, Tensor]:
        names = self.options.losses
        if self.heads is not None:
            losses = self.heads.losses(unit(batch.cls), batch.compositions)
        else:
            assert self.paths is not None
            losses, _ = self.paths.losses(self.paths.adapt(batch.cls), batch.compositions, shared, names)
        return {name: losses[name] for name in names}

    def choose_options(self, images: Inputs, candidates: Ints, auc: Callable[[Tensor], float]) -> None:
        if self.regressions is not None:
            self.regressions.choose_options(images, candidates, auc)
        if self.options.weights is not None or len(self.options.inference) < 2:
            return
        terms = [term.cpu() for term in self._log_terms(candidates)(images)]
        self.weights.copy_(tuned_weights(self.weights, lambda weights: _weighted(terms, weights), auc))

    def chosen_options(self) -> dict[str, Any]:
        chosen = {} if self.regressions is None else self.regressions.chosen_options()
        return {"weights": tuple(self.weights.tolist()), **chosen}

    @torch.no_grad()
    def score_terms(self, candidates: Ints) -> ScoreTerms:
        terms = self._log_terms(candidates)
        weights = tuple(self.weights.tolist())
        names = self.options.inference
        return torch.no_grad()(lambda inputs: zip(names, _weighted(terms(inputs), weights), strict=True))

    @torch.no_grad()
    def portable(self, candidates: Ints) -> dict[str, Tensor]:
        names = self.options.inference
        device = self.counts.device
        tensors = candidate_primitives(self.labels, candidates, device)
        if self.paths is not None:
            tensors |= portable_paths(self.paths, candidates, names)
        numbers = torch.as_tensor(candidates, device=device)
        tensors |= portable_closed_form(self.fitted(), numbers, self._factor_posteriors())
        if self.heads is not None and "linear" in names:
            for group, head in (("states", self.heads.states), ("objects", self.heads.objects)):
                tensors[f"classifier.{group}.weight"] = head.weight.T.float() / TAU
                tensors[f"classifier.{group}.offset"] = head.bias.detach().float()
        if self.regressions is not None:
            own = self.regressions.portable(candidates)
            tensors |= {name: value for name, value in own.items() if name.startswith("classifier.")}
        tensors |= {f"weights.{name}": weight for name, weight in zip(names, self.weights.float(), strict=True)}
        tensors["product"] = torch.ones((), device=device)
        return tensors

    def _log_terms(self, candidates: Ints) -> Callable[[Inputs], list[Tensor]]:
        names = self.options.inference
        numbers = torch.as_tensor(candidates, device=self.counts.device)
        likelihood = self.fitted().scorer(numbers)
        posteriors = self._factor_posteriors()
        prototypes = self.paths.encode(candidates, names) if self.paths is not None else None
        regressions = None if self.regressions is None else self.regressions.scorer(candidates)
        states, objects = self.primitives(numbers)

        @torch.no_grad()
        def log_terms(inputs: Inputs) -> list[Tensor]:
            raw = unit(inputs["cls"]).float()
            logs = {"gaussian": likelihood(raw).log_softmax(-1)}
            if self.heads is not None:
                f_s, f_o = self.heads(raw.to(self.heads.states.weight))
                log_s = f_s.log_softmax(-1).clamp(min=FLOOR)
                log_o = f_o.log_softmax(-1).clamp(min=FLOOR)
                logs["linear"] = log_s[:, states] + log_o[:, objects]
            if regressions is not None:
                logs["linear"] = regressions(inputs)
            if posteriors is not None:
                of_states, of_objects = posteriors
                log_s = of_states(raw).clamp(min=FLOOR)
                log_o = of_objects(raw).clamp(min=FLOOR)
                logs["gaussian_factors"] = log_s[:, states] + log_o[:, objects]
            if self.paths is not None and prototypes is not None:
                z = self.paths.adapt(inputs["cls"])
                for name, p in self.paths.score_terms(z, prototypes, states, objects, names):
                    logs[name] = p.clamp(min=LEAST).log()
            return [logs[name] for name in names]

        return log_terms

    def inspectable(self) -> Inspectable:
        def visual(compositions: Ints) -> Tensor:
            return unit(self.fitted().prototypes(torch.as_tensor(compositions, device=self.counts.device)))

        text = inspect_paths(self.paths) if self.paths is not None else Inspectable()
        return replace(
            text,
            features=lambda inputs: unit(unit(inputs["cls"]) @ self.fitted().whitening),
            text_space_features=text.features,
            visual=visual,
        )

    def summary(self) -> dict[str, int]:
        return {**super().summary(), "codebook_rows": len(self.counts)}


def _weighted(terms: list[Tensor], weights: tuple[float, ...]) -> list[Tensor]:
    return [weight * term for weight, term in zip(weights, terms, strict=True)]
