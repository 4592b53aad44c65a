"""Score by prompts that a frozen text tower encodes: CLIP, CoOp, CSP or three paths, by option.

    S = p(c|x) + p(s|x) p(o|x), or one of these terms

CLIP (Radford et al., 2021) scores with hand-written prompts; CoOp (Zhou et al., 2022) learns the
context in them, CSP (Nayak et al., 2023) the vectors of the names. Three paths also compare
prompts of states and objects with factors.

Option `maxima` adds EVA's scores of states and objects without paths of their own (arXiv
2506.20986; its formulas were read in a third party's summary, which does not give the weight of
the two losses, here 1):

    p_m(s|x) = max_o p(c_so|x) / sum_s max_o p(c_so|x),   p_m(o|x) likewise
    L = ... - log p_m(s|x) - log p_m(o|x),   S = ... + (p_m(s|x) + p_m(o|x)) / 2

* c_so: the seen compositions in losses, the candidates in scores
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Generic, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from duplex.labels import Ints
from duplex.methods.base import Batch, Inputs, Inspectable, Method, MethodContext, OptionsT, Scorer, ScoreTerms
from duplex.methods.paths import EXCLUDED, PathOptions, Paths, inspect_paths
from duplex.methods.portable import normalise_posterior_sums, portable_paths
from duplex.methods.prompts import Prototypes
from duplex.options import refuse


@dataclass(frozen=True)
class PromptOptions(PathOptions):
    """Options of `kind: prompts`: of prompts, loss and score, EVA's `maxima`."""

    losses: tuple[Literal["state", "object", "semantic"], ...] = ("state", "object", "semantic")
    inference: tuple[Literal["semantic", "factors"], ...] = ("semantic", "factors")  # score terms
    score: Literal["probability", "logit"] = "probability"  # of semantic: p(c|x) or its logit
    maxima: bool = False  # words also get their largest composition's probability (EVA)

    def rules(self) -> Iterable[tuple[object, str]]:
        yield from super().rules()
        yield from self.path_rules(self.losses, self.inference)
        if self.maxima:
            untrained = self.losses and "semantic" not in self.losses
            message = "maxima needs semantic in losses and in inference"
            yield refuse(untrained or "semantic" not in self.inference, message)


class PathSumMethod(Method[OptionsT], Generic[OptionsT]):
    """Base class of methods whose score adds up the posteriors that `inference` lists."""

    required_inputs: ClassVar[tuple[str, ...]] = ("cls", "text")
    options: Any
    paths: Paths

    def groups(self) -> list[dict[str, Any]]:
        return super().groups() if self.options.losses else []

    def shared(self) -> Prototypes:
        return self.paths.prototypes(self.options.losses, self.checkpointing)

    def scorer(self, candidates: Ints) -> Scorer:
        terms = self.score_terms(candidates)
        assert terms is not None
        # added in place to save memory
        return torch.no_grad()(lambda inputs: reduce(Tensor.add_, (term for _, term in terms(inputs))).float())

    def probabilities(self, scores: Tensor) -> Tensor:
        return normalise_posterior_sums(scores)

    def inspectable(self) -> Inspectable:
        return inspect_paths(self.paths)


class PromptMethod(PathSumMethod[PromptOptions]):
    """Scores by prompts, without visual prototypes: CLIP, CoOp, CSP or three paths."""

    def __init__(self, context: MethodContext, options: PromptOptions) -> None:
        super().__init__(context, options)
        self.paths = Paths(context.labels, context.tower, options, context.world)

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        names = self.options.losses
        z = self.paths.adapt(batch.cls)
        losses, _ = self.paths.losses(z, batch.compositions, shared, names)
        found = {name: losses[name] for name in names}
        if self.options.maxima:
            m, n = self.primitives(batch.compositions)
            states, objects = self.maxima(self.paths.logits(z, shared.compositions), self.paths.negatives)
            found |= {"state_maximum": cross_entropy(states, m), "object_maximum": cross_entropy(objects, n)}
        return found

    def maxima(self, logits: Tensor, compositions: Tensor) -> tuple[Tensor, Tensor]:
        """Largest of the `logits` [B, C] of each state's [B, M] and each object's [B, N] pairs."""
        m, n = self.primitives(compositions)
        return _largest(logits, m, len(self.labels.states)), _largest(logits, n, len(self.labels.objects))

    @torch.no_grad()
    def score_terms(self, candidates: Ints) -> ScoreTerms:
        names = self.options.inference
        prototypes = self.paths.encode(candidates, names)
        logits = self.options.score == "logit"
        compositions = torch.as_tensor(candidates, device=self.paths.negatives.device)
        states, objects = self.primitives(compositions)

        @torch.no_grad()
        def terms(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
            z = self.paths.adapt(inputs["cls"])
            yield from self.paths.score_terms(z, prototypes, states, objects, names, logits)
            if self.options.maxima:
                of_states, of_objects = self.maxima(self.paths.logits(z, prototypes.compositions), compositions)
                yield "maxima", (of_states.softmax(-1)[:, states] + of_objects.softmax(-1)[:, objects]) / 2

        return terms

    def probabilities(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1) if self.options.score == "logit" else super().probabilities(scores)

    @torch.no_grad()
    def portable(self, candidates: Ints) -> dict[str, Tensor] | None:
        is_exportable = self.options.score == "probability" and not self.options.maxima
        return portable_paths(self.paths, candidates, self.options.inference) if is_exportable else None


def _largest(logits: Tensor, groups: Tensor, size: int) -> Tensor:
    # a group without a logit gets the probability 0
    lowest = logits.new_full((len(logits), size), EXCLUDED)
    return lowest.scatter_reduce(1, groups.expand_as(logits), logits, "amax")
