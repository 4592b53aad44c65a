"""Train the tiny CLIP that ships with the package.

    python -m benchmarks.train_tiny_encoder

Contrastive training on the corpus of `tiny_corpus.py` from random weights. Equal seeds give equal weights on one
machine. During training the vocabulary is that of the captions alone, which saves time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.tiny_corpus import SEED, training_example
from duplex.encoders.base import read_config
from duplex.encoders.libraries import open_clip
from duplex.encoders.tiny import CONFIG, WEIGHTS
from duplex.system.files import write_tensors

EXPECTED = "loss 1.17 after 14 epochs; 34 minutes on one thread of a busy two-core machine"
LEARNING_RATE, WEIGHT_DECAY, WARM_UP = 1.5e-3, 0.05, 200
MAX_LOGIT_SCALE = float(np.log(100.0))
console = Console(stderr=True)


@dataclass(frozen=True)
class Corpus:
    """Images with captions."""

    images: Tensor  # uint8 [n, 3, side, side]
    captions: Tensor  # int64 [n], row of `texts`
    texts: Tensor  # int64 [t, context_length], distinct captions in rows of `tokens`
    tokens: Tensor  # int64 [v], the vocabulary ids in use, ascending, so the end token stays the largest


def _render(number: int, side: int) -> tuple[NDArray[np.uint8], str]:
    image, caption = training_example(number)
    return np.asarray(image.resize((side, side), Image.Resampling.BICUBIC)), caption


def render_corpus(count: int, side: int, context_length: int) -> Corpus:
    """Draw `count` images with a process per core and tokenise their captions."""
    with ProcessPoolExecutor() as pool:
        drawn = list(pool.map(partial(_render, side=side), range(count), chunksize=500))
    distinct, captions = np.unique([caption for _, caption in drawn], return_inverse=True)
    images = torch.from_numpy(np.stack([pixels for pixels, _ in drawn])).permute(0, 3, 1, 2).contiguous()
    ids = open_clip.SimpleTokenizer(context_length=context_length)(distinct.tolist())
    tokens, texts = torch.unique(ids, return_inverse=True)
    return Corpus(images, torch.from_numpy(captions), texts, tokens)


def contrastive_loss(model: nn.Module, pixels: Tensor, captions: Tensor, texts: Tensor) -> Tensor:
    """CLIP's symmetric cross-entropy; images with the same caption share the target instead of competing."""
    distinct, row = torch.unique(captions, return_inverse=True)
    images = F.normalize(model.encode_image(pixels), dim=-1)  # type: ignore[operator]  # [B, d]
    words = F.normalize(model.encode_text(texts[distinct]), dim=-1)[row]  # type: ignore[operator]  # [B, d]
    logits = model.logit_scale.exp() * images @ words.T  # type: ignore[operator]  # [B, B]
    same = (row[:, None] == row).float()
    target = same / same.sum(dim=1, keepdim=True)
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))


def batches(count: int, epochs: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Yield shuffled rows for every epoch, in whole batches."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.randperm(count, generator=generator)[: count // batch * batch].view(-1, batch)


def optimiser(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW, without decay on gains, biases and the temperature, and a schedule of warm-up and cosine."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98))

    def rate(step: int) -> float:
        return min((step + 1) / WARM_UP, 0.5 * (1 + float(np.cos(np.pi * step / steps))))

    return adam, torch.optim.lr_scheduler.LambdaLR(adam, rate)


def fit(
    model: nn.Module, corpus: Corpus, epochs: int, batch: int, seed: int, norm: list[Tensor], save: Callable[[], Path]
) -> float:
    """Train in place, saving after every epoch, and return the last epoch's mean loss; `norm`: mean and deviation."""
    count = len(corpus.images)
    steps_per_epoch = count // batch
    adam, schedule = optimiser(model, steps_per_epoch * epochs)
    losses: list[float] = []
    started = time.monotonic()
    model.train()
    for step, rows in enumerate(batches(count, epochs, batch, seed), start=1):
        pixels = (corpus.images[rows].float() / 255 - norm[0]) / norm[1]
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
        if step % steps_per_epoch == 0:
            loss_mean = float(np.mean(losses[-steps_per_epoch:]))
            took = time.monotonic() - started
            console.print(f"epoch {step // steps_per_epoch}/{epochs}: loss {loss_mean:.3f}, {took:.0f} s")
            save()
    return float(np.mean(losses[-steps_per_epoch:]))


def save_weights(model: nn.Module, rows: Tensor, folder: Path) -> Path:
    """Write the weights in half precision. `model` embeds only the tokens in use; `rows` are their vocabulary ids."""
    tensors = {n: t.half() if t.is_floating_point() else t for n, t in model.state_dict().items()}
    tensors["token_rows"] = rows.to(torch.int32)
    path = folder / WEIGHTS.name
    write_tensors(path, {name: tensor.contiguous() for name, tensor in tensors.items()})
    return path


def main(
    images: int = 30_000, epochs: int = 14, batch: int = 128, seed: int = SEED, out: Path = WEIGHTS.parent
) -> None:
    """Train the tiny CLIP with so many passes over so many images, and write its weights."""
    config = read_config(CONFIG)
    preprocess, text = config["preprocess"], config["architecture"]["text_cfg"]
    console.print(f"expected: {EXPECTED}")
    corpus = render_corpus(images, preprocess["image_size"], text["context_length"])
    console.print(f"{images} images, {len(corpus.texts)} distinct captions, {len(corpus.tokens)} tokens")
    text["vocab_size"] = len(corpus.tokens)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = open_clip.CLIP(**config["architecture"]).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    norm = [torch.tensor(preprocess[name])[:, None, None] for name in ("mean", "std")]
    out.mkdir(parents=True, exist_ok=True)
    save = partial(save_weights, model, corpus.tokens, out)
    loss = fit(model, corpus, epochs, batch, seed, norm, save)
    console.print(f"loss {loss:.3f}; wrote {save()} ({save().stat().st_size / 1e6:.2f} MB)")


if __name__ == "__main__":
    main()
