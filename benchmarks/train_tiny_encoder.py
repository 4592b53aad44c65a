"""Train the tiny CLIP that ships with the package.

    python -m benchmarks.train_tiny_encoder [--out FOLDER]

From random weights, on the corpus of `tiny_corpus.py`: CLIP's contrastive loss of images and captions, and two linear
heads on the image embedding, which name what is drawn and are not kept. Products are computed in bfloat16. Equal seeds
give equal weights on one machine. During training the vocabulary is that of the captions alone, which saves time.
Without `--out`, the packaged weights are overwritten.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.tiny_corpus import SEED, STATES, Item, training_example
from benchmarks.tiny_drawing import OUTLINES
from duplex.encoders.base import read_config
from duplex.encoders.libraries import open_clip
from duplex.encoders.tiny import CONFIG, WEIGHTS
from duplex.system.files import write_tensors

EXPECTED = "loss 3.99 after 3 epochs; 13 minutes on two busy cores"
IMAGE_RATE, TEXT_RATE = 4e-3, 1e-3  # learning rates of the image tower and the heads, and of the text tower
WEIGHT_DECAY, WARM_UP = 0.05, 500
HORIZON = 4  # times the steps taken: the length of the rate's cosine, whose end would leave methods little to gain
SMOOTHING = 0.1  # of the heads' targets
CAPTIONED = 0.5  # share of a batch in the contrastive loss, as the text tower is slow; and the loss's weight
HEAD_SCALE = 12.0  # inverse temperature of the heads
MAX_LOGIT_SCALE = float(np.log(100.0))
KINDS = tuple(OUTLINES)
console = Console(stderr=True)


@dataclass(frozen=True)
class Corpus:
    """Images with captions, and what they show."""

    images: Tensor  # uint8 [n, 3, side, side]
    captions: Tensor  # int64 [n], row of `texts`
    texts: Tensor  # int64 [t, context_length], distinct captions in rows of `tokens`
    tokens: Tensor  # int64 [v], the vocabulary ids in use, ascending, so the end token stays the largest
    kinds: Tensor  # int64 [n], position in KINDS
    states: Tensor  # [n, len(STATES)], 1 at a single state, 0.5 at each of two


def _render(number: int, side: int) -> tuple[NDArray[np.uint8], Item]:
    image, item = training_example(number)
    return np.asarray(image.resize((side, side), Image.Resampling.BICUBIC)), item


def render_corpus(count: int, side: int, context_length: int) -> Corpus:
    """Draw `count` images with a process per core and tokenise their captions."""
    with ProcessPoolExecutor() as pool:
        drawn = list(pool.map(partial(_render, side=side), range(count), chunksize=500))
    items = [item for _, item in drawn]
    distinct, captions = np.unique([item.caption for item in items], return_inverse=True)
    images = torch.from_numpy(np.stack([pixels for pixels, _ in drawn])).permute(0, 3, 1, 2).contiguous()
    ids = open_clip.SimpleTokenizer(context_length=context_length)(distinct.tolist())
    tokens, texts = torch.unique(ids, return_inverse=True)
    kinds = torch.tensor([KINDS.index(item.kind) for item in items])
    states = torch.zeros(count, len(STATES))
    for row, item in enumerate(items):
        for state in item.states:
            states[row, STATES.index(state)] = 1.0 / len(item.states)
    return Corpus(images, torch.from_numpy(captions), texts, tokens, kinds, states)


class Head(nn.Module):
    """Cosine similarities of embeddings and a learned direction of each class."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.directions = nn.Parameter(torch.randn(classes, width) / width**0.5)

    def forward(self, z: Tensor) -> Tensor:
        return HEAD_SCALE * z @ F.normalize(self.directions, dim=-1).T  # [B, classes]


def contrastive_loss(images: Tensor, texts: Tensor, row: Tensor, scale: Tensor) -> Tensor:
    """CLIP's symmetric cross-entropy; images with the same caption share the target instead of competing.

    Args:
        images: embeddings of images, of unit length [B, d].
        texts: embeddings of their distinct captions, of unit length [T, d].
        row: the caption of each image, a row of `texts` [B].
        scale: the inverse temperature.
    """
    logits = scale * images @ texts[row].T  # [B, B]
    same = (row[:, None] == row).float()
    target = same / same.sum(dim=1, keepdim=True)
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))


