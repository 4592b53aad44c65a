"""Prompts, trained modules on image features, and the posteriors that both give (the Duplex paper's Eq. 1-9, 11, 21).

Three paths: the (adapted) feature `z^c` of an image and its factors `z^s` and `z^o`, the parts for state and object,
are compared with text features of their prompts (semantic prototypes). The posteriors give the losses `L_c^t`, `L_s`,
`L_o` and the score's summands `p(c^t|x)` and `p(s|x) p(o|x)`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, nll_loss, normalize, relu

from duplex.encoders.base import TextTower
from duplex.encoders.prompt_tree import PromptTree
from duplex.labels import Ints, LabelSpace, World, prompt_name
from duplex.options import Count, Options, Rate, Template


def zero_initialised(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Bottleneck(nn.Module):
    """`Up(dropout(relu(Down(y))))`, zero before training, of features [B, d], tokens [B, T, w] or maps [B, w, H, W]."""

    def __init__(self, channels: int, width: int, rate: float) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(channels, width), zero_initialised(nn.Linear(width, channels))
        self.rate = rate

    def forward(self, y: Tensor) -> Tensor:
        cells = y.movedim(1, -1) if y.ndim == 4 else y
        update: Tensor = self.up(dropout(relu(self.down(cells)), self.rate, self.training))
        return update.movedim(-1, 1) if y.ndim == 4 else update


class Adapter(Bottleneck):
    """`z + scale * Up(dropout(relu(Down(z))))`, at first z."""

    def __init__(self, dim: int, width: int, rate: float, scale: float) -> None:
        super().__init__(dim, width, rate)
        self.scale = scale

    def forward(self, z: Tensor) -> Tensor:  # [B, d] -> [B, d]
        return z + self.scale * super().forward(z)


class Mlp(nn.Sequential):
    """`layers` times (linear, layer norm, relu, dropout), then a linear map; features do not depend on the batch."""

    def __init__(self, inside: int, width: int, out: int, layers: int, dropout: float) -> None:
        sizes = [inside, *[width] * layers]
        parts: list[nn.Module] = []
        for a, b in pairwise(sizes):
            parts += [nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU(), nn.Dropout(dropout)]
        super().__init__(*parts, nn.Linear(sizes[-1], out))


class Disentangler(nn.Module):
    """Two-layer MLP that extracts a feature's state or object part; `residual` adds the feature."""

    def __init__(self, dim: int, width: int, residual: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(dim, width), nn.Linear(width, dim)
        self.residual = residual

    def forward(self, z: Tensor) -> Tensor:  # [B, d] -> [B, d]
        out = self.second(relu(self.first(z)))
        return normalize(z + out if self.residual else out, dim=-1)


class Fusion(nn.Module):
    """`phi(z^s, z^o) = normalise(relu(M_s z^s + M_o z^o))` (Eq. 11), without the relu unless `rectified`.

    rank: of `M_s` and of `M_o`, each then a product of two matrices; None: full matrices.
    """

    def __init__(self, dim: int, *, rectified: bool = True, rank: int | None = None) -> None:
        super().__init__()
        self.rectified = rectified
        self.state, self.object = _matrix(dim, rank), _matrix(dim, rank)

    def project(self, z_s: Tensor, z_o: Tensor) -> tuple[Tensor, Tensor]:
        """Projections of factors [B, d], each image's once; fusion adds and normalises them."""
        return self.state(z_s), self.object(z_o)

    def forward(self, z_s: Tensor, z_o: Tensor) -> Tensor:
        state, object = self.project(z_s, z_o)
        joined = state + object
        return normalize(relu(joined) if self.rectified else joined, dim=-1)


def _matrix(dim: int, rank: int | None) -> nn.Module:
    if rank is None:
        return nn.Linear(dim, dim, bias=False)
    return nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False))


class Factors(nn.Module):
    """Split features [B, d] into state and object factors [B, d] of unit length."""

    def __init__(self, dim: int, width: int, residual: bool) -> None:
        super().__init__()
        self.state, self.object = Disentangler(dim, width, residual), Disentangler(dim, width, residual)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.state(z), self.object(z)


