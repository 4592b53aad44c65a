"""Visual prototypes in closed form beside prompts: trained or not, with text or without (docs/method.md).

`g_c(z)`, the log-likelihood of an image under its pair's composed mean and the shared spread of images about their
means (duplex/layers/gaussian_prototypes.py), joins the semantic terms as one more factor of a product,

    log S(c|x) = w_t log p(c^t|x) + w_so log p(s|x) p(o|x) + w_g log p_g(c|x) + w_gso log p_g(s|x) p_g(o|x) - log Z,

`p_g(c|x)` being the softmax of `g` and the last term the posteriors of states and objects by the same model; or, with
`fusion: sum`, as one more summand as in the paper. The weights are chosen by validation AUC and kept. `g` is made of
sufficient statistics, which is what a checkpoint holds: counts, sums and one matrix, to be refitted in no time or added
to when pictures arrive. Rows without losses train nothing; `inference: [g]` reads no text at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from duplex.labels import Ints
from duplex.layers.factors import unit
from duplex.layers.gaussian_prototypes import ClosedForm, Posterior, Settings
from duplex.layers.paths import PathOptions, Paths
from duplex.layers.portable import FLOOR, LEAST, portable_closed_form, portable_paths, primitives_of, shares
from duplex.layers.statistics import Statistics
from duplex.methods.base import Batch, Inputs, Method, Scorer, Setting, Terms, columns_of
from duplex.methods.inspectable import Exhibits, of_paths

Term = Literal["ct", "so", "g", "gso"]
START = {"ct": 0.5, "so": 0.5, "gso": 0.125, "g": 0.25}  # weights before validation chooses
STEPS = (4.0, 2.0, 2**0.5)  # factors by which a weight is tried larger and smaller, in turn
EVIDENCE = {"ct": "semantic", "so": "factors", "g": "visual", "gso": "primitives"}  # what people are told of a term


@dataclass(frozen=True)
class ClosedFormOptions(PathOptions):
    """The defaults are three trained paths times the closed form."""

    losses: tuple[Literal["s", "o", "ct"], ...] = ("s", "o", "ct")
    inference: tuple[Term, ...] = ("ct", "so", "g")
    fusion: Literal["product", "sum"] = "product"
    weights: tuple[float, ...] | None = None  # of the terms of `inference`, in their order; null: validation chooses
    ridge: float = 0.1  # in images: a state seen on so many is drawn half-way to the mean of all states
    shrinkage: float | None = None  # of seen rows, in images; null: by marginal likelihood
    interactions: float | None = 0.0  # variance shared between pairs of like words; null: by likelihood, 0: none
    prior: bool = True  # frequent seen pairs are likelier

    def rules(self) -> Iterable[tuple[object, str]]:
        yield from super().rules()
        yield from self.path_rules(self.losses, self.inference)
        yield "g" in self.inference, "inference has no term g; without it the row is one of kind prompts"
        reach = f"losses {list(self.losses)} reach nothing that can be trained here"
        yield not self.losses or self.reached() & set(self.losses), reach
        asked = {"ct": {"ct"}, "so": {"s", "o"}}
        idle = [name for name in self.losses if not any(name in asked.get(term, ()) for term in self.inference)]
        yield not idle, f"losses {idle} train what inference {list(self.inference)} does not ask"
        counted = self.weights is None or len(self.weights) == len(self.inference)
        yield counted, f"weights are {len(self.weights or ())} for {len(self.inference)} terms of inference"
        yield min(self.weights or (0,)) >= 0, "weights are not negative"
        yield self.ridge > 0, f"ridge is {self.ridge}; it is above 0"
        yield self.shrinkage is None or self.shrinkage > 0, f"shrinkage is {self.shrinkage}; it is above 0, or null"
        mixed = self.interactions
        yield mixed is None or mixed >= 0, f"interactions is {mixed}; it is 0 or more, or null"

    @property
    def speaks(self) -> bool:
        """Whether any term asks prompts."""
        return bool({"ct", "so"} & set(self.inference))


class ClosedFormMethod(Method[ClosedFormOptions]):
    """`L = L_s + L_o + L_c^t` of the terms switched on; `g` follows from the training images."""

    Options = ClosedFormOptions
    counts: Tensor
    sums: Tensor
    moment: Tensor
    chosen: Tensor
    weights: Tensor

    def __init__(self, setting: Setting, options: ClosedFormOptions) -> None:
        super().__init__(setting, options)
        labels = setting.labels
        self.paths = Paths(labels, setting.tower, options, setting.world) if options.speaks else None
        pairs, dim = len(labels.pairs["train"]), setting.dim
        for name, shape in (("counts", (pairs,)), ("sums", (pairs, dim)), ("moment", (dim, dim)), ("chosen", (2,))):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))
        weights = options.weights or tuple(START[term] for term in options.inference)
        self.register_buffer("weights", torch.tensor(weights, dtype=torch.float64))
        self._fitted: ClosedForm | None = None
        self.register_load_state_dict_post_hook(ClosedFormMethod._forget)  # type: ignore[no-untyped-call]

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        words = {"words"} if options.interactions != 0 else set[str]()
        return frozenset({"cls", *({"text"} if options.speaks else ()), *words})

    # -- the closed form ------------------------------------------------------------------------------------------

    def start(self, train: Batch) -> None:
        labels = self.labels
        found = Statistics.of(unit(train.z), train.compositions, len(labels.states), len(labels.objects))
        place = torch.searchsorted(self._pairs(), found.pairs)
        self.counts.zero_()[place] = found.counts
        self.sums.zero_()[place] = found.sums
        self.moment.copy_(found.moment)
        self._fitted = None
        model = ClosedForm.fit(self._statistics(), self._settings(), self._words())
        self.chosen.copy_(torch.tensor([model.shrinkage, model.tau]))

    def fitted(self) -> ClosedForm:
        """The model, in the precision of scores."""
        if self._fitted is None:
            settings = replace(self._settings(), shrinkage=float(self.chosen[0]), interactions=float(self.chosen[1]))
            model = ClosedForm.fit(self._statistics(), settings, self._words())
            self._fitted = model.to(torch.float32, self.counts.device)
        return self._fitted

    def _primitives(self) -> tuple[Posterior, Posterior]:
        """Of states and of objects, each with a spread of its own."""
        known, device = self._statistics(), self.counts.device
        of_state, of_object = Posterior.fit(known.by_state()), Posterior.fit(known.by_object())
        return of_state.to(torch.float32, device), of_object.to(torch.float32, device)

    def _forget(self, _: Any) -> None:
        self._fitted = None

    def _pairs(self) -> Tensor:
        return torch.as_tensor(self.labels.pairs["train"], device=self.counts.device)

    def _statistics(self) -> Statistics:
        there = self.counts > 0
        shape = len(self.labels.states), len(self.labels.objects)
        return Statistics(*shape, self._pairs()[there], self.counts[there], self.sums[there], self.moment)

    def _settings(self) -> Settings:
        o = self.options
        return Settings(ridge=o.ridge, shrinkage=o.shrinkage, interactions=o.interactions, prior=o.prior)

    def _words(self) -> tuple[Tensor, Tensor] | None:
        words = self.setting.words
        if words is None:
            return None
        return words.states.to(self.counts.device), words.objects.to(self.counts.device)

    # -- training -----------------------------------------------------------------------------------------------

    def groups(self) -> list[dict[str, Any]]:
        return super().groups() if self.options.losses else []

    def shared(self) -> tuple[Any, ...]:
        return self.paths.prototypes(self.options.losses, self.checkpointing) if self.paths is not None else ()

    def losses(self, batch: Batch, shared: Any) -> dict[str, Tensor]:
        assert self.paths is not None
        wanted = self.options.losses
        found, _ = self.paths.losses(self.paths.features(batch.z), batch.compositions, shared, wanted)
        return {name: found[name] for name in wanted}

    def follow(self, train: Batch) -> None:
        """Statistics of features as they are: only a tail moves what `g` reads."""
        if self.setting.image_tail is not None:
            self.start(train)

    # -- inference ------------------------------------------------------------------------------------------------

    def tune(self, images: Inputs, columns: Ints, auc: Callable[[Tensor], float]) -> None:
        """The weights with the best validation AUC: each in turn is tried larger and smaller, by ever smaller steps."""
        if self.options.weights is not None or len(self.options.inference) < 2:
            return
        terms = [term.cpu() for term in self._terms(columns)(images)]

        def value(weights: tuple[float, ...]) -> float:
            return auc(self._fuse(terms, weights))

        best = tuple(self.weights.tolist())
        top = value(best)
        for factor in STEPS:
            moved = True
            while moved:
                moved = False
                for place, turn in product(range(len(best) - 1), (factor, 1 / factor)):  # their common scale is free
                    trial = tuple(w * turn if i == place else w for i, w in enumerate(best))
                    if max(trial) < 64 and (found := value(trial)) > top:
                        best, top, moved = trial, found, True
        self.weights.copy_(torch.tensor(best))

    @torch.no_grad()
    def scorer(self, columns: Ints) -> Scorer:
        terms, weights = self._terms(columns), tuple(self.weights.tolist())
        return torch.no_grad()(lambda inputs: self._fuse(terms(inputs), weights))

    @torch.no_grad()
    def evidence(self, columns: Ints) -> Terms:
        terms, weights = self._terms(columns), tuple(self.weights.tolist())
        names = [EVIDENCE[term] for term in self.options.inference]

        @torch.no_grad()
        def parts(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
            return zip(names, self._weighed(terms(inputs), weights), strict=True)

        return parts

    def probabilities(self, scores: Tensor) -> Tensor:
        return super().probabilities(scores) if self.options.fusion == "product" else shares(scores)

    def _fuse(self, terms: list[Tensor], weights: tuple[float, ...]) -> Tensor:
        """Logarithms of the terms [B, C] -> scores: their weighted sum, or the sum of weighted probabilities."""
        return torch.stack(self._weighed(terms, weights)).sum(0)

    def _weighed(self, terms: list[Tensor], weights: tuple[float, ...]) -> list[Tensor]:
        product = self.options.fusion == "product"
        return [w * (term if product else term.exp()) for w, term in zip(weights, terms, strict=True)]

    @torch.no_grad()
    def likelihood(self) -> Tensor:
        return self.fitted().support().flatten()

    @torch.no_grad()
    def portable(self, columns: Ints) -> dict[str, Tensor]:
        names, device = self.options.inference, self.counts.device
        found = primitives_of(self.labels, columns, device)
        if self.paths is not None:
            found |= portable_paths(self.paths, columns, names)
        primitives = self._primitives() if "gso" in names else None
        found |= portable_closed_form(self.fitted(), torch.as_tensor(columns, device=device), primitives)
        weights = zip(names, self.weights.float(), strict=True)
        found |= {f"weights.{EVIDENCE[name]}": weight for name, weight in weights}
        return found | ({"product": torch.ones((), device=device)} if self.options.fusion == "product" else {})

    def _terms(self, columns: Ints) -> Callable[[Inputs], list[Tensor]]:
        """A function from inputs to the logarithms of the terms of `inference`, in its order, each [B, C]."""
        names, device = self.options.inference, self.counts.device
        likelihood = self.fitted().scorer(torch.as_tensor(columns, device=device))
        primitives = self._primitives() if "gso" in names else None
        prototypes = self.paths.encode(columns, names) if self.paths is not None else None
        states, objects = columns_of(self.labels, columns, device)

        @torch.no_grad()
        def terms(inputs: Inputs) -> list[Tensor]:
            raw = unit(inputs["cls"]).float()
            found = {"g": likelihood(raw).log_softmax(-1)}
            if primitives is not None:
                log_s, log_o = (posterior(raw).clamp(min=FLOOR) for posterior in primitives)
                found["gso"] = log_s[:, states] + log_o[:, objects]
            if self.paths is not None and prototypes is not None:
                z = self.paths.features(inputs["cls"])
                asked = [name for name in ("ct", "so") if name in names]
                spoken = self.paths.terms(z, prototypes, states, objects, asked)
                found |= {name: p.clamp(min=LEAST).log() for name, (_, p) in zip(asked, spoken, strict=True)}
            return [found[name] for name in names]

        return terms

    def exhibits(self) -> Exhibits:
        @torch.no_grad()
        def features(inputs: Inputs) -> Tensor:
            return unit(unit(inputs["cls"]) @ self.fitted().whitening)

        @torch.no_grad()
        def visual(compositions: Ints) -> Tensor:
            return unit(self.fitted().rows_of(torch.as_tensor(compositions, device=self.counts.device)))

        own = of_paths(self.paths) if self.paths is not None else Exhibits()
        return replace(own, features=features, spoken=own.features, visual=visual)

    def summary(self) -> dict[str, int]:
        return {**super().summary(), "codebook_rows": len(self.counts)}
