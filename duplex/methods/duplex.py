"""Duplex (Peng et al.): semantic prototypes of learned prompts beside a codebook of visual prototypes that a local
graph refines batch by batch (Eq. 5-22, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from duplex.labels import Ints
from duplex.methods.base import Batch, Inputs, Method, Scorer, Setting, Terms, columns_of, summed
from duplex.methods.exhibits import Exhibits, of_paths
from duplex.parts.codebook import Codebook
from duplex.parts.factors import Fusion, unit
from duplex.parts.graph import Candidates, Message, Nodes, aggregate, blend
from duplex.parts.paths import Factored, PathOptions, Paths
from duplex.parts.portable import means_of, portable_paths, shares
from duplex.parts.prompts import Prototypes


@dataclass(frozen=True)
class DuplexOptions(PathOptions):
    """The defaults are the paper's."""

    # codebook (Eq. 10-11)
    codebook: Literal["buffer", "trainable"] = "buffer"
    seen_rows: Literal["data", "random"] = "data"
    unseen_rows: Literal["compose", "random", "empty"] = "compose"  # empty: nothing until first refined
    rows: Literal["initial", "recomputed", "ema"] = "initial"  # as features move: kept, made anew after each epoch, or
    # drawn to each batch's own images by `momentum`, unseen ones composed of them

    # local graph and write-back (Eq. 12-19)
    graph: bool = True
    messages: tuple[Message, ...] = ("state", "object", "counterfactual")
    nodes: Literal["image", "label"] = (
        "image"  # a factor node for each image, or for each state and object of the batch
    )
    fusion: Literal["learned", "linear", "additive"] = (
        "learned"  # Eq. 11; without its relu; sums in the images' own space
    )
    fusion_rank: int | None = None  # of M_s and M_o; null: full
    weighing: Literal["together", "by_kind"] = "together"  # Eq. 16; or a mean of each kind's own weighted mean
    momentum: float = 0.9  # lambda
    blend: Literal["recursive", "anchored"] = "recursive"  # with the row as it is, or with the row as it began
    renormalise: bool = True
    refine_over: Literal["world", "closed", "open"] = (
        "world"  # C_tgt in training: that of the run's world, or one of them
    )

    # objective (Eq. 20) and inference (Eq. 21)
    losses: tuple[Literal["s", "o", "ct", "ch"], ...] = ("s", "o", "ct", "ch")
    inference: tuple[Literal["ch", "ct", "so"], ...] = ("ch", "ct", "so")

    def rules(self) -> Iterable[tuple[object, str]]:
        yield from super().rules()
        yield from self.path_rules(self.losses, self.inference)
        yield self.paths == "cso" or not self.graph, "graph: true needs paths: cso"
        yield not self.graph or self.messages, "graph: true needs at least one of messages"
        yield len(set(self.messages)) == len(self.messages), "messages names a term twice"
        following = self.rows != "initial"
        plain = self.codebook == "buffer" and {self.seen_rows, self.unseen_rows} == {"data", "compose"}
        yield not (following and self.graph), f"rows: {self.rows} undoes what graph: true refines; set graph to false"
        yield plain or not following, f"rows: {self.rows} needs codebook: buffer, seen_rows: data, unseen_rows: compose"
        yield self.visual or not following, f"rows: {self.rows} moves what neither losses nor inference ask; name ch"
        yield 0 <= self.momentum <= 1, f"momentum is {self.momentum}; it lies in [0, 1]"
        yield self.nodes == "image" or self.fusion != "additive", "nodes: label needs fusion: learned or linear"
        yield self.blend == "recursive" or self.codebook == "buffer", "blend: anchored needs codebook: buffer"
        rank = self.fusion_rank
        yield rank is None or rank > 0, f"fusion_rank is {rank}; it is positive, or null for the full rank"
        yield rank is None or self.fusion != "additive", "fusion: additive has no matrices to give a rank"
        reach = f"losses {list(self.losses)} reach nothing that can be trained here"
        yield not self.losses or self.reached() & set(self.losses), reach

    def reached(self) -> set[str]:
        moved = self.adapted or self.codebook == "trainable" or (self.graph and self.momentum < 1)
        return super().reached() | ({"ch"} if moved else set())

    @property
    def visual(self) -> bool:
        """Whether anything asks the visual prototypes."""
        return "ch" in self.losses or "ch" in self.inference


