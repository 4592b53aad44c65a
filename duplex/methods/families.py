"""Base classes and layers shared by the methods of published papers, such as CGE, CAILA and DFSP.

Methods compare image features with encoded prompts (`TextMethod`), with prompts on three paths,
those of compositions, states and objects (`ThreePaths`), or with embedded word vectors
(`WordMethod`, `EmbeddingHead`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from duplex.errors import DuplexError, UsageError
from duplex.labels import Ints, LabelSpace
from duplex.methods.base import Batch, Inputs, Inspectable, Method, MethodContext, OptionsT, Scorer
from duplex.methods.layers import CompositionIndex, FactorNetworks, QuickGelu, unit, zero_initialised
from duplex.methods.paths import FactorPosteriors, PathOptions, Paths, inspect_paths
from duplex.methods.portable import normalise_posterior_sums
from duplex.methods.prompts import TEMPLATE, Prompts, Prototypes
from duplex.methods.word_feasibility import feasibility
from duplex.options import Count, NonNegative, Options, Template

INITIAL_MARGIN = 10.0  # a difference of cosines is at most 2
LOSSES = ("semantic", "state", "object")
Form = Literal["plain", "published"]  # of a method's network and losses; published: as in the authors' code
CHUNK = 2**24  # numbers in memory at once in inference


class SeenMethod(Method[OptionsT], Generic[OptionsT]):
    """Base class of methods trained to choose among `train_candidates`, by default seen pairs."""

    def __init__(self, context: MethodContext, options: OptionsT) -> None:
        super().__init__(context, options)
        self.train_candidates = CompositionIndex(context.labels.pairs["train"], len(context.labels.objects))

    def prepare(self, candidates: CompositionIndex) -> Any:
        """What `score` needs to know about the candidates, such as embeddings; computed once."""

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Any) -> Tensor:
        """Scores [B, C] of C candidates, for which `prepare` returned `prepared`."""
        raise DuplexError(f"{type(self).__name__} must define score()")

    def three_path_losses(
        self, logits: Iterable[Tensor], compositions: Tensor, names: Iterable[str] = LOSSES, primitives: float = 1.0
    ) -> dict[str, Tensor]:
        """Cross-entropies of compositions, states and objects, by the three `names`.

        logits: for training candidates [B, C], states [B, M], objects [B, N]; primitives: a
            weight.
        """
        targets = (self.train_candidates.positions_of_listed(compositions), *self.primitives(compositions))
        paths = zip(names, (1.0, primitives, primitives), logits, targets, strict=True)
        return {name: weight * cross_entropy(path, target) for name, weight, path, target in paths}

    @torch.no_grad()
    def scorer(self, candidates: Ints) -> Scorer:
        index = CompositionIndex(candidates, len(self.labels.objects)).to(self.train_candidates.states.device)
        prepared = self.prepare(index)
        return torch.no_grad()(lambda inputs: self.score(inputs, index, prepared))


@dataclass(frozen=True)
class TextOptions(Options):
    """Option of all methods with encoded prompts: whether scores are probabilities or logits."""

    score: Literal["probability", "logit"] = "probability"  # p(c|x) or its logit


TextOptionsT = TypeVar("TextOptionsT", bound=TextOptions)


class TextMethod(SeenMethod[TextOptionsT], Generic[TextOptionsT]):
    """Base class of methods with prompts, at the temperature `1 / scale`."""

    required_inputs: ClassVar[tuple[str, ...]] = ("cls", "text")

    def __init__(self, context: MethodContext, options: TextOptionsT) -> None:
        super().__init__(context, options)
        self.scale = math.exp(context.tower.logit_scale)

    def logits(self, z: Tensor, t: Tensor) -> Tensor:
        """Logits `cos(z, t) / tau` [B, C] of features `z` [B, d] and unit text features `t`."""
        return self.scale * unit(z) @ t.T

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Any) -> Tensor:
        return self.scored(self.logits(inputs["cls"], prepared))

    def scored(self, logits: Tensor) -> Tensor:
        """Scores from logits [B, C]: unchanged or their softmax, as the option `score` says."""
        return logits if self.options.score == "logit" else logits.softmax(-1)

    def probabilities(self, scores: Tensor) -> Tensor:
        is_logit = self.options.score == "logit"
        return super().probabilities(scores) if is_logit else normalise_posterior_sums(scores)

    def soft_prompts(self, template: str) -> Prompts:
        """Prompts of a learned prefix, at first `template`, and a learned vector per word."""
        return Prompts(
            self.labels,
            self.context.tower,
            context="learned",
            vocabulary="learned",
            paths="composition",
            template=template,
        )


@dataclass(frozen=True)
class WordOptions(Options):
    """Option shared by all methods with word vectors: how these are scaled."""

    unit_words: bool = True  # whether word vectors are scaled to unit length first


WordOptionsT = TypeVar("WordOptionsT", bound=WordOptions)


class WordTable(nn.Module):
    """Embeddings of all states and objects, initialised with word vectors."""

    states: Tensor
    objects: Tensor
    fixed_rows: dict[str, Tensor]

    def __init__(self, states: Tensor, objects: Tensor, *, trained: bool, unit_words: bool = True) -> None:
        super().__init__()
        for name, vectors in (("states", states), ("objects", objects)):
            rows = vectors.detach().clone().to(torch.float32)  # [M, w], [N, w]
            rows = normalize(rows, dim=-1) if unit_words else rows
            if trained:
                self.register_parameter(name, nn.Parameter(rows))
            else:
                self.register_buffer(name, rows)

    @property
    def width(self) -> int:
        return self.states.shape[1]


class Composer(nn.Module):
    """Maps a composition's two word vectors linearly to an embedding of unit length."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.state = nn.Linear(width, out)
        self.object = nn.Linear(width, out, bias=False)

    def forward(self, words: WordTable, candidates: CompositionIndex) -> Tensor:
        states, objects = self.state(words.states), self.object(words.objects)
        return unit(states.index_select(0, candidates.states) + objects.index_select(0, candidates.objects))


