"""The embedded benchmark `shapes`: small drawn images of objects in states, with held-out compositions.

Every image is a pure function of the seed and its file name, so images can be drawn alone and in any order. The
benchmark lets the whole pipeline run anywhere in minutes; its results say nothing about photographs.
"""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from duplex import synthetic
from duplex.data.image_files import verify_image
from duplex.data.manifest import COLUMNS
from duplex.errors import DuplexError
from duplex.synthetic import HARSH, LOOKS, draw_image, random_stream
from duplex.system.files import replace_file, write_text
from duplex.system.progress import track

SEED = 7
STATES = (
    "red", "green", "blue", "yellow", "dark", "faded", "striped", "dotted",
    "checkered", "hollow", "blurry", "tiny", "broken", "glossy", "furry", "melted",
)  # fmt: skip
OBJECTS = (
    "circle", "star", "heart", "arrow", "moon", "square", "triangle", "cross", "ring", "drop", "house", "cloud"
)  # fmt: skip
Pair = tuple[str, str]
STAMP = ".drawn"  # file in the root of the images: seed and hash of the code that drew them
UNFINISHED = "unfinished\n"

ABSENT = 48  # a quarter of all 192 pairs: in no split, distractors of the open world
UNSEEN = 24  # pairs of val alone, and of test alone; the other 96 are trained on
SEEN = 24  # training pairs that are in val, too, and as many in test
HELD_OUT_IMAGES = (18, 32)  # least and most images of a pair in val or test
HEAD, SLOPE, TAIL = 240, 0.7, 8  # training images of the r-th pair: max(TAIL, HEAD / r ** SLOPE)


def shapes_manifest(seed: int = SEED, *, scale: float = 1.0) -> pd.DataFrame:
    """The manifest of the drawn benchmark `shapes`.

    Args:
        scale: share in (0, 1] of the images of each pair to list; at least one image remains.
    """
    if not 0 < scale <= 1:
        raise DuplexError(f"scale {scale} is not in (0, 1]; leave it out for the whole benchmark")
    rng = random_stream(seed, "manifest")
    train, val_unseen, test_unseen = _pairs(rng)
    ranks = 1.0 + np.arange(len(train))
    listed: dict[str, list[tuple[Pair, int]]] = {
        "train": list(zip(train, np.maximum(TAIL, HEAD / ranks**SLOPE).round().astype(int).tolist(), strict=True))
    }
    for split, unseen in (("val", val_unseen), ("test", test_unseen)):
        pairs = [*(train[i] for i in rng.permutation(len(train))[:SEEN]), *unseen]
        counts = rng.integers(HELD_OUT_IMAGES[0], HELD_OUT_IMAGES[1] + 1, size=len(pairs)).tolist()
        listed[split] = list(zip(pairs, counts, strict=True))
    return _table(listed, scale)


def _pairs(rng: np.random.Generator) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Draw three disjoint lists of pairs: those of training, unseen ones of val, unseen ones of test."""
    states, objects = rng.permutation(STATES).tolist(), rng.permutation(OBJECTS).tolist()
    # Two rounds along diagonals: each state and each object is in at least two training pairs.
    rounds = max(len(states), len(objects))
    cover = {(states[i % len(states)], objects[(i + k) % len(objects)]) for k in (0, 1) for i in range(rounds)}
    rest = [(s, o) for s in STATES for o in OBJECTS if (s, o) not in cover]
    rest = [rest[i] for i in rng.permutation(len(rest))]
    val, test, free = rest[:UNSEEN], rest[UNSEEN : 2 * UNSEEN], rest[2 * UNSEEN + ABSENT :]
    train = [*sorted(cover), *free]
    return [train[i] for i in rng.permutation(len(train))], val, test


def _table(listed: dict[str, list[tuple[Pair, int]]], scale: float) -> pd.DataFrame:
    used: dict[Pair, int] = {}
    rows = []
    for split, pairs in listed.items():
        for (state, kind), count in sorted(pairs):
            first = used.get((state, kind), 0)
            used[state, kind] = first + max(1, round(count * scale))
            numbers = range(first, used[state, kind])
            rows += [(f"{state}_{kind}/{number:04d}.png", state, kind, split) for number in numbers]
    return pd.DataFrame(rows, columns=COLUMNS, dtype=str)


def draw(image: str, seed: int = SEED) -> Image.Image:
    """Draw the `shapes` image that belongs to a file name such as `striped_heart/0007.png`."""
    state, _, kind = Path(image).parent.name.partition("_")
    if state not in STATES or kind not in OBJECTS:
        raise DuplexError(
            f"{image!r} is not an image of shapes; `duplex prepare --dataset shapes` lists them in its manifest"
        )
    return draw_image(kind, LOOKS[state], HARSH, random_stream(seed, image))


def render_images(manifest: pd.DataFrame, root: Path, seed: int = SEED) -> int:
    """Draw the images in a `shapes` table that are missing below `root` or damaged; return their number.

    Images drawn with another seed or by other code are drawn again. A file appears complete or not at all. Raise
    DuplexError if `root` holds images from elsewhere.
    """
    stamp, wanted = root / STAMP, _stamp(seed)
    current = stamp.is_file() and stamp.read_text(encoding="utf-8", errors="replace") == wanted
    if not current:
        foreign = None if stamp.exists() else next((name for name in manifest["image"] if (root / name).exists()), None)
        if foreign:
            raise DuplexError(
                f"{root} holds {foreign}, which is not an image of shapes; set another root in params.yaml, "
                "or move the folder"
            )
        write_text(stamp, UNFINISHED)  # if this is interrupted, old and new images are mixed and must be drawn again
    missing = [name for name in manifest["image"] if not current or verify_image(root / name)]
    for name in track(missing, "drawing images", len(missing)):
        with replace_file(root / name, sync=False) as scratch:
            draw(name, seed).save(scratch, format="PNG", compress_level=1)
    if not current:
        write_text(stamp, wanted)
    return len(missing)


def _stamp(seed: int) -> str:
    digest = hashlib.sha256(inspect.getsource(draw).encode())
    for path in sorted(Path(synthetic.__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return f"seed {seed}\ndrawing {digest.hexdigest()}\n"