def batches(count: int, epochs: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Yield shuffled rows for every epoch, in whole batches."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.randperm(count, generator=generator)[: count // batch * batch].view(-1, batch)


def optimiser(model: nn.Module, heads: list[nn.Module], steps: int) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """AdamW, without decay on gains, biases and the temperature; warm-up, then the first part of a cosine."""
    of_images = [*model.visual.parameters(), *(p for head in heads for p in head.parameters())]
    of_texts = [p for name, p in model.named_parameters() if not name.startswith("visual.")]
    groups = [
        {"params": [p for p in parameters if (p.ndim > 1) is decays], "weight_decay": decay, "lr": rate}
        for parameters, rate in ((of_images, IMAGE_RATE), (of_texts, TEXT_RATE))
        for decays, decay in ((True, WEIGHT_DECAY), (False, 0.0))
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.98))

    def factor(step: int) -> float:
        return min((step + 1) / WARM_UP, 0.5 * (1 + float(np.cos(np.pi * step / (HORIZON * steps)))))

    return adam, LambdaLR(adam, factor)


def fit(
    model: Any, corpus: Corpus, epochs: int, batch: int, seed: int, norm: list[Tensor], save: Callable[[], Path]
) -> float:
    """Train in place, saving after every epoch, and return the last epoch's mean loss; `norm`: mean and deviation."""
    count = len(corpus.images)
    steps_per_epoch = count // batch
    width = model.visual.head.proj.out_features
    of_kind, of_state = Head(width, len(KINDS)), Head(width, len(STATES))
    adam, schedule = optimiser(model, [of_kind, of_state], steps_per_epoch * epochs)
    parameters = [p for group in adam.param_groups for p in group["params"]]
    losses: list[float] = []
    started = time.monotonic()
    model.train()
    for step, rows in enumerate(batches(count, epochs, batch, seed), start=1):
        pixels = corpus.images[rows]
        flipped = torch.rand(len(rows)) < 0.5
        pixels = torch.where(flipped[:, None, None, None], pixels.flip(-1), pixels)
        pixels = ((pixels.float() / 255 - norm[0]) / norm[1]).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            images = model.encode_image(pixels)
        images = F.normalize(images.float(), dim=-1)
        captioned = int(CAPTIONED * batch)
        distinct, row = torch.unique(corpus.captions[rows[:captioned]], return_inverse=True)
        texts = F.normalize(model.encode_text(corpus.texts[distinct]), dim=-1)
        loss = CAPTIONED * contrastive_loss(images[:captioned], texts, row, model.logit_scale.exp())
        loss = loss + F.cross_entropy(of_kind(images), corpus.kinds[rows], label_smoothing=SMOOTHING)
        loss = loss + F.cross_entropy(of_state(images), corpus.states[rows], label_smoothing=SMOOTHING)
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
        schedule.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=MAX_LOGIT_SCALE)
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


def train(images: int, epochs: int, batch: int, seed: int, out: Path) -> None:
    """Train the tiny CLIP with so many passes over so many images, and write its weights to the folder `out`."""
    config = read_config(CONFIG)
    preprocess, text = config["preprocess"], config["architecture"]["text_cfg"]
    console.print(f"expected: {EXPECTED}")
    corpus = render_corpus(images, preprocess["image_size"], text["context_length"])
    console.print(f"{images} images, {len(corpus.texts)} distinct captions, {len(corpus.tokens)} tokens")
    text["vocab_size"] = len(corpus.tokens)
    torch.set_num_threads(2)
    torch.manual_seed(seed)
    model = open_clip.CLIP(**config["architecture"]).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    norm = [torch.tensor(preprocess[name])[:, None, None] for name in ("mean", "std")]
    out.mkdir(parents=True, exist_ok=True)
    save = partial(save_weights, model, corpus.tokens, out)
    loss = fit(model, corpus, epochs, batch, seed, norm, save)
    console.print(f"loss {loss:.3f}; wrote {save()} ({save().stat().st_size / 1e6:.2f} MB)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=120_000, help="number of images to draw")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the images")
    parser.add_argument("--batch", type=int, default=128, help="images per step")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of weights, order and flips")
    parser.add_argument("--out", type=Path, default=WEIGHTS.parent, help="folder to write; default: the package's")
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
