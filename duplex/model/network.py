"""The network that joins prompts, factors, codebook and graph: losses in training, scores at inference (Eq. 5-22)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from duplex.encoders.text import TextTower
from duplex.errors import UsageError
from duplex.labels import Ints, LabelSpace
from duplex.model.codebook import Codebook
from duplex.model.factors import Adapter, Factors, unit
from duplex.model.graph import Batch, Candidates, aggregate, blend
from duplex.model.options import Options
from duplex.model.prompts import Prompts, Prototypes

Scorer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Refinement:
    """Rows that a training step refined, to be committed after it."""

    compositions: Tensor  # [C]
    rows: Tensor  # h' [C, d]


@dataclass(frozen=True)
class Step:
    """What one forward pass of training gives."""

    losses: dict[str, Tensor]
    refinement: Refinement | None

    @property
    def total(self) -> Tensor:
        """`L = L_s + L_o + L_c^t + L_c^h` (Eq. 20), of the terms that are switched on."""
        return torch.stack(list(self.losses.values())).sum()


class Network(nn.Module):
    """Every method: which parts exist is decided by its options.

    Features are the encoder's cached CLS features; `tau = exp(-logit_scale)` is CLIP's own.
    """

    target: Tensor
    is_target: Tensor
    position: Tensor
    negatives: Tensor

    def __init__(self, options: Options, labels: LabelSpace, tower: TextTower, codebook: Tensor | None = None) -> None:
        super().__init__()
        self.options, self.labels = options, labels
        self.scale = math.exp(tower.logit_scale)  # 1 / tau
        dim = tower.dim
        self.prompts = Prompts(options, labels, tower)
        adapted = options.adapter == "feature"
        self.adapter = (
            Adapter(dim, options.adapter_width, options.adapter_dropout, options.adapter_scale) if adapted else None
        )
        residual = options.disentangler == "residual"
        learned = options.graph and options.fusion == "learned"
        self.factors = Factors(dim, options.width, residual, learned) if options.paths == "cso" else None
        self.codebook = self._make_codebook(codebook, dim)
        self._remember_targets()

    def _make_codebook(self, rows: Tensor | None, dim: int) -> Codebook | None:
        if self.options.codebook == "none":
            return None
        if rows is None:
            rows = torch.zeros(self.labels.size, dim)
        if tuple(rows.shape) != (self.labels.size, dim):
            raise UsageError(f"the codebook has shape {tuple(rows.shape)}; this method needs {(self.labels.size, dim)}")
        return Codebook(self.options, rows)

    def _remember_targets(self) -> None:
        """C_tgt and the seen compositions of training, and each composition's column among them."""
        target = torch.as_tensor(self.labels.target(self.options.refine_over, "train"))
        seen = torch.as_tensor(self.labels.pairs["train"])
        mask = torch.zeros(self.labels.size, dtype=torch.bool)
        mask[target] = True
        position = torch.full((self.labels.size,), -1)
        position[target] = torch.arange(len(target))
        negatives = target if self.options.semantic_negatives == "target" else seen
        for name, value in (("target", target), ("is_target", mask), ("position", position), ("negatives", negatives)):
            self.register_buffer(name, value, persistent=False)
        self._encoded: Ints = negatives.numpy() if "ct" in self.options.losses else negatives.numpy()[:0]

    # -- training ---------------------------------------------------------------------------------------------

    def features(self, z: Tensor) -> Tensor:
        """`z^c`: the cached feature, adapted, of unit length [B, d]."""
        z = unit(z)
        return unit(self.adapter(z)) if self.adapter is not None else z

    def prototypes(self, checkpointing: bool = False) -> Prototypes:
        """Semantic prototypes of training: encoded once an optimiser step, whatever the number of batches."""
        return self.prompts(self._encoded, checkpointing)

    def forward(self, z: Tensor, compositions: Tensor, prototypes: Prototypes) -> Step:
        """Losses of a batch: cached features `z [B, d]`, their compositions `[B]`."""
        wanted, losses = self.options.losses, {}
        states, objects = self._split(compositions)
        z = self.features(z)
        refinement = None
        if "ct" in wanted:
            own = torch.searchsorted(self.negatives, compositions)
            losses["ct"] = cross_entropy(self._logits(z, prototypes.compositions), own)
        if self.factors is not None and ({"s", "o"} & set(wanted) or (self.options.graph and self._visual)):
            z_s, z_o = self.factors(z)
            log_s = self._logits(z_s, prototypes.states).log_softmax(-1)  # log p(s|x) [B, M]
            log_o = self._logits(z_o, prototypes.objects).log_softmax(-1)  # log p(o|x) [B, N]
            if "s" in wanted:
                losses["s"] = nll_loss(log_s, states)
            if "o" in wanted:
                losses["o"] = nll_loss(log_o, objects)
            if self.options.graph and self._visual:
                refinement = self._refine(Batch(z, z_s, z_o, log_s.exp(), log_o.exp(), states, objects))
        if "ch" in wanted:
            losses["ch"] = cross_entropy(self._visual_logits(z, refinement), self.position[compositions])
        return Step({name: losses[name] for name in wanted}, refinement)

    @property
    def _visual(self) -> bool:
        """Whether anything asks the visual prototypes."""
        return "ch" in self.options.losses or "ch" in self.options.inference

    def _refine(self, batch: Batch) -> Refinement:
        """One local graph and the blend with the codebook's rows (Algorithm 1)."""
        assert self.codebook is not None and self.factors is not None
        candidates = Candidates.of(batch.states, batch.objects, self.is_target, len(self.labels.objects))
        aggregated, reached = aggregate(batch, candidates, self.factors.fusion, self.options.messages)
        rows = self.codebook.rows.index_select(0, candidates.compositions)
        blended = blend(rows, aggregated, self.options.momentum, self.options.renormalise)
        return Refinement(candidates.compositions, torch.where(reached[:, None], blended, rows))

    def _visual_logits(self, z: Tensor, refinement: Refinement | None) -> Tensor:
        """`z . h' / tau` over C_tgt, with the refreshed rows in place, without a copy of the codebook [B, C]."""
        assert self.codebook is not None
        logits = self._logits(z, self.codebook.rows.index_select(0, self.target))
        if refinement is None:
            return logits
        return logits.index_copy(1, self.position[refinement.compositions], self._logits(z, refinement.rows))

    def commit(self, refinement: Refinement | None) -> None:
        """Momentum write-back: the refined rows become the codebook's."""
        if refinement is not None and self.codebook is not None:
            self.codebook.commit(refinement.compositions, refinement.rows)

    def project(self) -> None:
        """After an optimiser step, put rows that gradients moved back on the unit sphere."""
        if self.codebook is not None and self.options.codebook == "trainable":
            self.codebook.project()

    def trainable(self) -> list[nn.Parameter]:
        """Parameters that some switched-on loss reaches."""
        return [p for p in self.parameters() if p.requires_grad] if self.options.losses else []

    # -- inference --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def scorer(self, columns: Ints) -> Scorer:
        """A function from features `[B, d]` to scores `[B, C]` over the target set `columns` (Eq. 21).

        `S(c|x) = p(c^h|x) + p(c^t|x) + p(s|x) p(o|x)`, of the terms that `inference` names; float32.
        """
        terms = self.options.inference
        device = self.target.device
        prototypes = self.prompts.encode(columns if "ct" in terms else columns[:0])
        rows = torch.as_tensor(columns, device=device)
        states, objects = self._split(rows)
        visual = self.codebook.rows[rows] if self.codebook is not None and "ch" in terms else None

        @torch.no_grad()
        def scores(z: Tensor) -> Tensor:
            z = self.features(z)
            total = torch.zeros(len(z), len(columns), device=device)
            if visual is not None:
                total += self._logits(z, visual).softmax(-1)
            if "ct" in terms:
                total += self._logits(z, prototypes.compositions).softmax(-1)
            if "so" in terms and self.factors is not None:
                z_s, z_o = self.factors(z)
                p_s, p_o = (
                    self._logits(f, t).softmax(-1) for f, t in ((z_s, prototypes.states), (z_o, prototypes.objects))
                )
                total += p_s[:, states] * p_o[:, objects]
            return total

        return scores

    # -- parts ------------------------------------------------------------------------------------------------

    def _split(self, compositions: Tensor) -> tuple[Tensor, Tensor]:
        n = len(self.labels.objects)
        return compositions // n, compositions % n

    def _logits(self, z: Tensor, prototypes: Tensor) -> Tensor:
        return self.scale * (z @ prototypes.T)

    def state_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds: everything trained and the codebook; nothing of the frozen encoder."""
        return {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}

    def summary(self) -> dict[str, Any]:
        """Sizes worth reporting."""
        return {
            "parameters": int(sum(p.numel() for p in self.parameters() if p.requires_grad)),
            "codebook_rows": 0 if self.codebook is None else int(np.prod(self.codebook.rows.shape[:1])),
        }
