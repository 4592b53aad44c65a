"""Base classes and helper functions shared by the methods of published papers, such as CGE, CAILA and DFSP.

Base class of methods that extend the three paths: prompts of compositions, of states and of objects, each compared
with a part of the image feature (duplex/methods/paths.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from duplex.errors import DuplexError
from duplex.labels import Ints
from duplex.methods.base import Batch, Inputs, Inspectable, Method, MethodContext, OptionsT, Scorer, inspect_paths
from duplex.methods.feasibility import feasibility
from duplex.methods.paths import (
    TEMPLATE,
    CompositionIndex,
    FactorPosteriors,
    PathOptions,
    Paths,
    Prompts,
    Prototypes,
    unit,
)
from duplex.options import Count, Options, Template

INITIAL_MARGIN = 10.0  # a difference of cosines is at most 2


class SeenMethod(Method[OptionsT], Generic[OptionsT]):
    """Methods whose losses classify images among `train_candidates`, by default the seen compositions.

    A subclass defines `score`, and `prepare` for values that do not depend on the image.
    """

    def __init__(self, context: MethodContext, options: OptionsT) -> None:
        super().__init__(context, options)
        self.train_candidates = CompositionIndex(context.labels.pairs["train"], len(context.labels.objects))

    def prepare(self, candidates: CompositionIndex) -> Any:
        """What `score` needs of candidate compositions for all images, such as their embeddings."""

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Any) -> Tensor:
        """Scores [B, C] of B images for C candidates, given what `prepare` returned for these."""
        raise DuplexError(f"{type(self).__name__} must define score()")

    def cross_entropies(self, names: Iterable[str], logits: Iterable[Tensor], own: Tensor) -> dict[str, Tensor]:
        """Cross-entropies of composition, state and object under three `names`.

        logits: over the training candidates [B, C], the states [B, M] and the objects [B, N].
        own: the images' compositions [B].
        """
        targets = (self.train_candidates.positions(own), *self.primitives(own))
        return {name: cross_entropy(path, target) for name, path, target in zip(names, logits, targets, strict=True)}

    @torch.no_grad()
    def scorer(self, candidates: Ints) -> Scorer:
        index = CompositionIndex(candidates, len(self.labels.objects)).to(self.train_candidates.states.device)
        prepared = self.prepare(index)
        return torch.no_grad()(lambda inputs: self.score(inputs, index, prepared))


class TextMethod(SeenMethod[OptionsT], Generic[OptionsT]):
    """Methods that compare image features with encoded prompts at CLIP's temperature `tau = 1 / scale`.

    Scores are p(c|x), the softmax over the text features that `prepare` returns, unless a subclass defines `score`.
    """

    required_inputs: ClassVar[tuple[str, ...]] = ("cls", "text")

    def __init__(self, context: MethodContext, options: OptionsT) -> None:
        super().__init__(context, options)
        self.scale = math.exp(context.tower.logit_scale)

    def logits(self, z: Tensor, t: Tensor) -> Tensor:
        """Logits `cos(z, t) / tau` [B, C] of image features `z` [B, d] and unit text features `t` [C, d]."""
        return self.scale * unit(z) @ t.T

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Any) -> Tensor:
        return self.logits(inputs["cls"], prepared).softmax(-1)

    def soft_prompts(self, template: str) -> Prompts:
        """Prompts of compositions with a learned prefix, at first `template`, and a learned vector per name."""
        labels, tower = self.labels, self.context.tower
        return Prompts(labels, tower, context="learned", vocabulary="learned", paths="composition", template=template)


class WordTable(nn.Module):
    """Embeddings of all states and objects, initialised with normalised word vectors; trainable if `trained`."""

    states: Tensor
    objects: Tensor

    def __init__(self, states: Tensor, objects: Tensor, *, trained: bool) -> None:
        super().__init__()
        for name, vectors in (("states", states), ("objects", objects)):
            rows = normalize(vectors.detach().clone().to(torch.float32), dim=-1)  # [M, w], [N, w]
            if trained:
                self.register_parameter(name, nn.Parameter(rows))
            else:
                self.register_buffer(name, rows)

    @property
    def width(self) -> int:
        return self.states.shape[1]


class Composer(nn.Module):
    """Linear map from the word vectors of a state and an object to a composition's embedding of unit length."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.state, self.object = nn.Linear(width, out), nn.Linear(width, out, bias=False)

    def forward(self, words: WordTable, candidates: CompositionIndex) -> Tensor:
        """Unit embeddings [C, out] of the candidates."""
        states, objects = self.state(words.states), self.object(words.objects)
        return unit(states.index_select(0, candidates.states) + objects.index_select(0, candidates.objects))


class WordMethod(SeenMethod[OptionsT], Generic[OptionsT]):
    """Methods that start from word vectors of states and objects (`words`), which may be trained further.

    A subclass sets `composer`, which embeds the candidate compositions, or defines `prepare`.
    """

    required_inputs: ClassVar[tuple[str, ...]] = ("cls", "words")
    composer: Composer

    def __init__(self, context: MethodContext, options: OptionsT, *, trained_words: bool) -> None:
        super().__init__(context, options)
        assert context.words is not None
        self.words = WordTable(context.words.states, context.words.objects, trained=trained_words)

    def prepare(self, candidates: CompositionIndex) -> Any:
        return self.composer(self.words, candidates)

    def shared(self) -> tuple[Any, ...]:
        """The embeddings of the compositions that the losses choose among [C, e], in a tuple of length 1."""
        return (self.prepare(self.train_candidates),)