def new_words(labels: LabelSpace) -> dict[str, Tensor]:
    """Rows of tables `states` and `objects` for words without training images."""
    new = (torch.from_numpy(~known).nonzero()[:, 0] for known in labels.trained_words)
    return dict(zip(("states", "objects"), new, strict=True))


class WordMethod(SeenMethod[WordOptionsT], Generic[WordOptionsT]):
    """Base class of methods with word vectors; a subclass sets `composer` or defines `prepare`."""

    required_inputs: ClassVar[tuple[str, ...]] = ("cls", "words")
    composer: Composer

    def __init__(self, context: MethodContext, options: WordOptionsT, *, trained_words: bool) -> None:
        super().__init__(context, options)
        assert context.words is not None
        states = context.words.states
        objects = context.words.objects
        self.words = WordTable(states, objects, trained=trained_words, unit_words=options.unit_words)
        if trained_words:
            self.words.fixed_rows = new_words(context.labels)

    def prepare(self, candidates: CompositionIndex) -> Any:
        return self.composer(self.words, candidates)

    def shared(self) -> tuple[Any, ...]:
        return (self.prepare(self.train_candidates),)


class EmbeddingHead(WordMethod[WordOptionsT], Generic[WordOptionsT]):
    """Base class of methods that multiply image and composition embeddings.

    The loss is a cross-entropy over seen pairs, in the open world over all. A subclass defines
    `embed_images` and `prepare`, and may set `scale`, and `margins`, subtracted from logits.
    """

    margins: Tensor | None  # [M * N], one per composition

    def __init__(
        self, context: MethodContext, options: WordOptionsT, *, trained_words: bool, scale: float = 1.0
    ) -> None:
        super().__init__(context, options, trained_words=trained_words)
        self.scale = scale
        if context.world == "open":
            compositions = context.labels.candidates("open", "train")
            self.train_candidates = CompositionIndex(compositions, len(context.labels.objects))
        self.register_buffer("margins", None)

    def embed_images(self, z: Tensor) -> Tensor:
        """Embeddings [B, e] of CLS features `z` [B, d]."""
        raise DuplexError(f"{type(self).__name__} must define embed_images()")

    def logits(self, images: Tensor, compositions: Tensor) -> Tensor:
        return self.scale * (images @ compositions.T)

    @torch.no_grad()
    def feasibility(self, states: Tensor, objects: Tensor) -> Tensor:
        """Feasibility [M * N] by the similarity of embedded words; infinite for seen pairs."""
        rho = feasibility(states.cpu().numpy(), objects.cpu().numpy(), self.labels)
        return torch.as_tensor(rho, dtype=torch.float32)

    def initial_margins(self) -> Tensor:
        """What the loss subtracts at first [M * N]: 0 if seen; if unseen, more than any logit."""
        return torch.where(torch.as_tensor(self.labels.seen), 0.0, INITIAL_MARGIN * self.scale)

    def raise_margins(self, rho: Tensor, epoch: int) -> None:
        """Set margins to `rho` [M * N], 0 for seen pairs, times a factor that rises."""
        assert self.margins is not None
        options: Any = self.options
        alpha = options.margin * min(1.0, epoch / options.margin_epochs)
        self.margins.copy_(options.scale * alpha * torch.where(rho.isinf(), 0.0, rho))

    def losses(self, batch: Batch, shared: tuple[Tensor]) -> dict[str, Tensor]:
        logits = self.logits(self.embed_images(batch.cls), shared[0])
        if self.margins is not None:
            logits = logits - self.margins[self.train_candidates.compositions]
        own = self.train_candidates.positions_of_listed(batch.compositions)
        return {"composition": cross_entropy(logits, own)}

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Any) -> Tensor:
        return self.logits(self.embed_images(inputs["cls"]), prepared)


