"""Method that combines finished runs (trained models): their log probabilities are added, and nothing is trained.

The runs `k` are the members of the product. With `p_k(c|x)`, the probability that run `k` gives to candidate `c`, and
`T_k`, the temperature that calibrates these probabilities on validation images, the score, normalised by Z, is

    log S(c|x) = sum_k w_k log p_k(c|x) / T_k - log Z.

The weights `w_k` are equal, or each method has its own, chosen by validation AUC. The checkpoint of a product contains
the checkpoints of its members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from duplex.errors import UsageError
from duplex.labels import Ints
from duplex.layers.portable import joined_members
from duplex.layers.score_formula import LEAST
from duplex.layers.weight_search import Weights, tuned_weights
from duplex.methods.base import Batch, Inputs, Method, MethodContext, ScoreTerms
from duplex.methods.registry import checked_needs, find_method, make_method, parse_options
from duplex.options import CombinedOptions, FinetuneOptions


@dataclass(frozen=True)
class ProductOptions(CombinedOptions):
    """Options in params.yaml of a method with `kind: product`, which combines finished runs."""

    weights: Literal["equal", "tuned"] = "equal"  # one per method in `of`; tuned: by validation AUC

    def rules(self) -> Iterable[tuple[object, str]]:
        yield from super().rules()
        several = self.weights == "equal" or len(self.of) > 1
        yield several, f"weights is tuned and of is {list(self.of)}; tuned weights need two methods or more"


class ProductMethod(Method[ProductOptions]):
    """Method that combines finished runs (trained models): the score is the weighted sum of their log probabilities."""

    combines_runs: ClassVar[bool] = True
    temperatures: Tensor  # [K], one per member
    weights: Tensor  # one per method in `of`

    def __init__(self, context: MethodContext, options: ProductOptions) -> None:
        super().__init__(context, options)
        if not options.members:
            raise UsageError(
                f"a product combines finished runs of {', '.join(options.of)}; list it in run.products of params.yaml"
            )
        trained = context.members or tuple(build_member(member, context) for member in options.members)
        self.members: Any = nn.ModuleList(trained).requires_grad_(False)
        temperatures = [float(member["temperature"]) for member in options.members]
        self.register_buffer("temperatures", torch.tensor(temperatures, dtype=torch.float64))
        self.register_buffer("weights", torch.ones(len(options.of), dtype=torch.float64))

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        kinds = [(m["kind"], parse_options(m["kind"], m["options"])) for m in options.members]
        return frozenset({"cls"}).union(*(checked_needs(find_method(kind), parsed) for kind, parsed in kinds))

    def start(self, train: Batch) -> None:
        """Initialise every method in this product (combined model), unless they are loaded from finished runs."""
        if not self.context.members:
            for member in self.members:
                member.start(train)

    def groups(self) -> list[dict[str, Any]]:
        return []

    def tune(self, images: Inputs, candidates: Ints, auc: Callable[[Tensor], float]) -> None:
        """Choose by validation AUC the weights of the methods whose log probabilities this product adds.

        The last weight is 1, because a common factor of all weights changes no ranking.
        """
        if self.options.weights == "equal":
            return
        terms = [term.cpu() for _, term in self._log_terms(candidates)(images)]

        def weighted(weights: Weights) -> list[Tensor]:
            return [w * term for w, term in zip(weights, terms, strict=True)]

        self.weights.copy_(tuned_weights(self.weights, weighted, auc))

    @torch.no_grad()
    def score_terms(self, candidates: Ints) -> ScoreTerms:
        """Return a function that yields name and summand of the scores [B, C] of each method that this product adds.

        A method's summand is the sum over its runs with different seeds.
        """
        terms, weights = self._log_terms(candidates), self.weights.tolist()

        @torch.no_grad()
        def named_terms(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
            for weight, (name, term) in zip(weights, terms(inputs), strict=True):
                yield name, weight * term

        return named_terms

    def _log_terms(self, candidates: Ints) -> Callable[[Inputs], Iterator[tuple[str, Tensor]]]:
        """Return a function that yields name and log score [B, C] of each method in this product (combined model).

        The log score is `sum_k log p_k / T_k` over the method's trained runs k (seeds): `p_k` are the run's
        probabilities of the candidates, `T_k` is its temperature.
        """
        members = [(m["method"], method.eval()) for m, method in zip(self.options.members, self.members, strict=True)]
        scorers = [method.scorer(candidates.copy()) for _, method in members]

        @torch.no_grad()
        def log_terms(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
            for name in self.options.of:
                total: Any = 0.0
                for place, (own, method) in enumerate(members):
                    if own == name:
                        p = method.probabilities(scorers[place](inputs).double())
                        total = total + p.clamp(min=LEAST).log() / self.temperatures[place]
                yield name, total.float()

        return log_terms

    @torch.no_grad()
    def portable(self, candidates: Ints) -> dict[str, Tensor] | None:
        tensors = [member.portable(candidates) for member in self.members]
        frozen = all(member["finetune"] is None for member in self.options.members)
        if not frozen or any(each is None for each in tensors):
            return None
        places = [self.options.of.index(member["method"]) for member in self.options.members]
        return joined_members([t for t in tensors if t is not None], (self.weights[places] / self.temperatures).float())


def build_member(member: dict[str, Any], context: MethodContext) -> Method[Any]:
    """Return the method of one run in a product (a model that combines runs), built with initial tensors.

    The tensors of the product's checkpoint are then loaded into it.

    member: the run's entry of `ProductOptions.members`: kind, options, options of fine-tuned blocks, world and others.
    """
    blocks = None
    if member["finetune"] is not None:
        options, make_blocks = FinetuneOptions.from_dict(member["finetune"]), context.member_blocks
        if make_blocks is None:
            raise UsageError(
                f"{member['method']} has fine-tuned blocks, and no image tower is loaded that could run them"
            )
        blocks = lambda: make_blocks(options)  # noqa: E731
    own = replace(context, world=member["world"], finetuned_blocks=blocks, members=(), member_blocks=None)
    return make_method(member["kind"], parse_options(member["kind"], member["options"]), own)