class EmbeddingHead(WordMethod[OptionsT], Generic[OptionsT]):
    """Methods that score by products of image and composition embeddings, with a cross-entropy loss over the seen
    compositions, or in the open world over all.

    A subclass embeds images (`embed_images`) and compositions (`prepare`), may scale dot products (`scale`), and may
    subtract `margins` from the logits in training.
    """

    margins: Tensor | None  # [M * N], one per composition

    def __init__(self, context: MethodContext, options: OptionsT, *, trained_words: bool, scale: float = 1.0) -> None:
        super().__init__(context, options, trained_words=trained_words)
        self.scale = scale
        if context.world == "open":
            self.train_candidates = CompositionIndex(
                context.labels.candidates("open", "train"), len(context.labels.objects)
            )
        self.register_buffer("margins", None)

    def embed_images(self, z: Tensor) -> Tensor:
        """Embeddings [B, e] of images with the CLS features `z` [B, d]."""
        raise DuplexError(f"{type(self).__name__} must define embed_images()")

    def logits(self, images: Tensor, compositions: Tensor) -> Tensor:
        """Scaled dot products [B, C] of image embeddings [B, e] and composition embeddings [C, e]."""
        return self.scale * (images @ compositions.T)

    @torch.no_grad()
    def feasibility(self, states: Tensor, objects: Tensor) -> Tensor:
        """Feasibility of all compositions [M * N] by embeddings of states and objects; infinite for seen ones."""
        rho = feasibility(states.cpu().numpy(), objects.cpu().numpy(), self.labels)
        return torch.as_tensor(rho, dtype=torch.float32)

    def initial_margins(self) -> Tensor:
        """Margins [M * N] of the first epoch: 0 for seen compositions, for others larger than any logit."""
        return torch.where(torch.as_tensor(self.labels.seen), 0.0, INITIAL_MARGIN * self.scale)

    def raise_margins(self, rho: Tensor, epoch: int) -> None:
        """Set the margins by feasibility `rho` [M * N]; they grow over the epochs of the option `margin_epochs`."""
        assert self.margins is not None
        options: Any = self.options
        alpha = options.margin * min(1.0, epoch / options.margin_epochs)
        self.margins.copy_(options.scale * alpha * torch.where(rho.isinf(), 0.0, rho))

    def losses(self, batch: Batch, shared: tuple[Tensor]) -> dict[str, Tensor]:
        logits = self.logits(self.embed_images(batch.cls), shared[0])
        if self.margins is not None:
            logits = logits - self.margins[self.train_candidates.compositions]
        return {"composition": cross_entropy(logits, self.train_candidates.positions(batch.compositions))}

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Any) -> Tensor:
        return self.logits(self.embed_images(inputs["cls"]), prepared)


def next_allowed_partner(allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Index [B] of the next image in the batch, wrapping around, that may be each image's partner, and who has one [B].

    An image without a partner gets its own index.

    allowed: whether image j may be the partner of image i [B, B].
    """
    count = len(allowed)
    place = torch.arange(count, device=allowed.device)
    after = (place[None] - place[:, None]) % max(count, 1)  # 0 is the image itself
    free = allowed & (after > 0)
    has_partner = free.any(1)
    if not count:
        return place, has_partner
    return torch.where(has_partner, after.masked_fill(~free, count).argmin(1), place), has_partner


LOSSES = ("state", "object", "semantic")
TERMS = ("semantic", "factors")


@dataclass(frozen=True)
class ThreePathOptions(Options):
    """Options that all methods with three paths share."""

    adapter: Literal["none", "feature"] = "feature"  # feature: a bottleneck on the cached feature
    width: Count = 768  # hidden units of each disentangler
    template: Template = TEMPLATE  # words whose tokens initialise the three learned contexts


ThreePathOptionsT = TypeVar("ThreePathOptionsT", bound=ThreePathOptions)


class ThreePaths(TextMethod[ThreePathOptionsT], Generic[ThreePathOptionsT]):
    """Methods with the score `p(c^t|x) + p(s|x) p(o|x)`; subclasses add losses and score terms."""

    def __init__(self, context: MethodContext, options: ThreePathOptionsT) -> None:
        super().__init__(context, options)
        path_options = PathOptions(adapter=options.adapter, width=options.width, template=options.template)
        self.paths = Paths(context.labels, context.tower, path_options, context.world)

    def shared(self) -> Prototypes:
        return self.paths.prototypes(LOSSES, self.checkpointing)

    def path_losses(self, batch: Batch, t: Prototypes) -> tuple[Tensor, FactorPosteriors, dict[str, Tensor]]:
        """Image features [B, d] after the adapter, their factors, and three cross-entropies by name."""
        z = self.paths.adapt(batch.cls)
        losses, factors = self.paths.losses(z, batch.compositions, t, LOSSES)
        assert factors is not None
        return z, factors, losses

    def terms(self, z: Tensor, t: Prototypes, candidates: CompositionIndex) -> Iterator[Tensor]:
        """Yield the summands [B, C] of the candidates' scores; `z` [B, d] are features after the adapter."""
        yield from (term for _, term in self.paths.score_terms(z, t, candidates.states, candidates.objects, TERMS))

    def prepare(self, candidates: CompositionIndex) -> Prototypes:
        return self.paths.encode(candidates.compositions_np, TERMS)

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Prototypes) -> Tensor:
        return reduce(Tensor.add_, self.terms(self.paths.adapt(inputs["cls"]), prepared, candidates))

    def inspectable(self) -> Inspectable:
        return inspect_paths(self.paths)