def unit(z: Tensor) -> Tensor:
    """`z` with rows of unit length; half precision becomes float32."""
    return normalize(z.to(torch.float32) if z.dtype in (torch.float16, torch.bfloat16) else z, dim=-1)


Source = Literal["learned", "fixed"]
PathsOption = Literal["composition", "three"]
TEMPLATE = "a photo of"


class Prototypes(NamedTuple):
    """Semantic prototypes (text features or embedded words) of listed compositions, all states and all objects."""

    compositions: Tensor  # t^c [C, d]
    states: Tensor  # t^s [M, d]; empty without the state path
    objects: Tensor  # t^o [N, d]; empty without the object path


class Prompts(nn.Module):
    """Text prompts, and their encoding by the frozen text tower.

    A prompt is K context vectors and names, `P^c = [v^c_1..v^c_K, s_m, o_n]`, `P^s = [v^s.., s_m]`,
    `P^o = [v^o.., o_n]`, as rows of one lexicon `[V, width]`.

    context: "learned" trains context vectors of each path, initialised with the template; "fixed" uses the template.
    vocabulary: "learned" trains one vector per name, at first its tokens' mean, for all paths; "fixed" uses its tokens.
    paths: "composition" (prompts of compositions only) or "three" (prompts of states and of objects as well).
    """

    frozen_rows: Tensor
    tower: TextTower

    def __init__(
        self,
        labels: LabelSpace,
        tower: TextTower,
        *,
        context: Source = "fixed",
        vocabulary: Source = "fixed",
        paths: PathsOption = "three",
        template: str = TEMPLATE,
    ) -> None:
        super().__init__()
        self.labels = labels
        self.paths = ("composition", "state", "object") if paths == "three" else ("composition",)
        self.vocabulary = vocabulary
        self.__dict__["tower"] = tower  # no attribute of a module, so that the frozen tower is not part of the state
        words = tower.embedding(torch.tensor(tower.tokens(template)))  # [K, width]
        names = [tower.tokens(prompt_name(name)) for name in (*labels.states, *labels.objects)]

        ends = tower.embedding(torch.tensor([tower.start, tower.end]))  # [2, width]
        frozen, learned = [ends], list[Tensor]()
        if context == "fixed":
            frozen.append(words)
        else:
            learned.append(words.repeat(len(self.paths), 1))
        if vocabulary == "fixed":
            lengths = list(map(len, names))
            frozen.append(torch.cat([tower.embedding(torch.tensor(ids)) for ids in names]))
        else:
            lengths = [1] * len(names)
            learned.append(torch.stack([tower.embedding(torch.tensor(ids)).mean(0) for ids in names]))
        self.register_buffer("frozen_rows", torch.cat(frozen), persistent=False)
        self.learned_rows = nn.Parameter(torch.cat(learned)) if learned else None

        # frozen rows (ends, context, names) come before learned ones (contexts, names); paths share a fixed context
        first = 2 if context == "fixed" else len(self.frozen_rows)
        starts = [first + (0 if context == "fixed" else i * len(words)) for i in range(len(self.paths))]
        self.context_rows = {
            path: list(range(start, start + len(words))) for path, start in zip(self.paths, starts, strict=True)
        }
        first_name = 2 if vocabulary == "fixed" else len(self.frozen_rows)
        if context == vocabulary:
            first_name = starts[-1] + len(words)
        offsets, tokens = first_name + np.cumsum([0, *lengths[:-1]]), np.arange(max(lengths))
        # [M + N, longest]
        self.name_rows = np.where(tokens < np.array(lengths)[:, None], offsets[:, None] + tokens, -1)
        self._tree: tuple[tuple[object, ...], PromptTree] | None = None
        self._encoded: Tensor | None = None  # features of the tree's prompts, if none of them is learned

    def lexicon(self) -> Tensor:
        if self.learned_rows is None:
            return self.frozen_rows
        return torch.cat([self.frozen_rows, self.learned_rows])

    def sequences(self, path: str, names: Sequence[Ints]) -> Ints:
        """Rows of the lexicon of P prompts `[P, L]`, padded with -1: start, context, names, end.

        names: one array [P] per name in a prompt, of indices into the list of all states followed by all objects.
        """
        count = len(names[0])
        head = np.tile(np.array([0, *self.context_rows[path]], dtype=np.int64), (count, 1))
        body = np.concatenate([head, *(self.name_rows[column] for column in names)], axis=1)
        body = np.concatenate([body, np.ones((count, 1), dtype=np.int64)], axis=1)  # row 1 is the end token
        return np.take_along_axis(body, np.argsort(body < 0, axis=1, kind="stable"), axis=1)  # padding comes last

    def all_sequences(self, compositions: Ints) -> Ints:
        m, n = self.labels.state_of(compositions), self.labels.object_of(compositions)
        states = len(self.labels.states)
        blocks = [self.sequences("composition", [m, n + states])]
        if "state" in self.paths:
            blocks.append(self.sequences("state", [np.arange(states)]))
            blocks.append(self.sequences("object", [np.arange(states, len(self.name_rows))]))
        longest = max(block.shape[1] for block in blocks)
        return np.concatenate([np.pad(b, ((0, 0), (0, longest - b.shape[1])), constant_values=-1) for b in blocks])

    def forward(self, compositions: Ints, checkpointing: bool = False) -> Prototypes:
        """Semantic prototypes with gradients; features of fixed prompts are cached."""
        if not len(compositions) and "state" not in self.paths:
            return self._split(self.frozen_rows.new_empty(0, self.tower.dim), 0)
        key = (compositions.tobytes(), self.frozen_rows.device, self.frozen_rows.dtype)
        if self._tree is None or self._tree[0] != key:
            self._tree = (key, PromptTree.of(self.all_sequences(compositions)))
            self._encoded = None
        if self._encoded is not None:
            return self._split(self._encoded, len(compositions))
        encoded = unit(self.tower.encode(self._tree[1], self.lexicon(), checkpoint=checkpointing))
        if self.learned_rows is None:
            self._encoded = encoded
        return self._split(encoded, len(compositions))

    @torch.no_grad()
    def encode(self, compositions: Ints) -> Prototypes:
        """Semantic prototypes without gradients, in batches."""
        if not len(compositions) and "state" not in self.paths:
            return self._split(self.frozen_rows.new_empty(0, self.tower.dim), 0)
        encoded = self.tower.encode_blocks(self.all_sequences(compositions), self.lexicon())
        return self._split(unit(encoded), len(compositions))

    def _split(self, encoded: Tensor, count: int) -> Prototypes:
        states = count + len(self.labels.states)
        return Prototypes(encoded[:count], encoded[count:states], encoded[states:])


