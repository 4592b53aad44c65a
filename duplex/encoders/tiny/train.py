"""Train the tiny CLIP: `python -m duplex.encoders.tiny.train`.

Contrastive training on the corpus of `corpus.py`, from nothing. The same seed on the same machine gives the same
weights. While training, the vocabulary is the captions' own tokens alone: the other rows would only cost time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from duplex.encoders.tiny import HERE, build, load_config, save_state
from duplex.encoders.tiny.corpus import SEED, example

EXPECTED = "loss 1.17 after 14 epochs; 34 minutes on one thread of a busy two-core machine"
LEARNING_RATE, WEIGHT_DECAY, WARM_UP = 1.5e-3, 0.05, 200
MAX_LOGIT_SCALE = float(np.log(100.0))
talk = Console(stderr=True)


@dataclass(frozen=True)
class Corpus:
    pictures: Tensor  # uint8 [n, 3, side, side]
    captions: Tensor  # int64 [n], row of `texts`
    texts: Tensor  # int64 [t, context_length], distinct captions in rows of `tokens`
    tokens: Tensor  # int64 [v], the vocabulary ids in use, ascending, so the end token stays the largest


@dataclass(frozen=True)
class Plan:
    epochs: int
    batch: int
    seed: int  # of the order of pictures
    mean: Tensor  # [3, 1, 1]
    std: Tensor  # [3, 1, 1]


def _render(number: int, side: int) -> tuple[NDArray[np.uint8], str]:
    image, caption = example(number)
    return np.asarray(image.resize((side, side), Image.Resampling.BICUBIC)), caption


def render_corpus(count: int, side: int, context_length: int) -> Corpus:
    """Draw `count` pictures on every core and tokenise their captions."""
    from duplex.encoders.openclip import SimpleTokenizer

    with ProcessPoolExecutor() as pool:
        drawn = list(pool.map(partial(_render, side=side), range(count), chunksize=500))
    distinct, captions = np.unique([caption for _, caption in drawn], return_inverse=True)
    pictures = torch.from_numpy(np.stack([pixels for pixels, _ in drawn])).permute(0, 3, 1, 2).contiguous()
    ids = SimpleTokenizer(context_length=context_length)(distinct.tolist())
    tokens, texts = torch.unique(ids, return_inverse=True)
    return Corpus(pictures, torch.from_numpy(captions), texts, tokens)


def contrastive_loss(model: nn.Module, pixels: Tensor, captions: Tensor, texts: Tensor) -> Tensor:
    """CLIP's symmetric cross-entropy; pictures with the very same caption share it instead of competing for it."""
    distinct, row = torch.unique(captions, return_inverse=True)
    images = F.normalize(model.encode_image(pixels), dim=-1)  # type: ignore[operator]  # [B, d]
    words = F.normalize(model.encode_text(texts[distinct]), dim=-1)[row]  # type: ignore[operator]  # [B, d]
    logits = model.logit_scale.exp() * images @ words.T  # type: ignore[operator]  # [B, B]
    same = (row[:, None] == row).float()
    target = same / same.sum(dim=1, keepdim=True)
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))


def batches(count: int, plan: Plan) -> Iterator[Tensor]:
    """Shuffled rows, epoch after epoch, only whole batches."""
    generator = torch.Generator().manual_seed(plan.seed)
    for _ in range(plan.epochs):
        yield from torch.randperm(count, generator=generator)[: count // plan.batch * plan.batch].view(-1, plan.batch)


def optimiser(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW with a warm-up and a cosine; no decay on gains, biases and the temperature."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98))

    def rate(step: int) -> float:
        return min((step + 1) / WARM_UP, 0.5 * (1 + float(np.cos(np.pi * step / steps))))

    return adam, torch.optim.lr_scheduler.LambdaLR(adam, rate)


def fit(model: nn.Module, corpus: Corpus, plan: Plan, save: Callable[[], Path]) -> float:
    """Train in place, saving after every epoch, and return the last epoch's mean loss."""
    count = len(corpus.pictures)
    a_epoch = count // plan.batch
    adam, schedule = optimiser(model, a_epoch * plan.epochs)
    losses: list[float] = []
    started = time.monotonic()
    model.train()
    for step, rows in enumerate(batches(count, plan), start=1):
        pixels = (corpus.pictures[rows].float() / 255 - plan.mean) / plan.std
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        loss = contrastive_loss(model, pixels, corpus.captions[rows], corpus.texts)
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        schedule.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=MAX_LOGIT_SCALE)  # type: ignore[operator]
        losses.append(loss.item())
        if step % a_epoch == 0:
            loss_mean = float(np.mean(losses[-a_epoch:]))
            took = time.monotonic() - started
            talk.print(f"epoch {step // a_epoch}/{plan.epochs}: loss {loss_mean:.3f}, {took:.0f} s")
            save()
    return float(np.mean(losses[-a_epoch:]))


def main(
    *,
    pictures: Annotated[int, typer.Option(help="size of the corpus")] = 30_000,
    epochs: Annotated[int, typer.Option(help="passes over it")] = 14,
    batch: Annotated[int, typer.Option(help="pictures a step")] = 128,
    seed: Annotated[int, typer.Option(help="of the first weights and the order of pictures")] = SEED,
    threads: Annotated[int, typer.Option(help="of the training; more only help where cores are idle")] = 1,
    out: Annotated[Path, typer.Option(help="folder for weights.safetensors")] = HERE,
) -> None:
    """Train the tiny CLIP and write its weights."""
    config = load_config()
    looks, text = config["preprocess"], config["architecture"]["text_cfg"]
    talk.print(f"expected: {EXPECTED}")
    corpus = render_corpus(pictures, looks["image_size"], text["context_length"])
    talk.print(f"{pictures} pictures, {len(corpus.texts)} distinct captions, {len(corpus.tokens)} tokens")
    text["vocab_size"] = len(corpus.tokens)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model = build(config).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    mean, std = (torch.tensor(looks[name])[:, None, None] for name in ("mean", "std"))
    out.mkdir(parents=True, exist_ok=True)
    save = partial(save_state, model, corpus.tokens, out)
    loss = fit(model, corpus, Plan(epochs, batch, seed, mean, std), save)
    talk.print(f"loss {loss:.3f}; wrote {save()} ({save().stat().st_size / 1e6:.2f} MB)")


if __name__ == "__main__":
    typer.run(main)
