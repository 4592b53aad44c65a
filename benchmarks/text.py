"""Measure text prototypes of all training pairs, forward and backward: shared by prefix, against separate prompts.

    python -m benchmarks.text --json [--pairs FILE] [--vocabulary learned]

Medians over alternating rounds of one run: (full) prompts at the tower's whole context length, a sample of pairs,
scaled; (cut) at the longest prompt's length; (tree) shared by prefix; (floor) only the four matrix products per layer
for the tree's tokens and those of their gradients. `--steps` measures the text side of a training step instead, three
paths at once, in the sizes of three benchmarks; with `--adapter`, adapters in the tower's blocks are trained, too.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measure import begin_peak, emit, median_ratio, memory, options, say
from duplex.encoders.prompt_tree import PromptTree, pad_prompts
from duplex.encoders.text import ClipTextTower
from duplex.labels import LabelSpace, prompt_name
from duplex.methods.blocks import add_text_adapters
from duplex.options import FinetuneOptions

Pair = tuple[str, str]
SIZES = {"mit-states": (115, 245, 1262, 64), "ut-zappos": (16, 12, 83, 64), "cgqa": (413, 674, 5592, 32)}
LISTED = 2292  # pairs of C-GQA's validation split
TOWER = "ViT-L-14-quickgelu"  # with random weights
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
LEARNED = 3  # tokens after the start token
START, END, CONTEXT = 0, 1, 2  # lexicon rows; the rows of three contexts follow


def random_tower(
    name: str, *, layers: int | None = None, width: int | None = None, precision: str = "fp32", device: str = "cpu"
) -> ClipTextTower:
    """A text tower of an open_clip architecture with random weights, without an image tower."""
    from duplex.encoders.libraries import open_clip

    config = open_clip.get_model_config(name)
    text = dict(config["text_cfg"])
    text["layers"] = layers or text["layers"]
    if width:
        text |= {"width": width, "heads": max(1, width // 64)}
    torch.manual_seed(0)
    model = open_clip.model._build_text_tower(config["embed_dim"], text, quick_gelu=config.get("quick_gelu", False))
    return ClipTextTower(model.to(device), precision=precision)


def read_pairs(path: Path | None) -> list[Pair]:
    """Read `state object` lines; without a file, generate as many pairs and names as MIT-States has."""
    if path is None:
        states, objects, count, _ = SIZES["mit-states"]
        return made_up(states, objects, count)
    pairs = [(line.split()[0], line.split()[1]) for line in path.read_text().splitlines() if line.strip()]
    return list(dict.fromkeys(pairs))


def made_up(states: int, objects: int, count: int) -> list[Pair]:
    """`count` distinct pairs in which every state and object occurs."""
    numbers = np.random.default_rng(0).permutation(states * objects)
    cover = [i % states * objects + i % objects for i in range(max(states, objects))]
    chosen = list(dict.fromkeys([*cover, *numbers.tolist()]))[:count]
    return [(f"state {c // objects}", f"object {c % objects}") for c in chosen]


def cgqa_labels() -> LabelSpace:
    """Labels of C-GQA's size, in which each state and object is seen and half of validation's pairs are not."""
    states, objects, seen, _ = SIZES["cgqa"]
    pairs = made_up(states, objects, seen + LISTED // 2)
    return LabelSpace.from_pairs({"train": pairs[:seen], "val": [*pairs[: LISTED - LISTED // 2], *pairs[seen:]]})


@dataclass(frozen=True)
class Names:
    """Lexicon rows per state and object: one learned vector, or the tokens of the name."""

    states: dict[str, list[int]]
    objects: dict[str, list[int]]
    size: int  # of the lexicon

    @classmethod
    def of(cls, pairs: list[Pair], vocabulary: str, tower: ClipTextTower) -> Names:
        states, objects = sorted({s for s, _ in pairs}), sorted({o for _, o in pairs})
        first = CONTEXT + 3 * LEARNED
        if vocabulary == "learned":
            end = first + len(states)
            rows = {s: [first + m] for m, s in enumerate(states)}, {o: [end + n] for n, o in enumerate(objects)}
            return cls(*rows, end + len(objects))
        ids = {name: tower.tokens(prompt_name(name)) for name in (*states, *objects)}
        row = {token: first + i for i, token in enumerate(sorted({t for tokens in ids.values() for t in tokens}))}
        named = {name: [row[token] for token in tokens] for name, tokens in ids.items()}
        return cls({s: named[s] for s in states}, {o: named[o] for o in objects}, first + len(row))

    def pairs(self, pairs: list[Pair]) -> list[list[int]]:
        begin = [START, *range(CONTEXT, CONTEXT + LEARNED)]
        return [[*begin, *self.states[s], *self.objects[o], END] for s, o in pairs]

    def alone(self) -> list[list[int]]:
        """The prompts of single states and objects, each path with its own context."""
        paths = []
        for path, rows in enumerate((self.states, self.objects), start=1):
            begin = [START, *range(CONTEXT + path * LEARNED, CONTEXT + (path + 1) * LEARNED)]
            paths += [[*begin, *row, END] for row in rows.values()]
        return paths


@dataclass
class Stopwatch:
    """Measures seconds and peak memory of named pieces of work, over alternating rounds."""

    device: torch.device
    clock: Callable[[], float] = time.perf_counter
    live: bool = True  # False while warming up
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak: dict[str, float] = field(default_factory=dict)

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        base = self._reset()
        start = self.clock()
        result = work()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self.live:
            self.seconds.setdefault(name, []).append(self.clock() - start)
            self.peak[name] = max(self.peak.get(name, 0.0), self._peak() - base)
        return result

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def _reset(self) -> float:
        """Start a peak; the result is the memory in use, in GiB (on a CPU as Linux counts it)."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated() / 2**30
        return begin_peak() / 2**30

    def _peak(self) -> float:
        return (torch.cuda.max_memory_allocated() if self.device.type == "cuda" else memory("VmHWM")) / 2**30


