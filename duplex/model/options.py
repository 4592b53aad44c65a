"""A method is a row of options: CLIP, CoOp, CSP, three paths, Duplex and every ablation are rows of this table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from duplex.errors import UsageError

Loss = Literal["s", "o", "ct", "ch"]
Term = Literal["ch", "ct", "so"]
Message = Literal["state", "object", "counterfactual"]


class OptionError(UsageError, ValueError):
    """A row of options that cannot be. As a ValueError it reaches whoever parses a file with the row's place there."""


@dataclass(frozen=True)
class Options:
    """What the network is made of. The defaults are the paper's Duplex."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True}

    # prompts (Eq. 1-2, 6-7)
    context: Literal["learned", "fixed"] = "learned"
    vocabulary: Literal["learned", "fixed"] = "learned"
    paths: Literal["c", "cso"] = "cso"  # composition prompt alone, or composition, state and object prompts
    template: str = "a photo of"  # the K context tokens, or what they start from

    # visual factors (Eq. 3-5, 8-9)
    adapter: Literal["none", "feature"] = "feature"
    adapter_width: int = 64
    adapter_dropout: float = 0.1
    adapter_scale: float = 0.1
    disentangler: Literal["plain", "residual"] = "plain"
    width: int = 768  # hidden units of each disentangler

    # codebook (Eq. 10-11)
    codebook: Literal["none", "buffer", "trainable"] = "buffer"
    seen_rows: Literal["data", "random"] = "data"
    unseen_rows: Literal["compose", "random"] = "compose"

    # local graph and write-back (Eq. 12-19)
    graph: bool = True
    messages: tuple[Message, ...] = ("state", "object", "counterfactual")
    fusion: Literal["learned", "additive"] = "learned"  # of counterfactuals: Eq. 11, or sums in the images' own space
    momentum: float = 0.9  # lambda
    renormalise: bool = True
    refine_over: Literal["closed", "open"] = "closed"  # C_tgt in training

    # objective (Eq. 20) and inference (Eq. 21)
    losses: tuple[Loss, ...] = ("s", "o", "ct", "ch")
    semantic_negatives: Literal["seen", "target"] = "seen"
    inference: tuple[Term, ...] = ("ch", "ct", "so")

    def __post_init__(self) -> None:
        """Refuse rows whose switches contradict each other."""
        three, book = self.paths == "cso", self.codebook != "none"
        rules = [
            (three or not {"s", "o"} & set(self.losses), "losses s and o need paths: cso"),
            (three or "so" not in self.inference, "inference so needs paths: cso"),
            (book or "ch" not in self.losses, "loss ch needs a codebook"),
            (book or "ch" not in self.inference, "inference ch needs a codebook"),
            (book or not self.graph, "graph: true needs a codebook"),
            (three or not self.graph, "graph: true needs paths: cso"),
            (not self.losses or self._trains(), f"losses {list(self.losses)} reach nothing that can be trained here"),
            (not self.graph or self.messages, "graph: true needs at least one of messages"),
            (0.0 <= self.momentum <= 1.0, f"momentum is {self.momentum}; it lies in [0, 1]"),
            (0.0 <= self.adapter_dropout < 1.0, f"adapter_dropout is {self.adapter_dropout}; it lies in [0, 1)"),
            (math.isfinite(self.adapter_scale), f"adapter_scale is {self.adapter_scale}; it is a finite number"),
            (self.width > 0 and self.adapter_width > 0, "width and adapter_width are positive"),
            (self.inference, "inference needs at least one term of ch, ct, so"),
            (self.template.strip(), "template is empty; give at least one word such as 'a photo of'"),
            *(
                (len(set(names)) == len(names), f"{key} names a term twice")
                for key, names in (("losses", self.losses), ("inference", self.inference), ("messages", self.messages))
            ),
        ]
        for holds, sentence in rules:
            if not holds:
                raise OptionError(sentence)

    def _trains(self) -> bool:
        """Whether some loss reaches some parameter."""
        learned = self.context == "learned" or self.vocabulary == "learned"
        adapted = self.adapter == "feature"
        reach = {
            "s": self.paths == "cso",
            "o": self.paths == "cso",
            "ct": learned or adapted,
            "ch": adapted or self.codebook == "trainable" or (self.graph and self.momentum < 1),
        }
        return any(reach[name] for name in self.losses)

    def to_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Options:
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in record.items()}
        return cls(**values)


@dataclass(frozen=True)
class TrainingOptions:
    """The optimiser's settings: Adam, step decay (the paper's Tab. 2 gives the first three for the benchmarks)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True}

    learning_rate: float
    batch_size: int
    epochs: int
    decay: float = 0.5
    decay_every: int = 5  # epochs
    patience: int | None = None  # stop after so many epochs without a better validation AUC
    accumulate: int = 1  # batches an optimiser step; text is encoded once for all of them
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # of the text tower; logits are fp32 always
    checkpointing: bool = False  # recompute the text tower's activations in the backward pass: less memory, more time

    def __post_init__(self) -> None:
        for key in ("batch_size", "epochs", "decay_every", "accumulate"):
            if getattr(self, key) < 1:
                raise OptionError(f"{key} is {getattr(self, key)}; it is at least 1")
        if self.patience is not None and self.patience < 1:
            raise OptionError(f"patience is {self.patience}; it is at least 1, or null")
        if not 0 < self.learning_rate < 10:
            raise OptionError(f"learning_rate is {self.learning_rate}; it lies between 0 and 10")
        if not 0 < self.decay <= 1:
            raise OptionError(f"decay is {self.decay}; it lies in (0, 1]")