@dataclass(frozen=True)
class ThreePathOptions(TextOptions):
    """Options of methods with three paths: networks, loss weights, the score, the template."""

    adapter: Literal["none", "feature"] = "feature"  # feature: a bottleneck on the cached feature
    disentangler: Literal["plain", "batch_norm"] = "plain"  # batch_norm: one layer
    width: Count = 768  # hidden units of each plain disentangler
    primitives: NonNegative = 1.0  # weight of the losses of states and objects
    joined: Literal["product", "sum"] = "product"  # how the score joins p(s|x) and p(o|x)
    template: Template = TEMPLATE  # words whose tokens initialise the three learned contexts


ThreePathOptionsT = TypeVar("ThreePathOptionsT", bound=ThreePathOptions)


class ThreePaths(TextMethod[ThreePathOptionsT], Generic[ThreePathOptionsT]):
    """Base class of methods that combine probabilities by prompts of pairs, states, objects."""

    def __init__(self, context: MethodContext, options: ThreePathOptionsT) -> None:
        super().__init__(context, options)
        path_options = PathOptions(adapter=options.adapter, width=options.width, template=options.template)
        self.paths = Paths(context.labels, context.tower, path_options, context.world)
        if options.disentangler == "batch_norm":
            dim = context.tower.dim
            self.paths.factors = FactorNetworks(dim, options.width, batch_norm=True)

    def shared(self) -> Prototypes:
        return self.paths.prototypes(LOSSES, self.checkpointing)

    def unscaled(self, cls: Tensor, z: Tensor) -> Tensor:
        """What published disentanglers read: CLS features not scaled to unit length, or `z` of the adapter."""
        return cls.to(z.dtype) if self.paths.adapter is None else z

    def path_losses(self, batch: Batch, t: Prototypes) -> tuple[Tensor, FactorPosteriors, dict[str, Tensor]]:
        """Adapted features [B, d], factors with log posteriors, and weighted losses by name."""
        z = self.paths.adapt(batch.cls)
        losses, factors = self.paths.losses(z, batch.compositions, t, LOSSES)
        assert factors is not None
        weight = self.options.primitives
        return z, factors, {**losses, "state": weight * losses["state"], "object": weight * losses["object"]}

    def path_logits(self, z: Tensor, t: Prototypes, candidates: CompositionIndex) -> Sequence[Tensor]:
        """Logits of candidates [B, C], states [B, M] and objects [B, N] for features `z`."""
        assert self.paths.factors is not None
        return [self.paths.logits(f, rows) for f, rows in zip((z, *self.paths.factors(z)), t, strict=True)]

    def image_logits(self, cls: Tensor, t: Prototypes, candidates: CompositionIndex) -> Sequence[Tensor]:
        """Logits as of `path_logits`, for CLS features."""
        return self.path_logits(self.paths.adapt(cls), t, candidates)

    def primitive_score(self, p_s: Tensor, p_o: Tensor, t: Prototypes, candidates: CompositionIndex) -> Tensor:
        """The part of the score [B, C] by the probabilities of each candidate's words."""
        return p_s * p_o if self.options.joined == "product" else p_s + p_o

    def joined_score(self, logits: Sequence[Tensor], t: Prototypes, candidates: CompositionIndex) -> Tensor:
        """The score [B, C], from the logits of pairs, states and objects."""
        c, s, o = logits
        p_s, p_o = s.softmax(-1)[:, candidates.states], o.softmax(-1)[:, candidates.objects]
        return self.scored(c) + self.primitive_score(p_s, p_o, t, candidates)

    def prepare(self, candidates: CompositionIndex) -> Prototypes:
        return self.paths.encode(candidates.compositions_np, LOSSES)

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Prototypes) -> Tensor:
        logits = self.image_logits(inputs["cls"], prepared, candidates)
        return self.joined_score(logits, prepared, candidates)

    def inspectable(self) -> Inspectable:
        return inspect_paths(self.paths)