def word_vectors(labels: LabelSpace, tower: TextTower) -> tuple[Tensor, Tensor]:
    """A text tower's features of "a photo of <state>" [M, d] and "a photo of <object>" [N, d]."""
    _, states, objects = Prompts(labels, tower).encode(np.empty(0, dtype=np.int64))
    return states, objects


@dataclass(frozen=True)
class PathOptions(Options):
    """Options of prompts, feature adapter, and disentanglers."""

    # prompts (Eq. 1-2, 6-7)
    context: Literal["learned", "fixed"] = "learned"  # vectors before the names in a prompt
    vocabulary: Literal["learned", "fixed"] = "learned"  # vectors of the names of states and objects
    paths: Literal["composition", "three"] = "three"  # prompts of compositions alone, or of states and objects as well
    template: Template = TEMPLATE  # the K context tokens, or their initial values

    # visual factors (Eq. 3-5, 8-9)
    adapter: Literal["none", "feature"] = "feature"  # feature: a residual bottleneck after the cached feature
    adapter_width: Count = 64  # hidden units of the bottleneck
    adapter_dropout: Rate = 0.1
    adapter_scale: float = 0.1  # factor of the bottleneck's output
    disentangler: Literal["plain", "residual"] = "plain"  # residual: a disentangler adds its input to its output
    width: Count = 768  # hidden units of each disentangler

    # the classes of the semantic loss L_c^t: the training compositions, or all candidates
    semantic_negatives: Literal["seen", "target"] = "seen"

    def path_rules(self, losses: Sequence[str], inference: Sequence[str]) -> Iterable[tuple[object, str]]:
        """Yield the rules (`Options.rules`) by which these options fit the terms of loss and score."""
        three = self.paths == "three"
        yield three or not {"state", "object"} & set(losses), "the losses state and object need paths: three"
        yield three or "factors" not in inference, "factors in inference needs paths: three"
        yield inference, "inference needs at least one term"
        for key, names in (("losses", losses), ("inference", inference)):
            yield len(set(names)) == len(names), f"{key} names a term twice"
        message = f"losses {list(losses)} have no trained parameter with these options; set losses to []"
        yield not losses or self.trained_losses() & set(losses), message

    def trained_losses(self) -> set[str]:
        learned = self.context == "learned" or self.vocabulary == "learned"
        names = {"state", "object"} if self.paths == "three" else set[str]()
        return names | ({"semantic"} if learned or self.adapted else set())

    @property
    def adapted(self) -> bool:
        return self.adapter == "feature"


