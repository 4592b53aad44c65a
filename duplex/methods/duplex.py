"""Duplex (Peng et al.): semantic prototypes, and visual ones that training refines.

An image is compared with the text feature of each composition's learned prompt (semantic prototype) and with an
estimated mean image feature of each composition (visual prototype). The codebook, the table of visual prototypes, is
refined batch by batch by messages in a local graph. Equations in this file are the paper's (Eq. 5-22, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from duplex.labels import CandidateSet, Ints
from duplex.layers.codebook import Codebook
from duplex.layers.composition_index import copy_to_device
from duplex.layers.factors import Fusion, unit
from duplex.layers.graph import FactorNodes, Message, RefinedPrototypes, refine
from duplex.layers.paths import FactorPosteriors, PathOptions, Paths
from duplex.layers.portable import portable_paths, prototype_means
from duplex.layers.prompt_paths import Prototypes
from duplex.methods.base import Batch, Inputs, Inspectable, MethodContext, ScoreBlocks, ScoreTerms
from duplex.methods.prompts import PathMethod
from duplex.options import Share


@dataclass(frozen=True)
class DuplexOptions(PathOptions):
    """Options of `kind: duplex`; the defaults are those of the paper."""

    # codebook (Eq. 10-11)
    seen_rows: Literal["data", "random"] = "data"  # initial prototypes of training pairs: mean features, or random
    unseen_rows: Literal["compose", "random"] = "compose"  # of other pairs: composed of means, or random
    rows: Literal["initial", "recomputed"] = "initial"  # recomputed: computed again after each epoch

    # local graph and write-back (Eq. 12-19)
    graph: bool = True  # whether the local graph refines prototypes in training
    messages: tuple[Message, ...] = ("state", "object", "counterfactual")  # sources of messages
    fusion: Literal["learned", "linear", "additive"] = "learned"  # counterfactuals: Eq. 11, without relu, or added
    momentum: Share = 0.9  # lambda, the weight of a prototype's old value per refinement
    blend: Literal["recursive", "anchored"] = "recursive"  # whether the old value is the current or the initial one
    renormalise: bool = True  # whether refined prototypes get unit length
    refine_over: Literal["world", "closed", "open"] = "world"  # whose candidates training refines; world: the method's

    # objective (Eq. 20) and inference (Eq. 21)
    losses: tuple[Literal["state", "object", "semantic", "visual"], ...] = ("state", "object", "semantic", "visual")
    inference: tuple[Literal["visual", "semantic", "factors"], ...] = ("visual", "semantic", "factors")

    def rules(self) -> Iterable[tuple[object, str]]:
        yield from super().rules()
        yield from self.path_rules(self.losses, self.inference)
        yield self.paths == "three" or not self.graph, "graph: true needs paths: three"
        yield not self.graph or self.messages, "graph: true needs at least one kind in messages"
        yield len(set(self.messages)) == len(self.messages), "messages names a kind twice"
        recomputed = self.rows == "recomputed"
        yield not (recomputed and self.graph), "rows: recomputed would undo the refinement; set graph to false"
        from_data = (self.seen_rows, self.unseen_rows) == ("data", "compose")
        yield from_data or not recomputed, "rows: recomputed needs seen_rows: data and unseen_rows: compose"
        yield self.visual or not recomputed, "rows: recomputed needs visual in losses or inference"

    def trained_losses(self) -> set[str]:
        trained = self.adapted or (self.graph and self.momentum < 1)
        return super().trained_losses() | ({"visual"} if trained else set())

    @property
    def visual(self) -> bool:
        return "visual" in self.losses or "visual" in self.inference


class Duplex(PathMethod[DuplexOptions]):
    """Duplex: probabilities by semantic prototypes, visual prototypes, and an image's state and object factors."""

    def __init__(self, context: MethodContext, options: DuplexOptions) -> None:
        super().__init__(context, options)
        world = context.world if options.refine_over == "world" else options.refine_over
        dim = context.tower.dim
        self.codebook = Codebook(
            context.labels,
            dim,
            unseen=options.unseen_rows,
            random_seen=options.seen_rows == "random",
            anchored=options.blend == "anchored",
        )
        self.paths = Paths(context.labels, context.tower, options, world)
        learned = options.graph and options.fusion != "additive"
        self.fusion = Fusion(dim, rectified=options.fusion == "learned") if learned else None
        self.candidates = CandidateSet.of(context.labels, world, "train")  # C_tgt, the candidates in training
        self.pending: RefinedPrototypes | None = None  # set by `losses`, written to the codebook by `after_batch`

    def start(self, train: Batch) -> None:
        self.codebook.start(unit(train.cls), train.compositions, seen=self.options.seen_rows == "data")

    @property
    def device(self) -> torch.device:
        return self.paths.negatives.device

    def losses(self, batch: Batch, shared: Prototypes) -> dict[str, Tensor]:
        """The loss terms by name; refined prototypes wait in `pending` until `after_batch` writes them."""
        names, z = self.options.losses, self.paths.adapt(batch.cls)
        refines = self.options.graph and self.options.visual
        losses, factors = self.paths.losses(z, batch.compositions, shared, names, with_factors=refines)
        self.pending = None
        if refines and factors is not None:
            self.pending = refine(
                self.nodes(z, factors, batch.compositions),
                batch.compositions_np,
                self.candidates,
                self.codebook,
                self.fusion,
                messages=self.options.messages,
                momentum=self.options.momentum,
                renormalise=self.options.renormalise,
            )
        if "visual" in names:
            (positions,) = copy_to_device(self.device, self.candidates.positions(batch.compositions_np))
            logits = self.codebook.logits_over(self.candidates.listed)(z, self.paths.scale)
            if self.pending is not None:  # refined prototypes replace those in the codebook
                (refined,) = copy_to_device(self.device, self.candidates.positions(self.pending.compositions))
                logits = logits.index_copy(1, refined, self.paths.logits(z, self.pending.rows))
            losses["visual"] = cross_entropy(logits, positions)
        return {name: losses[name] for name in names}

    def nodes(self, z: Tensor, factors: FactorPosteriors, compositions: Tensor) -> FactorNodes:
        """What messages to visual prototypes are computed from: composition features `z`, their factors, labels."""
        m, n = self.primitives(compositions)
        return FactorNodes(z, factors.z_s, factors.z_o, factors.log_s.exp(), factors.log_o.exp(), m, n)

    def after_batch(self) -> None:
        if self.pending is not None:
            self.codebook.write_back(*self.pending)
            self.pending = None

    @torch.no_grad()
    def on_features_changed(self, train: Batch) -> None:
        if self.options.rows == "recomputed":
            self.codebook.start(self.paths.adapt(train.cls), train.compositions, seen=True)

    @torch.no_grad()
    def score_terms(self, candidates: Ints) -> ScoreTerms:
        names = self.options.inference
        prototypes = self.paths.encode(candidates, names)
        states, objects = self.primitives(torch.as_tensor(candidates, device=self.device))
        whole = len(candidates) == self.labels.size and bool((np.diff(candidates) > 0).all())
        visual = self.codebook.logits_over(None if whole else candidates) if "visual" in names else None

        @torch.no_grad()
        def terms(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
            z = self.paths.adapt(inputs["cls"])
            if visual is not None:
                yield "visual", visual(z, self.paths.scale).softmax(-1)
            yield from self.paths.score_terms(z, prototypes, states, objects, names)

        return terms

    @torch.no_grad()
    def score_blocks(self, states: int) -> ScoreBlocks | None:
        names, n = self.options.inference, len(self.labels.objects)
        if "semantic" in names:  # needs a prompt per composition
            return None
        prototypes = self.paths.encode(np.arange(0), names)

        def visual(z: Tensor) -> Iterator[Tensor]:  # a first pass for the softmax's normaliser, a second to use it
            logits = partial(self.codebook.logits_by_states, z, self.paths.scale, states)
            normaliser = z.new_full((len(z),), -torch.inf)
            for block in logits():
                normaliser = torch.logaddexp(normaliser, block.logsumexp(1))
            for block in logits():
                yield block.sub_(normaliser[:, None]).exp_()

        @torch.no_grad()
        def blocks(inputs: Inputs) -> Iterator[tuple[int, Tensor]]:
            z = self.paths.adapt(inputs["cls"])
            primitives = self.paths.primitive_posteriors(z, prototypes) if "factors" in names else None
            visual_blocks = visual(z) if "visual" in names else iter(())
            for m in range(0, len(self.labels.states), states):
                scores = next(visual_blocks, None)
                if primitives is not None:
                    p_s, p_o = primitives
                    factors = (p_s[:, m : m + states, None] * p_o[:, None]).flatten(1)
                    scores = factors if scores is None else scores.add_(factors)
                assert scores is not None  # inference names at least one term
                yield m * n, scores.float()

        return blocks

    @torch.no_grad()
    def portable(self, candidates: Ints) -> dict[str, Tensor]:
        tensors = portable_paths(self.paths, candidates, self.options.inference)
        if "visual" in self.options.inference:
            seen = self.labels.pairs["train"]
            tensors["visual"] = self.codebook.prototypes(candidates).detach()
            tensors |= prototype_means(self.codebook.prototypes(seen).detach(), self.labels, seen)
        return tensors

    def inspectable(self) -> Inspectable:
        return replace(super().inspectable(), visual=self.codebook.prototypes, fuse=self.fusion)

    def summary(self) -> dict[str, int]:
        return {**super().summary(), "codebook_rows": self.labels.size}
