"""ADE: attention separates state from object; training compares images that share one of the two.

Hao et al., "Learning Attention as Disentangler for Compositional Zero-Shot Learning", CVPR 2023.

    v_c = A_c(x, x),  v_s = A_s(x, x),  v_o = A_o(x, x)              to recognise an image
    S   = cos_c + a cos_s cos_o                                                               its score
    L   = CE(v_c) + CE(A_s(x, y_s)) + CE(A_s(y_s, x)) + CE(A_o(x, y_o)) + CE(A_o(y_o, x)) + w L_reg
    L_reg = D_s(x, y_s) + D_o(x, y_o) - D_s(x, y_o) - D_o(x, y_s)

* A_c, A_s, A_o: attention for compositions, states, objects; A(x, y): from the CLS feature of x to
  patch tokens of y
* y_s, y_o: partners of x in the batch: y_s shares its state but not its object, y_o its object but
  not its state
* CE, cos: cross-entropies (at a temperature) and cosines of features with embedded words
* D(x, y): distance between the attention maps of x over y and of y over x

The paper's D is an earth mover's distance over attention between all tokens; here it compares the
sorted attention maps of the two CLS features. The paper's attention has heads, residuals and a
feed-forward part; here it has none of these. With `form: published`, these parts follow the code:

    v = P(norm(g + F(norm(g)))),   g = x + A(norm(x), norm(y)),   x: CLS;   y: CLS and patch tokens

* A: attention with heads of width 64, without bias of queries, keys and values;  F: feed-forward part
* P: perceptron with one hidden layer, for compositions, states and objects
* CE, cos: with word vectors themselves for states and objects; over all of the splits' compositions,
  in the open world over all

Then, D and the choice of partners still differ: the code draws these from all training images.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from duplex.methods.base import Batch, Inputs, MethodContext
from duplex.methods.families import (
    Composer,
    CrossAttention,
    Form,
    ImageTokens,
    WordMethod,
    WordOptions,
    next_partner_in_batch,
    score_in_chunks,
)
from duplex.methods.layers import CompositionIndex, Mlp, unit
from duplex.methods.prompts import Prototypes
from duplex.options import Count, NonNegative, Positive, refuse

DROPOUT = 0.5  # of the published code's perceptrons
HEAD_WIDTH = 64  # of its attention
OBJECT_HIDDEN = 1024  # hidden units of the one for objects; the others have a feature's width


@dataclass(frozen=True)
class AdeOptions(WordOptions):
    width: Count = 300  # size e of concept features and embedded words
    scale: Positive = 50.0  # 1 / T of cosines
    regulariser: NonNegative = 1.0  # weight w of L_reg
    product: NonNegative = 1.0  # weight a of cos_s cos_o in the score
    train_words: bool = False  # whether word vectors are trained, as in the published code
    form: Form = "plain"  # published: attention, perceptrons and candidates of the published code

    def rules(self) -> Iterable[tuple[object, str]]:
        is_set = self.form == "published" and self.width != type(self).width
        yield refuse(is_set, "form: published has the width of the words; leave width out")


class ConceptAttention(nn.Module):
    """Attention of a CLS feature to patch tokens: unit vectors [B, e], attention weights [B, T].

    With tokens y_t and q, a linear map of the CLS feature: weights `a = softmax_t (K y_t + b_k) .
    q / sqrt(e)` and the vector `v = sum_t a_t (V y_t + b_v)`, scaled to unit length; K and V are
    trained. To save products with tokens, `v` is computed as `V (sum_t a_t y_t) + b_v`, as weights
    sum to 1, and `(K y_t + b_k) . q` as `y_t . K^T q + b_k . q`.
    """

    def __init__(self, dim: int, token_width: int, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, width)
        self.key = nn.Linear(token_width, width)
        self.value = nn.Linear(token_width, width)

    def weights(self, z: Tensor, tokens: Tensor) -> Tensor:
        q = self.query(z)  # [B, e]
        scores = (tokens @ (q @ self.key.weight)[:, :, None])[..., 0] + (q @ self.key.bias)[:, None]
        return torch.softmax(scores / math.sqrt(self.query.out_features), -1)

    def forward(self, z: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.weights(z, tokens)
        return unit(self.value((weights[:, None] @ tokens)[:, 0])), weights


class PublishedAttention(nn.Module):
    """The published code's attention block and perceptron: unit vectors [B, e], attention weights [B, T]."""

    def __init__(self, dim: int, hidden: int, out: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)  # of x and of y
        self.attend = CrossAttention(dim, dim, heads, zero_output=False, bias=False)
        widen = nn.Linear(dim, 4 * dim)
        self.forward_part = nn.Sequential(nn.LayerNorm(dim), widen, nn.GELU(), nn.Linear(4 * dim, dim))
        self.last_norm = nn.LayerNorm(dim)
        self.perceptron = Mlp(dim, hidden, out, 1, DROPOUT)

    def weights(self, x: Tensor, y: Tensor) -> Tensor:
        weights = self.attend(self.norm(x[:, :1]), self.norm(y))[1]
        return torch.squeeze(weights[:, :, 1:], 1)  # of patch tokens

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Let the CLS feature of tokens `x` [B, 1 + T, d] attend to `y`."""
        read, weights = self.attend(self.norm(x[:, :1]), self.norm(y))
        g = (x[:, :1] + read)[:, 0]
        v = self.perceptron(self.last_norm(g + self.forward_part(g)))
        return unit(v), weights[:, 0, 1:]


class Ade(WordMethod[AdeOptions]):
    """ADE: composition, state and object features by attention to an image's patch tokens."""

    required_inputs = ("cls", "patch", "words")
    attend_c: nn.Module
    attend_s: nn.Module
    attend_o: nn.Module
    embed_s: nn.Module
    embed_o: nn.Module

    def __init__(self, context: MethodContext, options: AdeOptions) -> None:
        super().__init__(context, options, trained_words=options.train_words)
        width = options.width
        token_width = context.inputs["patch"][1]
        self.tokens: ImageTokens | None = None
        if options.form == "published":
            self._add_published_parts(context)
            return
        self.attend_c = ConceptAttention(context.dim, token_width, width)
        self.attend_s = ConceptAttention(context.dim, token_width, width)
        self.attend_o = ConceptAttention(context.dim, token_width, width)
        self.embed_s = nn.Linear(self.words.width, width)
        self.embed_o = nn.Linear(self.words.width, width)
        self.composer = Composer(self.words.width, width)

    def _add_published_parts(self, context: MethodContext) -> None:
        dim = context.dim
        width = self.words.width
        heads = max(1, dim // HEAD_WIDTH)
        self.tokens = ImageTokens(context)
        self.attend_c = PublishedAttention(dim, dim, width, heads)
        self.attend_s = PublishedAttention(dim, dim, width, heads)
        self.attend_o = PublishedAttention(dim, OBJECT_HIDDEN, width, heads)
        self.embed_s = nn.Identity()
        self.embed_o = nn.Identity()
        self.composer = Composer(width, width)
        candidates = context.labels.candidates(context.world, "train")
        self.train_candidates = CompositionIndex(candidates, len(context.labels.objects))

    def read(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """What attends, and what it attends to: CLS features and patch tokens, or all tokens twice."""
        patch = inputs["patch"].to(self.words.states.dtype)
        if self.tokens is None:
            return unit(inputs["cls"]), patch
        tokens = self.tokens(inputs["cls"].to(patch.dtype), patch)
        return tokens, tokens

    def prepare(self, candidates: CompositionIndex) -> Prototypes:
        states = unit(self.embed_s(self.words.states))
        objects = unit(self.embed_o(self.words.objects))
        return Prototypes(self.composer(self.words, candidates), states, objects)

    def shared(self) -> Prototypes:
        return self.prepare(self.train_candidates)

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        z, tokens = self.read(batch.inputs)
        m, n = self.primitives(batch.compositions)
        y_s = partners(m, n)
        y_o = partners(n, m)
        v_c, _ = self.attend_c(z, tokens)
        loss_s, near_s = self.cross_losses(self.attend_s, z, tokens, y_s, m, shared.states)
        loss_o, near_o = self.cross_losses(self.attend_o, z, tokens, y_o, n, shared.objects)
        far_s = self.map_distance(self.attend_s, z, tokens, y_o)
        far_o = self.map_distance(self.attend_o, z, tokens, y_s)
        target = self.train_candidates.positions_of_listed(batch.compositions)
        return {
            "composition": cross_entropy(self.options.scale * v_c @ shared.compositions.T, target),
            "state": loss_s,
            "object": loss_o,
            "regulariser": self.options.regulariser * (near_s + near_o - far_s - far_o),
        }

    def cross_losses(
        self, attend: nn.Module, z: Tensor, tokens: Tensor, partner: Tensor, target: Tensor, words: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropies of images and partners that attend to each other; attention distance.

        partner: index of each image's partner in the batch [B]; target: row in `words` of the
            state (or object) that both share [B].
        """
        v, to_partner = attend(z, tokens[partner])
        v_partner, to_image = attend(z[partner], tokens)
        scale = self.options.scale
        loss = cross_entropy(scale * v @ words.T, target) + cross_entropy(scale * v_partner @ words.T, target)
        return loss, distance(to_partner, to_image)

    @staticmethod
    def map_distance(attend: Any, z: Tensor, tokens: Tensor, partner: Tensor) -> Tensor:
        """Mean distance of the attention maps of image and partner, each over the other's tokens."""
        return distance(attend.weights(z, tokens[partner]), attend.weights(z[partner], tokens))

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Prototypes) -> Tensor:
        def chunk_scores(cls: Tensor, patch: Tensor) -> Tensor:
            z, tokens = self.read({"cls": cls, "patch": patch})
            c = self.attend_c(z, tokens)[0] @ prepared.compositions.T
            s = self.attend_s(z, tokens)[0] @ prepared.states.T
            o = self.attend_o(z, tokens)[0] @ prepared.objects.T
            return torch.add(c, self.options.product * s[:, candidates.states] * o[:, candidates.objects])

        patches, token_width = self.context.inputs["patch"]
        width = patches * (token_width if self.tokens is None else 4 * self.context.dim)
        return score_in_chunks(chunk_scores, inputs["cls"], inputs["patch"], width)


def partners(same: Tensor, other: Tensor) -> Tensor:
    """Index [B] of the next image with equal `same`, preferably another `other`; else its own."""
    equal = same[:, None] == same
    different, exists = next_partner_in_batch(equal & (other[:, None] != other))
    nearest, _ = next_partner_in_batch(equal)
    return torch.where(exists, different, nearest)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Mean absolute difference between attention maps `a` and `b` [B, T], whose weights are first sorted."""
    return (a.sort(1).values - b.sort(1).values).abs().mean()
