"""Time training steps of the paper's configurations beside a bare loop over the same towers.

    python -m benchmarks.bare --json [--encoder ViT-B-32] [--batch 2] [--precision fp32]

The bare loop has open_clip's towers, the same adapters, autocast, torch's optimiser (fused on a GPU) and three
cross-entropies (pairs, states, objects), and nothing else; it encodes each prompt by itself, cut to the longest.
Weights and images are random, labels have the sizes of UT-Zappos. Both begin at the inputs of the image tower's first
block, and their steps alternate. `ratio` is the median of the rounds' ratios, `images, ratio` that of forward and
backward through the image tower alone. On a GPU whose peak is known, `bare, share of peak` is the model FLOPs
utilisation of the bare loop, and `share of peak` that of ours: the bare loop's products over our time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import all_rounds, emit, finished, median_ratio, options, say
from benchmarks.paper import DATASET, ENCODER, Tower
from duplex.config.params import Params, load_params
from duplex.methods.adapters import PARALLEL_SCALE
from duplex.methods.base import Batch
from duplex.methods.layers import Bottleneck
from duplex.methods.paths import Paths
from duplex.options import FinetuneOptions, TrainingOptions
from duplex.system.threads import PRECISIONS, float32_arithmetic
from duplex.training.compiled import compiled_encoders
from duplex.training.loop import make_optimiser, optimiser_step
from duplex.training.run import MethodSpec

ROWS = ("cso_paper", "duplex_paper")
RATE = 1e-5
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense products in bf16 a second (NVIDIA's data sheets)


class BareTower(nn.Module):
    """open_clip's image tower from its first block on, with parallel bottlenecks."""

    def __init__(self, visual: Any, finetune: FinetuneOptions) -> None:
        super().__init__()
        self.frozen = (visual,)  # in a tuple, so that its weights are not trained
        width = visual.transformer.width
        pairs = 2 * len(visual.transformer.resblocks)
        self.adapters = nn.ModuleList(Bottleneck(width, finetune.inner_width, finetune.dropout) for _ in range(pairs))

    def forward(self, x: Tensor) -> Tensor:
        (visual,) = self.frozen
        for place, block in enumerate(visual.transformer.resblocks):
            first, second = self.adapters[2 * place], self.adapters[2 * place + 1]
            h = block.ln_1(x)
            x = x + block.attn(h, h, h, need_weights=False)[0] + PARALLEL_SCALE * first(x)
            x = x + block.mlp(block.ln_2(x)) + PARALLEL_SCALE * second(x)
        features: Tensor = visual._pool(x)[0] @ visual.proj
        return features


def bare_step(tower: Tower, images: BareTower, paths: Paths, batch: Batch, device: str) -> Callable[[], Tensor]:
    """A step of the bare loop, with the prompts of a method's `paths`."""
    prompts = paths.prompts
    assert prompts.learned_rows is not None
    learned = nn.Parameter(prompts.learned_rows.detach().clone())
    [(_, sequences)] = prompts.all_sequences(paths.negatives.cpu().numpy())
    sizes = [len(paths.negatives), len(tower.labels.states), len(tower.labels.objects)]
    m, n = batch.compositions // sizes[2], batch.compositions % sizes[2]
    targets = [torch.searchsorted(paths.negatives, batch.compositions), m, n]
    fused = True if device == "cuda" else None
    optimiser = torch.optim.Adam([learned, *images.parameters()], lr=RATE, fused=fused)

    def step() -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        z = normalize(bare_features(tower, images, batch), dim=-1)
        lexicon = torch.cat([prompts.frozen_rows, learned])
        t = normalize(tower.text.encode_plain(sequences, lexicon), dim=-1)
        logits = paths.scale * z @ t.T
        losses = [cross_entropy(part, target) for part, target in zip(logits.split(sizes, 1), targets, strict=True)]
        loss = torch.stack(losses).sum()
        loss.backward()
        optimiser.step()
        return loss.detach()

    return step


def bare_features(tower: Tower, images: BareTower, batch: Batch) -> Tensor:
    x = batch.inputs["block_inputs"]
    with torch.autocast(x.device.type, torch.bfloat16, enabled=tower.precision == "bf16"):
        return images(x).float()


def our_step(method: Any, batch: Batch, precision: Any) -> Callable[[], dict[str, Tensor]]:
    settings = TrainingOptions(learning_rate=RATE, batch_size=len(batch), epochs=1, precision=precision)
    optimiser = make_optimiser(method.train(), settings)
    rows = torch.arange(len(batch))
    return lambda: optimiser_step(method, batch, rows, settings, optimiser)