def floor(tower: ClipTextTower, tokens: int, device: torch.device) -> Callable[[], None]:
    """Run only the matrix products, forward and for the gradients of their inputs, into preallocated buffers."""
    weights: list[Tensor] = []
    for block in tower.blocks:
        weights += [block.attn.in_proj_weight, block.attn.out_proj.weight]
        weights += [block.mlp.c_fc.weight, block.mlp.c_proj.weight]
    widths = {size for weight in weights for size in weight.shape}
    inputs = {size: torch.randn(tokens, size, device=device, dtype=tower.dtype) for size in widths}
    outputs = {size: torch.zeros_like(x) for size, x in inputs.items()}

    def run() -> None:
        for weight in weights:
            torch.mm(inputs[weight.shape[1]], weight.t(), out=outputs[weight.shape[0]])
        for weight in reversed(weights):
            torch.mm(inputs[weight.shape[0]], weight, out=outputs[weight.shape[1]])

    return run


def gradient(encode: Callable[[Tensor], Tensor], learned: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Features, and the gradient of `Σ weight · feature` with respect to the lexicon."""
    features = encode(learned)
    (grad,) = torch.autograd.grad((features * weight).sum(), learned)
    return features.detach(), grad


def plain(tower: ClipTextTower, rows: np.ndarray, learned: Tensor, weight: Tensor, full: bool) -> tuple[Tensor, Tensor]:
    """Encode each prompt separately, cut to the longest or, with `full`, padded to the context length."""
    padding = torch.zeros(tower.width, device=learned.device) if full else None
    return gradient(lambda lexicon: tower.encode_separately(rows, lexicon, padding), learned, weight)


def chunked(
    tower: ClipTextTower, rows: np.ndarray, learned: Tensor, weight: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Run `plain`, cut, in chunks whose gradients are added."""
    features, total = [], torch.zeros_like(learned)
    for start in range(0, len(rows), chunk):
        part, grad = plain(tower, rows[start : start + chunk], learned, weight[start : start + chunk], full=False)
        features.append(part)
        total += grad
    return torch.cat(features), total


def compare(tower: ClipTextTower, prompts: list[list[int]], size: int, sizes: Options) -> dict[str, Any]:
    """Measure tree, cut, full and floor in alternating rounds."""
    device = torch.device(sizes.device)
    tree, rows = PromptTree.of(prompts), pad_prompts(prompts)
    learned = (torch.randn(size, tower.width, device=device) * 0.02).requires_grad_()
    weight = torch.randn(len(prompts), tower.dim, device=device) / len(prompts)
    watch, products = Stopwatch(device, sizes.clock), floor(tower, tree.tokens, device)
    sample, chunk = rows[: sizes.sample], sizes.chunk or len(prompts)
    for step in range(1 + sizes.rounds):
        watch.live = step >= 1
        watch.run("floor", products)
        shared = watch.run("tree", lambda: gradient(lambda x: tower.encode(tree, x), learned, weight))
        cut = watch.run("cut", lambda: chunked(tower, rows, learned, weight, chunk))
        watch.run("full_sample", lambda: plain(tower, sample, learned, weight[: len(sample)], full=True))
        say(f"round {step + 1}")
    full = watch.median("full_sample") * len(rows) / len(sample)
    return {
        "prompts": len(prompts),
        "tokens": {"full": tower.context_length * len(rows), "cut": rows.size, "tree": tree.tokens},
        "seconds": {name: watch.median(name) for name in watch.seconds} | {"full": full},
        "peak_gib": watch.peak,
        "speedup_over_full": full / watch.median("tree"),
        "speedup_over_cut": median_ratio(watch.seconds["cut"], watch.seconds["tree"]),
        "times_floor": median_ratio(watch.seconds["tree"], watch.seconds["floor"]),
        "max_error": (shared[0] - cut[0]).abs().max().item(),
        "max_gradient_error": ((shared[1] - cut[1]).abs().max() / cut[1].abs().max()).item(),
    }


def training_step(tower: ClipTextTower, name: str, sizes: Options, *, checkpoint: bool = False) -> dict[str, Any]:
    """Measure the text side of a step: three paths in one tree, three cross-entropies over a batch, Adam."""
    states, objects, count, batch = SIZES[name]
    device = torch.device(sizes.device)
    pairs = made_up(states, objects, count)
    names = Names.of(pairs, "learned", tower)
    tree = PromptTree.of(names.pairs(pairs) + names.alone())
    learned = torch.nn.Parameter(torch.randn(names.size, tower.width, device=device) * 0.02)
    images = F.normalize(torch.randn(batch, tower.dim, device=device), dim=-1)
    trained = [learned]
    if sizes.adapter is not None:
        tower = copy.copy(tower)
        trained += add_text_adapters(tower, FinetuneOptions(1, text=sizes.adapter)).to(device).parameters()
    optimiser, watch = torch.optim.Adam(trained, 1e-4), Stopwatch(device, sizes.clock)
    counts = count, states, objects

    def step() -> None:
        prototypes = F.normalize(tower.encode(tree, learned, checkpoint=checkpoint), dim=-1).split(counts)
        losses = [F.cross_entropy(images @ t.T / 0.01, torch.arange(batch, device=device) % len(t)) for t in prototypes]
        optimiser.zero_grad()
        torch.stack(losses).sum().backward()
        optimiser.step()

    for number in range(1 + sizes.rounds):
        watch.live = number >= 1
        watch.run("step", step)
    say(f"{name}: {watch.median('step'):.3f} s a step, {watch.peak['step']:.2f} GiB")
    seconds, peak = watch.median("step"), watch.peak["step"]
    return {"prompts": tree.prompts, "tokens": tree.tokens, "seconds": seconds, "peak_gib": peak}


@dataclass(frozen=True)
class Options:
    device: str
    clock: Callable[[], float]
    rounds: int
    sample: int  # pairs encoded at full length
    chunk: int | None = None  # prompts encoded at once when cut; None: all
    adapter: str | None = None


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--pairs", type=Path, help="file with a pair `state object` per line")
    parser.add_argument("--vocabulary", default="learned", choices=("learned", "fixed"), help="or tokens of names")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick trial")
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="cpu: processor time, on a busy machine")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--sample", type=int, default=32, help="pairs encoded at full length; the time is scaled")
    parser.add_argument("--steps", action="store_true", help="measure training steps of three sizes instead")
    parser.add_argument("--adapter", help="with --steps: what is trained in the blocks, such as bottleneck")
    parser.add_argument("--checkpoint", action="store_true", help="with --steps: recompute layers")
    wanted = parser.parse_args()
    if wanted.threads:
        torch.set_num_threads(wanted.threads)
    sizes = Options("cpu", CLOCKS[wanted.clock], rounds=3, sample=wanted.sample, adapter=wanted.adapter)
    tower = random_tower(TOWER, layers=wanted.layers)
    record: dict[str, Any]
    if wanted.steps:
        record = {name: training_step(tower, name, sizes, checkpoint=wanted.checkpoint) for name in SIZES}
    else:
        pairs = read_pairs(wanted.pairs)
        names = Names.of(pairs, wanted.vocabulary, tower)
        record = compare(tower, names.pairs(pairs), names.size, sizes)
    record |= {"tower": TOWER, "clock": wanted.clock, "threads": torch.get_num_threads()}
    emit(record) if wanted.json else say(str(record))


if __name__ == "__main__":
    main()
