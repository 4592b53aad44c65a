"""Duplex (Peng et al.): semantic prototypes of learned prompts beside a codebook of visual prototypes that a local
graph refines batch by batch (Eq. 5-22, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from duplex.labels import Ints, Target
from duplex.layers.codebook import Codebook
from duplex.layers.factors import Fusion, unit
from duplex.layers.graph import Candidates, Message, Nodes, aggregate, blend
from duplex.layers.indices import send
from duplex.layers.paths import Factored, PathOptions, Paths
from duplex.layers.portable import means_of, portable_paths, shares
from duplex.layers.prompt_paths import Prototypes
from duplex.layers.trained_codebook import TrainedCodebook
from duplex.methods.base import Batch, Inputs, Method, Scorer, Setting, Sweep, Terms, columns_of, summed
from duplex.methods.inspectable import Exhibits, of_paths


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

    compositions: Ints  # [C]
    rows: Tensor  # h' [C, d]


class Duplex(Method[DuplexOptions]):
    """`L = L_s + L_o + L_c^t + L_c^h`, `S(c|x) = p(c^h|x) + p(c^t|x) + p(s|x) p(o|x)`, of the terms switched on."""

    Options = DuplexOptions

    def __init__(self, setting: Setting, options: DuplexOptions) -> None:
        super().__init__(setting, options)
        world = setting.world if options.refine_over == "world" else options.refine_over
        dim = setting.tower.dim
        kind: type[Codebook | TrainedCodebook] = TrainedCodebook if options.codebook == "trainable" else Codebook
        self.codebook = kind(
            setting.labels,
            dim,
            unseen=options.unseen_rows,
            random_seen=options.seen_rows == "random",
            anchored=options.blend == "anchored",
        )
        self.paths = Paths(setting.labels, setting.tower, options, world)
        learned = options.graph and options.fusion != "additive"
        self.fusion = Fusion(dim, rectified=options.fusion == "learned", rank=options.fusion_rank) if learned else None
        self.target = Target.of(setting.labels, world, "train")  # C_tgt of training
        self._refined: Refinement | None = None
        self._own: tuple[Tensor, Ints] | None = None  # a batch's z^c and compositions

    @classmethod
    def needs(cls, options: Any) -> frozenset[str]:
        return frozenset({"cls", "text"})

    def start(self, train: Batch) -> None:
        self.codebook.start(unit(train.z), train.compositions, seen=self.options.seen_rows == "data")

    @property
    def device(self) -> torch.device:
        return self.paths.negatives.device

    # -- training -----------------------------------------------------------------------------------------------

    def groups(self) -> list[dict[str, Any]]:
        return super().groups() if self.options.losses else []

    def shared(self) -> Prototypes:
        return self.paths.prototypes(self.options.losses, self.checkpointing)

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        wanted, z = self.options.losses, self.paths.features(batch.z)
        if self.options.rows == "ema":
            self._own = z.detach(), batch.labels
        refines = self.options.graph and self.options.visual
        found, factored = self.paths.losses(z, batch.compositions, shared, wanted, ask=refines)
        if refines and factored is not None:
            self._refined = self.refine(self.nodes(z, factored, batch.compositions, batch.labels), batch.labels)
        if "ch" in wanted:
            (own,) = send(self.device, self.target.places(batch.labels))
            found["ch"] = cross_entropy(self._visual_logits(z, self._refined), own)
        return {name: found[name] for name in wanted}

    def nodes(self, z: Tensor, factored: Factored, compositions: Tensor, labels: Ints) -> Nodes:
        """A batch as the graph sees it; each image's messages weigh as its posteriors say. `labels` are its
        compositions on the host."""
        n = len(self.labels.objects)
        p_s, p_o = factored.log_s.exp(), factored.log_o.exp()
        nodes = Nodes(z, factored.z_s, factored.z_o, p_s, p_o, compositions // n, compositions % n)
        return nodes.by_label(labels // n, labels % n) if self.options.nodes == "label" else nodes

    def _labelled(self, compositions: Ints) -> tuple[Ints, Ints]:
        """States and objects of a batch's factor nodes."""
        found = compositions // len(self.labels.objects), compositions % len(self.labels.objects)
        return (np.unique(found[0]), np.unique(found[1])) if self.options.nodes == "label" else found

    def refine(self, nodes: Nodes, compositions: Ints) -> Refinement:
        """One local graph over a batch of these compositions and the blend with the codebook's rows (Algorithm 1).
        Candidates are made on the host, which need not wait for the device."""
        options, n = self.options, len(self.labels.objects)
        candidates = Candidates.of(*self._labelled(compositions), self.target, n, self.device)
        aggregated, reached = aggregate(nodes, candidates, self.fusion, options.messages, options.weighing)
        kept = rows = self.codebook.rows_of(candidates.compositions)
        if options.blend == "anchored" and isinstance(self.codebook, Codebook):
            kept = self.codebook.initial(candidates.compositions)
        blended = blend(kept, aggregated, self.momentum, options.renormalise)
        return Refinement(candidates.compositions, torch.where(reached[:, None], blended, rows))

    @property
    def momentum(self) -> float:
        """Lambda of the next write-back."""
        return self.options.momentum

    def _visual_logits(self, z: Tensor, refinement: Refinement | None) -> Tensor:
        """`z . h' / tau` over C_tgt, with the refreshed rows in place, without a copy of the codebook [B, C]."""
        logits = self.codebook.over(self.target.listed)(z, self.paths.scale)
        if refinement is None:
            return logits
        (columns,) = send(self.device, self.target.places(refinement.compositions))
        return logits.index_copy(1, columns, self.paths.logits(z, refinement.rows))

    def after_batch(self) -> None:
        """Momentum write-back: the refined rows become the codebook's."""
        if self._refined is not None:
            self.codebook.commit(self._refined.compositions, self._refined.rows)
            self._refined = None
        if self._own is not None and isinstance(self.codebook, Codebook):
            self.codebook.average(*self._own, self.momentum)
            self._own = None

    @torch.no_grad()
    def follow(self, train: Batch) -> None:
        if self.options.rows == "recomputed":
            self.codebook.start(self.paths.features(train.z), train.compositions, seen=True)
        elif self.options.rows == "ema" and isinstance(self.codebook, Codebook):
            self.codebook.compose(train.compositions)

    def after_step(self) -> None:
        """Rows that gradients moved go back to the unit sphere."""
        if isinstance(self.codebook, TrainedCodebook):
            self.codebook.project()

    # -- inference --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evidence(self, columns: Ints) -> Terms:
        terms = self.options.inference
        prototypes = self.paths.encode(columns, terms)
        states, objects = columns_of(self.labels, columns, self.device)
        whole = len(columns) == self.labels.size and bool((np.diff(columns) > 0).all())
        visual = self.codebook.over(None if whole else columns) if "ch" in terms else None

        @torch.no_grad()
        def parts(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
            z = self.paths.features(inputs["cls"])
            if visual is not None:
                yield "visual", visual(z, self.paths.scale).softmax(-1)
            yield from self.paths.terms(z, prototypes, states, objects, terms)

        return parts

    def scorer(self, columns: Ints) -> Scorer:
        return summed(self.evidence(columns), len(columns), self.device)

    @torch.no_grad()
    def sweep(self, states: int) -> Sweep | None:
        """Visual prototypes and factors are made of `M + N` parts; a composition's prompt is not."""
        terms, book = self.options.inference, self.codebook
        if "ct" in terms or isinstance(book, TrainedCodebook):
            return None
        prototypes, n = self.paths.encode(np.arange(0), terms), len(self.labels.objects)

        def visual(z: Tensor) -> Iterator[Tensor]:
            """Blocks of `p(c^h|x)`: one pass for the sum of the softmax, one for the shares."""
            logits = partial(book.by_states, z, self.paths.scale, states)
            whole = z.new_full((len(z),), -torch.inf)
            for part in logits():
                whole = torch.logaddexp(whole, part.logsumexp(1))
            for part in logits():
                yield part.sub_(whole[:, None]).exp_()

        @torch.no_grad()
        def blocks(inputs: Inputs) -> Iterator[tuple[int, Tensor]]:
            z = self.paths.features(inputs["cls"])
            primitives = self.paths.primitives(z, prototypes) if "so" in terms else None
            shares_of = visual(z) if "ch" in terms else iter(())
            for m in range(0, len(self.labels.states), states):
                scores = next(shares_of, None)
                if primitives is not None:
                    p_s, p_o = primitives
                    pairs = (p_s[:, m : m + states, None] * p_o[:, None]).flatten(1)
                    scores = pairs if scores is None else scores.add_(pairs)
                assert scores is not None  # inference names at least one term
                yield m * n, scores.float()

        return blocks

    def probabilities(self, scores: Tensor) -> Tensor:
        return shares(scores)

    @torch.no_grad()
    def portable(self, columns: Ints) -> dict[str, Tensor]:
        tensors = portable_paths(self.paths, columns, self.options.inference)
        if "ch" in self.options.inference:
            seen = self.labels.pairs["train"]
            tensors["visual"] = self.codebook.rows_of(columns).detach()
            tensors |= means_of(self.codebook.rows_of(seen).detach(), self.labels, seen)
        return tensors

    def exhibits(self) -> Exhibits:
        @torch.no_grad()
        def visual(compositions: Ints) -> Tensor:
            return self.codebook.rows_of(compositions).detach()

        @torch.no_grad()
        def joined(z_s: Tensor, z_o: Tensor) -> Tensor:
            assert self.fusion is not None
            fused: Tensor = self.fusion(z_s, z_o)
            return fused

        return replace(of_paths(self.paths), visual=visual, joined=None if self.fusion is None else joined)

    def summary(self) -> dict[str, int]:
        return {**super().summary(), "codebook_rows": self.labels.size}