def measure(
    rows: Iterable[str], params: Params, encoder: str, batch: int, device: str, rounds: int, precision: Any = "fp32"
) -> dict[str, dict[str, Any]]:
    """Seconds of our step and of the bare one, their ratio, and on a known GPU the shares of its peak."""
    tower = Tower.of(encoder, device, precision)
    examples = tower.batch(batch, device)
    found: dict[str, dict[str, Any]] = {}
    for name in rows:
        finetune = params.finetune(name, DATASET)
        assert isinstance(finetune, FinetuneOptions)
        method = tower.method(params.entry(name).kind, params.method(name, DATASET), finetune, device)
        torch.manual_seed(0)
        images = BareTower(tower.encoder.visual, finetune).to(device).train()
        bare = bare_step(tower, images, method.method.paths, examples, device)
        works: dict[str, Callable[[], object]] = {
            "ours": our_step(method, examples, precision),
            "bare": bare,
            "our images": partial(_images, method.blocks.features, examples.inputs["block_inputs"]),
            "bare images": partial(_images, partial(bare_features, tower, images), examples),
        }
        with float32_arithmetic(precision):
            with FlopCounterMode(display=False) as counter:
                bare()
            works = {kind: finished(work, torch.device(device)) for kind, work in works.items()}
            seconds = all_rounds(works, rounds, warm=1)
        found[name] = summarised(seconds, counter.get_total_flops(), device)
        say(f"{name}, {precision}: " + "  ".join(f"{key} {value:.4g}" for key, value in found[name].items()))
    return found


def measure_compiled(
    row: str, params: Params, encoder: str, batch: int, device: str, rounds: int, precision: Any = "fp32"
) -> dict[str, float]:
    """Seconds of a step with and without `training.compile`, one after the other, and seconds until it is compiled."""
    tower = Tower.of(encoder, device, precision)
    examples = tower.batch(batch, device)
    finetune = params.finetune(row, DATASET)
    method = tower.method(params.entry(row).kind, params.method(row, DATASET), finetune, device)
    settings = TrainingOptions(learning_rate=RATE, batch_size=batch, epochs=1, precision=precision, compile=True)
    with float32_arithmetic(precision):
        step = finished(our_step(method, examples, precision), torch.device(device))
        found = {"step": statistics.median(all_rounds({"step": step}, rounds, warm=1)["step"])}
        began = time.perf_counter()
        with compiled_encoders(method, examples, settings, row):
            found["compiling"] = time.perf_counter() - began
            if method.blocks.compiled is not None:
                found["compiled"] = statistics.median(all_rounds({"step": step}, rounds, warm=3)["step"])
    say(f"{row}, {precision}: " + "  ".join(f"{key} {value:.4g}" for key, value in found.items()))
    return found


def measure_steps(
    rows: Iterable[MethodSpec], tower: Tower, batch: int, device: str, rounds: int, precision: Any
) -> dict[str, float]:
    """Seconds of a step of each row, in the tower's precision."""
    examples = tower.batch(batch, device)
    found: dict[str, float] = {}
    for spec in rows:
        method = tower.method(spec.kind, spec.options, spec.finetune, device)
        with float32_arithmetic(precision):
            step = finished(our_step(method, examples, precision), torch.device(device))
            found[spec.name] = statistics.median(all_rounds({"step": step}, rounds, warm=1)["step"])
        say(f"{spec.name}, {precision}: {found[spec.name]:.4g}")
    return found


def _images(features: Callable[[Any], Tensor], inputs: Any) -> None:
    features(inputs).sum().backward()


def summarised(seconds: dict[str, list[float]], flops: float, device: str) -> dict[str, float]:
    medians = {kind: statistics.median(times) for kind, times in seconds.items()}
    row = {**medians, "ratio": median_ratio(seconds["ours"], seconds["bare"])}
    row |= {"images, ratio": median_ratio(seconds["our images"], seconds["bare images"]), "bare, TFLOP": flops / 1e12}
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    for gpu, peak in PEAKS.items():
        if gpu in name:
            row["share of peak"] = flops / medians["ours"] / peak
            row["bare, share of peak"] = flops / medians["bare"] / peak
    return row


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--encoder", default=ENCODER, help="a ViT of open_clip")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="fp32", choices=PRECISIONS)
    given = parser.parse_args()
    found = measure(ROWS, load_params(), given.encoder, given.batch, "cpu", given.rounds, given.precision)
    emit(found) if given.json else say(str(found))


if __name__ == "__main__":
    main()