@dataclass(frozen=True)
class Refinement:
    """Rows that a batch refined, to be committed after it."""

    compositions: Tensor  # [C]
    rows: Tensor  # h' [C, d]


class Duplex(Method[DuplexOptions]):
    """`L = L_s + L_o + L_c^t + L_c^h`, `S(c|x) = p(c^h|x) + p(c^t|x) + p(s|x) p(o|x)`, of the terms switched on."""

    Options = DuplexOptions
    target: Tensor
    is_target: Tensor
    position: Tensor

    def __init__(self, setting: Setting, options: DuplexOptions) -> None:
        super().__init__(setting, options)
        world = setting.world if options.refine_over == "world" else options.refine_over
        target = setting.labels.target(world, "train")
        dim = setting.tower.dim
        self.codebook = Codebook(
            setting.labels,
            dim,
            trainable=options.codebook == "trainable",
            random_seen=options.seen_rows == "random",
            anchored=options.blend == "anchored",
        )
        self.paths = Paths(setting.labels, setting.tower, options, target)
        learned = options.graph and options.fusion != "additive"
        self.fusion = Fusion(dim, rectified=options.fusion == "learned", rank=options.fusion_rank) if learned else None
        self._remember(torch.as_tensor(target))
        self._refined: Refinement | None = None
        self._own: tuple[Tensor, Tensor] | None = None  # a batch's z^c and compositions

    def _remember(self, target: Tensor) -> None:
        """C_tgt of training, as a mask, and each composition's column among it."""
        mask = torch.zeros(self.labels.size, dtype=torch.bool)
        mask[target] = True
        position = torch.full((self.labels.size,), -1)
        position[target] = torch.arange(len(target))
        for name, value in (("target", target), ("is_target", mask), ("position", position)):
            self.register_buffer(name, value, persistent=False)

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls", "text"})

    def start(self, train: Batch) -> None:
        self.codebook.start(
            unit(train.z),
            train.compositions,
            seen=self.options.seen_rows == "data",
            unseen=self.options.unseen_rows == "compose",
        )
        if self.options.unseen_rows == "empty":
            self.codebook.clear_unseen()
        if self.options.blend == "anchored":
            self.codebook.anchor()

    # -- training -----------------------------------------------------------------------------------------------

    def groups(self) -> list[dict[str, Any]]:
        return super().groups() if self.options.losses else []

    def shared(self) -> Prototypes:
        return self.paths.prototypes(self.options.losses, self.checkpointing)

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        wanted, z = self.options.losses, self.paths.features(batch.z)
        if self.options.rows == "ema":
            self._own = z.detach(), batch.compositions
        refines = self.options.graph and self.options.visual
        found, factored = self.paths.losses(z, batch.compositions, shared, wanted, ask=refines)
        if refines and factored is not None:
            self._refined = self.refine(self.nodes(z, factored, batch.compositions))
        if "ch" in wanted:
            own = self.position[batch.compositions]
            found["ch"] = cross_entropy(self._visual_logits(z, self._refined), own)
        return {name: found[name] for name in wanted}

    def nodes(self, z: Tensor, factored: Factored, compositions: Tensor) -> Nodes:
        """A batch as the graph sees it; each image's messages weigh as its posteriors say."""
        n = len(self.labels.objects)
        p_s, p_o = factored.log_s.exp(), factored.log_o.exp()
        nodes = Nodes(z, factored.z_s, factored.z_o, p_s, p_o, compositions // n, compositions % n)
        return nodes.by_label() if self.options.nodes == "label" else nodes

    def refine(self, nodes: Nodes) -> Refinement:
        """One local graph and the blend with the codebook's rows (Algorithm 1)."""
        candidates = Candidates.of(nodes.states, nodes.objects, self.is_target, len(self.labels.objects))
        options = self.options
        aggregated, reached = aggregate(nodes, candidates, self.fusion, options.messages, options.weighing)
        rows = self.codebook.rows.index_select(0, candidates.compositions)
        kept = rows if options.blend == "recursive" else self.codebook.initial(candidates.compositions)
        blended = blend(kept, aggregated, self.momentum, options.renormalise)
        return Refinement(candidates.compositions, torch.where(reached[:, None], blended, rows))

    @property
    def momentum(self) -> float:
        """Lambda of the next write-back."""
        return self.options.momentum

    def _visual_logits(self, z: Tensor, refinement: Refinement | None) -> Tensor:
        """`z . h' / tau` over C_tgt, with the refreshed rows in place, without a copy of the codebook [B, C]."""
        logits = self.paths.logits(z, self.codebook.rows.index_select(0, self.target))
        if refinement is None:
            return logits
        refined = self.paths.logits(z, refinement.rows)
        return logits.index_copy(1, self.position[refinement.compositions], refined)

    def after_batch(self) -> None:
        """Momentum write-back: the refined rows become the codebook's."""
        if self._refined is not None:
            self.codebook.commit(self._refined.compositions, self._refined.rows)
            self._refined = None
        if self._own is not None:
            self.codebook.average(*self._own, self.momentum)
            self._own = None

    @torch.no_grad()
    def follow(self, train: Batch) -> None:
        if self.options.rows == "recomputed":
            self.codebook.start(self.paths.features(train.z), train.compositions, seen=True, unseen=True)
        elif self.options.rows == "ema":
            self.codebook.compose(train.compositions)

    def after_step(self) -> None:
        """Rows that gradients moved go back to the unit sphere."""
        if self.codebook.trainable:
            self.codebook.project()

    # -- inference --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evidence(self, columns: Ints) -> Terms:
        terms, device = self.options.inference, self.target.device
        prototypes = self.paths.encode(columns, terms)
        states, objects = columns_of(self.labels, columns, device)
        visual = self.codebook.rows[torch.as_tensor(columns, device=device)] if "ch" in terms else None

        @torch.no_grad()
        def parts(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
            z = self.paths.features(inputs["cls"])
            if visual is not None:
                yield "visual", self.paths.logits(z, visual).softmax(-1)
            yield from self.paths.terms(z, prototypes, states, objects, terms)

        return parts

    def scorer(self, columns: Ints) -> Scorer:
        return summed(self.evidence(columns), len(columns), self.target.device)

    def probabilities(self, scores: Tensor) -> Tensor:
        return shares(scores)

    @torch.no_grad()
    def portable(self, columns: Ints) -> dict[str, Tensor]:
        tensors = portable_paths(self.paths, columns, self.options.inference)
        if "ch" in self.options.inference:
            rows, seen = self.codebook.rows.detach(), self.labels.pairs["train"]
            tensors["visual"] = rows[torch.as_tensor(columns, device=rows.device)]
            tensors |= means_of(rows[torch.as_tensor(seen, device=rows.device)], self.labels, seen)
        return tensors

    def exhibits(self) -> Exhibits:
        @torch.no_grad()
        def visual(compositions: Ints) -> Tensor:
            return self.codebook.rows[torch.as_tensor(compositions, device=self.target.device)].detach()

        @torch.no_grad()
        def joined(z_s: Tensor, z_o: Tensor) -> Tensor:
            assert self.fusion is not None
            fused: Tensor = self.fusion(z_s, z_o)
            return fused

        return replace(of_paths(self.paths), visual=visual, joined=None if self.fusion is None else joined)

    def summary(self) -> dict[str, int]:
        return {**super().summary(), "codebook_rows": len(self.codebook.rows)}
