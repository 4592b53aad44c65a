"""Measure a step of the local graph, forward and backward, by factored sums and with a dense adjacency matrix.

python -m benchmarks.graph [--json]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measure import alternate, emit, finished, options, say
from duplex.labels import CandidateSet, Ints
from duplex.methods.codebook import blend
from duplex.methods.duplex import BatchCandidates, Message, MessageNodes, mean_messages
from duplex.methods.layers import Fusion, copy_to_device

DIM = 768
DENSE = 128  # largest batch of the dense step: at 256 its matrix alone takes 5.5 GB, and the gradient as much again
MESSAGES: tuple[Message, ...] = ("state", "object", "counterfactual")


@dataclass
class Problem:
    """A batch in a world of `M x N` compositions, all of them candidates, and its codebook."""

    z_s: Tensor
    z_o: Tensor
    logits_s: Tensor
    logits_o: Tensor
    states: Tensor
    objects: Tensor
    target: CandidateSet
    rows: Tensor
    fusion: Fusion
    n_objects: int
    host: tuple[Ints, Ints]  # states and objects

    @classmethod
    def of(cls, batch: int, m: int, n: int, seed: int = 0, device: str = "cpu") -> Problem:
        """Draw features, logits and labels."""
        g = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        unit = torch.nn.functional.normalize

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g).to(device)

        states = torch.randint(m, (batch,), generator=g)
        objects = torch.randint(n, (batch,), generator=g)
        return cls(
            unit(draw(batch, DIM), dim=-1).requires_grad_(),
            unit(draw(batch, DIM), dim=-1).requires_grad_(),
            (3 * draw(batch, m)).requires_grad_(),
            (3 * draw(batch, n)).requires_grad_(),
            states.to(device),
            objects.to(device),
            CandidateSet(m * n, None),
            unit(torch.randn(m * n, DIM), dim=-1).to(device),
            Fusion(DIM).to(device),
            n,
            (states.numpy(), objects.numpy()),
        )

    def leaves(self) -> list[Tensor]:
        return [self.z_s, self.z_o, self.logits_s, self.logits_o, *self.fusion.parameters()]

    def batch(self) -> MessageNodes:
        p_s, p_o = self.logits_s.softmax(-1), self.logits_o.softmax(-1)
        return MessageNodes(self.z_s, self.z_s, self.z_o, p_s, p_o, self.states, self.objects)

    def candidates(self) -> BatchCandidates:
        return BatchCandidates.of(*self.host, self.target, self.n_objects, self.states.device, diagonal=True)

    def step(self, dense: bool) -> Tensor:
        """Refine, backpropagate, commit; the result is the refined prototypes."""
        for leaf in self.leaves():
            leaf.grad = None
        batch = self.batch()
        candidates = self.candidates()
        gather = aggregate_densely if dense else mean_messages
        h_hat, _ = gather(batch, candidates, self.fusion, MESSAGES)
        (place,) = copy_to_device(self.rows.device, candidates.compositions)
        refined = blend(self.rows.index_select(0, place), h_hat, 0.9)
        refined.sum().backward()
        self.rows.index_copy_(0, place, refined.detach())
        return refined


def aggregate_densely(
    nodes: MessageNodes, candidates: BatchCandidates, fusion: Fusion, messages: tuple[str, ...]
) -> tuple[Tensor, None]:
    """`D_P^-1 W_P X_local` with the prototypes' rows of the adjacency matrix, `|C| x N_local`, in memory (Eq. 14-16).

    The rows of Algorithm 1's matrix that Eq. 16 leaves out are not computed.
    """
    i, j, m, n = candidates.i, candidates.j, candidates.row, candidates.column
    z_cf = fusion(nodes.z_s[i], nodes.z_o[j])
    count = len(candidates)
    x = torch.cat([nodes.z_s.new_zeros(count, DIM), nodes.z_s, nodes.z_o, z_cf])
    w_s = (nodes.p_s[:, candidates.states[m]] / candidates.partners_s[m]).T
    w_o = (nodes.p_o[:, candidates.objects[n]] / candidates.partners_o[n]).T
    own = nodes.p_s[i, nodes.states[i]] * nodes.p_o[j, nodes.objects[j]]
    here = candidates.cell[None] == torch.arange(count, device=x.device)[:, None]
    w_p = torch.cat([nodes.z_s.new_zeros(count, count), w_s, w_o, here * own], dim=1)
    return (w_p @ x) / w_p.sum(1, keepdim=True).clamp(min=1e-30), None


def peak_mib(problem: Problem, dense: bool) -> float:
    """The peak memory of torch's allocator: from its profiler on a CPU, from its statistics on a GPU."""
    if problem.rows.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        problem.step(dense)
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    with torch.profiler.profile(profile_memory=True, record_shapes=False) as profile:
        problem.step(dense)
    live = peak = 0
    for event in profile.events():
        live += event.self_cpu_memory_usage if hasattr(event, "self_cpu_memory_usage") else 0
        peak = max(peak, live)
    return peak / 2**20


def by_batch(sizes: Sequence[int] = (16, 32, 64, 128, 256, 512), device: str = "cpu") -> list[dict[str, float]]:
    found = []
    for size in sizes:
        problem = Problem.of(size, 115, 245, device=device)
        candidates = len(problem.candidates())
        works = {"factored": finished(lambda p=problem: p.step(dense=False), problem.rows.device)}
        if size <= DENSE:
            works["dense"] = finished(lambda p=problem: p.step(dense=True), problem.rows.device)
        times = alternate(works, rounds=5 if size < 128 else 3)
        row = {"batch": size, "candidates": candidates, "factored_ms": 1e3 * times["factored"]}
        row["factored_mib"] = peak_mib(problem, dense=False)
        if "dense" in times:
            row |= {"dense_ms": 1e3 * times["dense"], "dense_mib": peak_mib(problem, dense=True)}
        say("  ".join(f"{key} {value:.4g}" for key, value in row.items()))
        found.append(row)
    return found


def main() -> None:
    wanted = options(__doc__).parse_args()
    record = {"batches": by_batch(), "threads": torch.get_num_threads()}
    emit(record) if wanted.json else say(str(record))


if __name__ == "__main__":
    main()