class FactorPosteriors(NamedTuple):
    z_s: Tensor  # [B, d]
    z_o: Tensor  # [B, d]
    log_s: Tensor  # log p(s|x) [B, M]
    log_o: Tensor  # log p(o|x) [B, N]


class Paths(nn.Module):
    """Prompts, feature adapter and disentanglers that give posteriors over compositions, states and objects."""

    negatives: Tensor

    def __init__(
        self, labels: LabelSpace, tower: TextTower, options: PathOptions, world: World, negatives: Ints | None = None
    ) -> None:
        """Negatives are the classes of the semantic loss, by default what `semantic_negatives` says."""
        super().__init__()
        self.scale = math.exp(tower.logit_scale)  # 1 / tau
        self.objects = len(labels.objects)
        self.prompts = Prompts(
            labels,
            tower,
            context=options.context,
            vocabulary=options.vocabulary,
            paths=options.paths,
            template=options.template,
        )
        self.adapter: Adapter | None = None
        if options.adapted:
            rate, scale = options.adapter_dropout, options.adapter_scale
            self.adapter = Adapter(tower.dim, options.adapter_width, rate, scale)
        self.factors: Factors | None = None
        if options.paths == "three":
            self.factors = Factors(tower.dim, options.width, residual=options.disentangler == "residual")
        if negatives is None:
            seen = options.semantic_negatives == "seen"
            negatives = labels.pairs["train"] if seen else labels.candidates(world, "train")
        self._negatives = negatives
        self.register_buffer("negatives", torch.as_tensor(self._negatives), persistent=False)

    def adapt(self, z: Tensor) -> Tensor:
        """Composition features `z^c` [B, d] of unit length."""
        z = unit(z)
        return unit(self.adapter(z)) if self.adapter is not None else z

    def prototypes(self, losses: Collection[str], checkpointing: bool) -> Prototypes:
        """Semantic prototypes that the named losses need, with gradients."""
        encoded = self._negatives if "semantic" in losses else self._negatives[:0]
        prototypes: Prototypes = self.prompts(encoded, checkpointing)
        return prototypes

    def logits(self, z: Tensor, prototypes: Tensor) -> Tensor:
        return self.scale * (z @ prototypes.T)

    def factor_posteriors(self, z: Tensor, t: Prototypes) -> FactorPosteriors:
        assert self.factors is not None
        z_s, z_o = self.factors(z)
        log_s = self.logits(z_s, t.states).log_softmax(-1)
        log_o = self.logits(z_o, t.objects).log_softmax(-1)
        return FactorPosteriors(z_s, z_o, log_s, log_o)

    def losses(
        self, z: Tensor, compositions: Tensor, t: Prototypes, names: Collection[str], with_factors: bool = False
    ) -> tuple[dict[str, Tensor], FactorPosteriors | None]:
        """The losses in `names` (`semantic`, `state`, `object`), and the factors if needed or `with_factors`."""
        losses: dict[str, Tensor] = {}
        if "semantic" in names:
            positions = torch.searchsorted(self.negatives, compositions)
            losses["semantic"] = cross_entropy(self.logits(z, t.compositions), positions)
        if self.factors is None or not (with_factors or {"state", "object"} & set(names)):
            return losses, None
        factors = self.factor_posteriors(z, t)
        if "state" in names:
            losses["state"] = nll_loss(factors.log_s, compositions // self.objects)
        if "object" in names:
            losses["object"] = nll_loss(factors.log_o, compositions % self.objects)
        return losses, factors

    def score_terms(
        self, z: Tensor, t: Prototypes, states: Tensor, objects: Tensor, names: Collection[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield `semantic`, p(c^t|x), and `factors`, p(s|x) p(o|x), if in `names` [B, C]; `states`, `objects` [C]."""
        if "semantic" in names:
            yield "semantic", self.logits(z, t.compositions).softmax(-1)
        if "factors" in names and self.factors is not None:
            p_s, p_o = self.primitive_posteriors(z, t)
            yield "factors", p_s[:, states] * p_o[:, objects]

    def primitive_posteriors(self, z: Tensor, t: Prototypes) -> tuple[Tensor, Tensor]:
        """p(s|x) [B, M] and p(o|x) [B, N] of composition features `z` [B, d]."""
        assert self.factors is not None
        z_s, z_o = self.factors(z)
        return self.logits(z_s, t.states).softmax(-1), self.logits(z_o, t.objects).softmax(-1)

    def encode(self, candidates: Ints, names: Collection[str]) -> Prototypes:
        """Text features that the score's summands `names` need, without gradients."""
        return self.prompts.encode(candidates if "semantic" in names else candidates[:0])

    @torch.no_grad()
    def semantic(self, compositions: Ints) -> Tensor:
        return self.prompts.encode(np.asarray(compositions)).compositions


class CompositionIndex(nn.Module):
    """A sorted list of compositions on a device, with their states and objects."""

    compositions: Tensor
    states: Tensor
    objects: Tensor

    def __init__(self, compositions: Ints, n_objects: int) -> None:
        super().__init__()
        self.compositions_np = compositions  # on the host
        rows = torch.as_tensor(compositions)
        for name, value in (("compositions", rows), ("states", rows // n_objects), ("objects", rows % n_objects)):
            self.register_buffer(name, value, persistent=False)

    def positions(self, compositions: Tensor) -> Tensor:
        """Positions of `compositions` in the list; undefined for those not in it."""
        return torch.searchsorted(self.compositions, compositions)

    def means(self, rows: Tensor, states: int, objects: int) -> tuple[Tensor, Tensor]:
        """Means of `rows` [C, ...] by state [M, ...] and object [N, ...]; zero where there are none."""
        return mean_over(rows, self.states, states), mean_over(rows, self.objects, objects)


def mean_over(rows: Tensor, group: Tensor, count: int) -> Tensor:
    """Mean of the `rows` of each group [count, ...]; zero for an empty group."""
    sums = rows.new_zeros(count, *rows.shape[1:]).index_add(0, group, rows)
    sizes = rows.new_zeros(count).index_add(0, group, rows.new_ones(len(rows))).clamp(min=1)
    return sums / sizes.view(-1, *[1] * (rows.ndim - 1))


def copy_to_device(device: torch.device, *arrays: Ints) -> tuple[Tensor, ...]:
    """Index arrays as tensors on a device, by one asynchronous copy."""
    if device.type == "cpu":
        return tuple(torch.as_tensor(array) for array in arrays)
    whole = torch.from_numpy(np.concatenate(arrays))
    if torch.cuda.is_available():
        whole = whole.pin_memory()
    copied = whole.to(device, non_blocking=True)
    return tuple(torch.split(copied, [len(array) for array in arrays]))