class CrossAttention(nn.Module):
    """Multi-head attention: queries from `x` (`dim` channels), keys, values from `y` (`inside`)."""

    def __init__(self, dim: int, inside: int, heads: int, *, zero_output: bool, bias: bool = True) -> None:
        super().__init__()
        if dim % heads:
            raise UsageError(f"heads is {heads}; expected a divisor of {dim}, the width of the features")
        self.heads = heads
        self.query = nn.Linear(dim, dim, bias=bias)
        self.key = nn.Linear(inside, dim, bias=bias)
        self.value = nn.Linear(inside, dim, bias=bias)
        self.out = nn.Linear(dim, dim)
        if zero_output:
            zero_initialised(self.out)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of Q queries [(B,) Q, d], and mean attention weights [(B,) Q, T]."""
        q = self._split_heads(self.query(x))  # [(B,) h, Q, d_h]
        k = self._split_heads(self.key(y))  # [(B,) h, T, d_h]
        v = self._split_heads(self.value(y))
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        mixed = (weights @ v).transpose(-2, -3)  # [(B,) Q, h, d_h]
        return self.out(mixed.flatten(-2)), weights.mean(-3)

    def _split_heads(self, rows: Tensor) -> Tensor:
        return torch.transpose(rows.unflatten(-1, (self.heads, -1)), -2, -3)


def start_like_torch(attention: CrossAttention) -> None:
    """Draw queries, keys and values like `torch.nn.MultiheadAttention`, whose biases start at zero."""
    dim = attention.out.out_features
    bound = math.sqrt(6 / (4 * dim))  # Xavier's, of one matrix for all three
    for layer in (attention.query, attention.key, attention.value):
        nn.init.uniform_(layer.weight, -bound, bound)
        nn.init.zeros_(layer.bias)
    nn.init.zeros_(attention.out.bias)


class CrossBlock(nn.Module):
    """Residual block: `x` attends to `y`, then an MLP; returns output and attention weights.

    It starts as the identity; the blocks of the code of DFSP and VP-CMJL (`form: published`) start at
    random and have QuickGELU, with dropout of the given `rate` after it.
    """

    def __init__(self, dim: int, inside: int, heads: int, form: Form = "plain", rate: float = 0.0) -> None:
        super().__init__()
        self.norm_x = nn.LayerNorm(dim)
        self.norm_y = nn.LayerNorm(inside)
        self.attend = CrossAttention(dim, inside, heads, zero_output=form == "plain")
        last = nn.Linear(4 * dim, dim)
        activation: nn.Module = nn.GELU()
        if form == "plain":
            zero_initialised(last)
        else:
            start_like_torch(self.attend)
            activation = nn.Sequential(QuickGelu(), nn.Dropout(rate))
        self.forward_part = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), activation, last)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        read, weights = self.attend(self.norm_x(x), self.norm_y(y))
        g = x + read
        return g + self.forward_part(g), weights


class ImageTokens(nn.Module):
    """CLS feature and patch tokens of an image, in the space of CLS features [B, 1 + T, d].

    Patch tokens pass the encoder's own projection. If it has none and the widths differ, a linear map
    is trained instead.
    """

    def __init__(self, context: MethodContext) -> None:
        super().__init__()
        width = context.inputs["patch"][1]
        self.project: nn.Module = nn.Identity()
        own = getattr(context.text, "image_projection", None)  # [w, d]
        if own is not None and tuple(own.shape) == (width, context.dim):
            self.project = nn.Linear(width, context.dim, bias=False)
            self.project.weight = nn.Parameter(own.T.detach().to(torch.float32, copy=True), requires_grad=False)
        elif width != context.dim:
            self.project = nn.Linear(width, context.dim, bias=False)

    def forward(self, cls: Tensor, patch: Tensor) -> Tensor:
        return torch.cat([cls[:, None], self.project(patch)], dim=1)


def score_in_chunks(score: Callable[[Tensor, Tensor], Tensor], z: Tensor, tokens: Tensor, width: int) -> Tensor:
    """Join `score(z, tokens)` [B, C] of chunks of images; `width`: numbers in memory per image."""
    step = max(1, CHUNK // max(width, 1))
    return torch.cat([score(a, b) for a, b in zip(z.split(step), tokens.split(step), strict=True)])


def next_partner_in_batch(allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Index [B] of the next image (after the last: the first) that may be each image's partner.

    Images without a partner get their own index; returned mask [B]: those that have one.
    `allowed` [B, B]: whether the column's image may be the partner of the row's.
    """
    count = len(allowed)
    place = torch.arange(count, device=allowed.device)
    after = (place[None] - place[:, None]) % count  # 0 is the image itself
    free = allowed & (after > 0)
    has_partner = free.any(1)
    return torch.where(has_partner, after.masked_fill(~free, count).argmin(1), place), has_partner
