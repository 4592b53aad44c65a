"""Several frozen encoders as one, named `joined:A + B`; weights follow a name, as in `A @ WEIGHTS`.

    z = (unit(z_A), unit(z_B))       image feature, side by side
    t = (t_A, 0)                     text feature, of the first encoder that has a text tower
    cos(z, t) = cos(z_A, t_A) / sqrt(K),   tau = tau_A / sqrt(K)

K is the number of encoders, so prompts give the same probabilities as with A alone. Methods that
read joined features scale each part by its own deviation (`methods.layers.part_scales`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize, pad

from duplex.encoders import base
from duplex.encoders.base import (
    SEPARATOR,
    Encoder,
    EncoderFamily,
    EncoderIdentity,
    EncoderSource,
    MissingWeights,
    TextTower,
    joined_name,
    joined_parts,
)
from duplex.encoders.prompt_tree import Prompts, PromptTree
from duplex.errors import DuplexError, UsageError


class JoinedFamily(EncoderFamily):
    """Encoders that are joined by name; each of them may be of any family."""

    def find(self, name: str, weights: str | None) -> EncoderSource:
        base.refuse_other_weights(name, weights)
        parts = joined_parts(name)
        if len(parts) < 2 or len(set(parts)) < len(parts):
            raise UsageError(f"encoder {name!r} is no list of different encoders; expected 'joined:NAME + NAME'")
        sources = tuple(base.find_source(*part)[1] for part in parts)
        return JoinedSource(
            name=joined_name([(source.name, None) for source in sources]),
            architecture={"embed_dim": sum(source.dim for source in sources)},
            preprocess={},
            weights=sources[0].weights,
            seed=sources[0].seed,
            parts=sources,
        )

    def load(self, source: EncoderSource, *, towers: str, device: str, precision: str) -> JoinedEncoder:
        assert isinstance(source, JoinedSource)
        families = [base.find_family(part.name) for part in source.parts]
        text_place = next((place for place, family in enumerate(families) if family.has_text), None)
        parts: list[Encoder | None] = []
        for place, (family, part) in enumerate(zip(families, source.parts, strict=True)):
            wanted = towers if place == text_place or towers == "text" else "image"
            needed = towers != "text" or place == text_place
            loaded = family.load(part, towers=wanted, device=device, precision=precision) if needed else None
            parts.append(loaded)
        return JoinedEncoder(source, parts, text_place, towers, device, precision)

    def missing_weights(self, name: str, weights: str | None) -> MissingWeights | None:
        missing = (base.missing_weights(*part) for part in joined_parts(name))
        return next((each for each in missing if each is not None), None)


@dataclass(frozen=True)
class JoinedSource(EncoderSource):
    """How to build joined encoders: the sources of all."""

    parts: tuple[EncoderSource, ...] = ()

    def resized(self, resize: str | None) -> JoinedSource:
        return replace(self, parts=tuple(part.resized(resize) for part in self.parts))

    def identity(self, precision: str) -> EncoderIdentity:
        own = [part.identity(precision) for part in self.parts]
        return replace(
            own[0],
            encoder=self.name,
            architecture=SEPARATOR.join(each.architecture for each in own),
            weights=SEPARATOR.join(each.weights for each in own),
            preprocessing=f"[{', '.join(each.preprocessing for each in own)}]",
            dim=self.dim,
            code=self.code,
            parts=SEPARATOR.join(str(each.dim) for each in own),
        )


class JoinedEncoder:
    """Several encoders behind the interface of one; the pixels of an image are flat, those of one after the other."""

    def __init__(
        self,
        source: JoinedSource,
        parts: Sequence[Encoder | None],
        text_place: int | None,
        towers: str,
        device: str,
        precision: str,
    ) -> None:
        """`parts`: the encoders, None where a text tower is all that is wanted of another one."""
        self.name = source.name
        self.dim = source.dim
        self.device = torch.device(device)
        self.identity = source.identity(precision)
        self.parts = [part for part in parts if part is not None]
        self.text: JoinedTextTower | None = None
        self.logit_scale = 0.0
        if towers != "image" and text_place is not None:
            owner = parts[text_place]
            before = sum(part.dim for part in source.parts[:text_place])
            if owner is not None and owner.text is not None:
                self.text = JoinedTextTower(owner.text, before, self.dim, len(parts))
                self.logit_scale = self.text.logit_scale
        blank = Image.new("RGB", (8, 8))
        self._shapes = [tuple(part.image_transform(blank).shape) for part in self.parts]

    def image_transform(self, image: Image.Image) -> Tensor:
        """The pixels of an RGB image for all encoders, one after the other: [P] uint8."""
        return torch.cat([part.image_transform(image).flatten() for part in self.parts])

    @torch.inference_mode()
    def encode_images(self, pixels: Tensor) -> Tensor:
        """Encode pixels [B, P] to unit features side by side [B, d]; each is rounded as caches round it."""
        sizes = [math.prod(shape) for shape in self._shapes]
        features = []
        for part, own, shape in zip(self.parts, pixels.split(sizes, dim=1), self._shapes, strict=True):
            z = part.encode_images(own.reshape(-1, *shape))
            features.append(z.half().float())
        return join_features(features)

    def encode_patches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        raise self._no_patches()

    @property
    def patch_shape(self) -> tuple[int, int]:
        raise self._no_patches()

    def _no_patches(self) -> DuplexError:
        return DuplexError(f"encoder {self.name!r} has no patch tokens; set extraction.tokens to none")


def join_features(parts: Sequence[Tensor]) -> Tensor:
    """Features of several encoders side by side [B, d], each of unit length."""
    return torch.cat([normalize(part, dim=-1) for part in parts], dim=1)


class JoinedTextTower:
    """The text tower of one of several encoders; its features are 0 in the columns of the others."""

    def __init__(self, tower: TextTower, before: int, dim: int, parts: int) -> None:
        """`before`: number of columns before those of the tower's encoder, of `dim`."""
        self._tower = tower
        self._around = (before, dim - before - tower.dim)
        self.dim = dim
        self.width = tower.width
        self.context_length = tower.context_length
        self.logit_scale = tower.logit_scale + math.log(parts) / 2
        self.start = tower.start
        self.end = tower.end

    def tokens(self, text: str) -> list[int]:
        return self._tower.tokens(text)

    def embedding(self, ids: Sequence[int] | Tensor) -> Tensor:
        return self._tower.embedding(ids)

    def encode(self, tree: PromptTree, lexicon: Tensor, *, checkpoint: bool = False) -> Tensor:
        return pad(self._tower.encode(tree, lexicon, checkpoint=checkpoint), self._around)

    def encode_plain(self, sequences: Prompts, lexicon: Tensor, *, checkpoint: bool = False) -> Tensor:
        return pad(self._tower.encode_plain(sequences, lexicon, checkpoint=checkpoint), self._around)

    def encode_blocks(self, sequences: Prompts, lexicon: Tensor, *options: Any) -> Tensor:
        return pad(self._tower.encode_blocks(sequences, lexicon, *options), self._around)
