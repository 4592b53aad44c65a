"""CLEAR: three paths, and networks that read an abstract state and object from words and patches.

Li, Zhao, Su, "From Model Patterns to Abstract Semantics in CZSL", preprint, 2026.

    t^ = norm(B_L(... B_1(q_s, Y) ..., Y)),   Y = [t_s of the K states with the largest p(s|x); W X] + types
    l^(s) = (cos(z_s, t_s) + cos(t^, t_s)) / tau                               likewise for objects
    L = CE(l(c)) + CE(l^(s)) + CE(l^(o)),   S = p(c|x) + p^(s|x) + p^(o|x),   p^ = softmax l^

* z_s: state factor;  t_s: prompts of states;  l(c), p(.|x): logits and posteriors of three paths
* q_s: text feature of a prompt whose word is a learned vector, at first the mean of all states'
* X: patch tokens;  W: linear map;  types: two learned vectors, of words and of patches
* B: blocks of cross-attention and MLP, at first B(x, y) = x;  tau: CLIP's temperature

A published decoder's layers also have self-attention, which for a single query is a linear map,
and dropout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from duplex.encoders.prompt_tree import PromptTree
from duplex.methods.base import Batch, Inputs, MethodContext
from duplex.methods.families import CrossBlock, ThreePathOptions, ThreePaths, score_in_chunks
from duplex.methods.layers import CompositionIndex, unit
from duplex.methods.prompts import Prototypes
from duplex.options import Count, Share


@dataclass(frozen=True)
class ClearOptions(ThreePathOptions):
    joined: Literal["product", "sum"] = "sum"  # how the score joins p(s|x) and p(o|x)
    ratio: Share = 0.4  # share of states, and of objects, that a reasoner reads: K
    layers: Count = 6  # blocks L of each reasoner
    heads: Count = 4  # heads of their attention


class Clear(ThreePaths[ClearOptions]):
    """CLEAR: three paths; for each image, two networks change logits of states and objects."""

    required_inputs: ClassVar[tuple[str, ...]] = ("cls", "text", "patch")

    def __init__(self, context: MethodContext, options: ClearOptions) -> None:
        super().__init__(context, options)
        dim = context.dim
        states = len(context.labels.states)
        prompts = self.paths.prompts
        lexicon = self.paths.prompts.lexicon().detach()
        rows = []
        for mask, path in enumerate(("state", "object"), len(lexicon)):  # masks come after it
            rows.append([*prompts.opening_rows, *prompts.context_rows[path], mask, *prompts.closing_rows])
        self._tree = PromptTree.of(np.array(rows))
        words = lexicon[torch.as_tensor(prompts.name_rows[:, 0])]
        self.masks = nn.Parameter(torch.stack([words[:states].mean(0), words[states:].mean(0)]))
        self.types = nn.Parameter(torch.zeros(2, dim))
        self.project = nn.Linear(context.inputs["patch"][1], dim)
        self.state = nn.ModuleList(CrossBlock(dim, dim, options.heads) for _ in range(options.layers))
        self.object = nn.ModuleList(CrossBlock(dim, dim, options.heads) for _ in range(options.layers))

    def queries(self) -> Tensor:
        """Text features q_s, q_o [2, d] of a state's and an object's learned prompt."""
        prompts = self.paths.prompts
        return unit(prompts.tower.encode(self._tree, torch.cat([prompts.lexicon(), self.masks])))

    def shared(self) -> Any:
        return (*super().shared(), self.queries())

    def prepare(self, candidates: CompositionIndex) -> Any:
        return (*super().prepare(candidates), self.queries())

    def reasoned_logits(self, inputs: Inputs, texts: Any, candidates: CompositionIndex) -> list[Tensor]:
        """Logits of pairs [B, C], states [B, M], objects [B, N]; `texts`: from `prepare`."""
        t = Prototypes(*texts[:3])
        q_s, q_o = texts[3]
        c, s, o = self.path_logits(self.paths.adapt(inputs["cls"]), t, candidates)
        patches = self.project(inputs["patch"].to(c.dtype)) + self.types[1]
        abstract_s = self.abstract(self.state, q_s, s, t.states, patches)
        abstract_o = self.abstract(self.object, q_o, o, t.objects, patches)
        return [c, s + self.paths.logits(abstract_s, t.states), o + self.paths.logits(abstract_o, t.objects)]

    def abstract(self, blocks: Any, q: Tensor, logits: Tensor, words: Tensor, patches: Tensor) -> Tensor:
        """Feature [B, d] that `q` reads from `patches` and the `words` of highest `logits`."""
        likely = logits.topk(max(1, math.ceil(self.options.ratio * len(words)))).indices
        y = torch.cat([words[likely] + self.types[0], patches], 1)
        x = q.expand(len(y), 1, -1)
        for block in blocks:
            x, _ = block(x, y)
        return unit(x[:, 0])

    def losses(self, batch: Batch, shared: Any) -> dict[str, Tensor]:
        logits = self.reasoned_logits(batch.inputs, shared, self.train_candidates)
        return self.three_path_losses(logits, batch.compositions, primitives=self.options.primitives)

    def score(self, inputs: Inputs, candidates: CompositionIndex, prepared: Any) -> Tensor:
        def chunk_scores(cls: Tensor, patches: Tensor) -> Tensor:
            logits = self.reasoned_logits({"cls": cls, "patch": patches}, prepared, candidates)
            return self.joined_score(logits, Prototypes(*prepared[:3]), candidates)

        width = 8 * self.context.dim * self.context.inputs["patch"][0]
        return score_in_chunks(chunk_scores, inputs["cls"], inputs["patch"], width)
