"""A method is a row of options: CLIP, CoOp, CSP, the three-path baseline, Duplex and every ablation are rows of this table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from duplex.errors import UsageError

Loss = Literal["s", "o", "ct", "ch"]
Term = Literal["ch", "ct", "so"]
Message = Literal["state", "object", "counterfactual"]


@dataclass(frozen=True)
class Options:
    """What the network is made of. The defaults are the paper's Duplex."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

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
            (not self.graph or self.messages, "graph: true needs at least one of messages"),
            (0.0 <= self.momentum <= 1.0, f"momentum is {self.momentum}; it lies in [0, 1]"),
            (0.0 <= self.adapter_dropout < 1.0, f"adapter_dropout is {self.adapter_dropout}; it lies in [0, 1)"),
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
                raise UsageError(sentence)

    def to_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Options:
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in record.items()})
