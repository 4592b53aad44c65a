"""The embedded benchmark `shapes`: small drawn pictures of objects in states, with held-out compositions.

Every picture is a pure function of the seed and its file name, so any one can be drawn alone and in any order. It
exists so that the whole pipeline runs anywhere in minutes; its numbers say nothing about photographs.
"""

from __future__ import annotations

import hashlib
import inspect
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from duplex import synthetic
from duplex.data.manifest import COLUMNS
from duplex.errors import DuplexError
from duplex.synthetic import HARSH, LOOKS, picture, stream
from duplex.system.files import replaced, write_text

SEED = 7
STATES = (
    *("red", "green", "blue", "yellow", "dark", "faded", "striped", "dotted"),
    *("checkered", "hollow", "blurry", "tiny", "broken", "glossy", "furry", "melted"),
)
OBJECTS = (
    *("circle", "star", "heart", "arrow", "moon", "square"),
    *("triangle", "cross", "ring", "drop", "house", "cloud"),
)
Pair = tuple[str, str]
STAMP = ".drawn"  # in the root of the pictures: what drew them
UNFINISHED = "unfinished\n"

ABSENT = 48  # a quarter of all 192 pairs: in no split, distractors of the open world
UNSEEN = 24  # pairs that only val lists, and as many that only test lists; the other 96 are trained on
SEEN = 24  # training pairs that val shows as well, and as many that test shows
HELD_OUT_IMAGES = (18, 32)  # least and most pictures of a pair in val or test
HEAD, SLOPE, TAIL = 240, 0.7, 8  # training pictures of the r-th pair: max(TAIL, HEAD / r ** SLOPE)


def shapes_manifest(seed: int = SEED, *, scale: float = 1.0) -> pd.DataFrame:
    """The benchmark's manifest. `scale` shrinks every picture count (at least one a pair stays), not the pairs."""
    if not 0 < scale <= 1:
        raise DuplexError(f"scale {scale} is not in (0, 1]; leave it out for the whole benchmark")
    rng = stream(seed, "manifest")
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
    """Training pairs (most frequent first), val's and test's unseen ones: disjoint, and every primitive is trained."""
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
    """Rows in a fixed order; a pair's pictures are numbered through its splits, so no picture is in two of them."""
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
    """The picture of one file name, such as `striped_heart/0007.png`."""
    state, _, kind = Path(image).parent.name.partition("_")
    if state not in STATES or kind not in OBJECTS:
        raise DuplexError(
            f"{image!r} is not a picture of shapes; `duplex prepare --dataset shapes` lists them in its manifest"
        )
    return picture(kind, LOOKS[state], HARSH, stream(seed, image))


def render_pictures(
    manifest: pd.DataFrame,
    root: Path,
    seed: int = SEED,
    progress: Callable[[Sequence[str]], Iterable[str]] | None = None,
) -> int:
    """Draw the pictures that `root` lacks or that are damaged and return how many. `progress` wraps the list of their
    names, as `rich.progress.track` does. A file appears whole or not at all; pictures of another seed or drawing are
    redrawn."""
    stamp, wanted = root / STAMP, _stamp(seed)
    current = stamp.is_file() and stamp.read_text(encoding="utf-8", errors="replace") == wanted
    if not current:
        theirs = None if stamp.exists() else next((name for name in manifest["image"] if (root / name).exists()), None)
        if theirs:
            raise DuplexError(
                f"{root} holds {theirs}, which was not drawn here; set another root in params.yaml, or move the folder"
            )
        write_text(stamp, UNFINISHED)  # a redraw that is killed leaves a mixture, which nobody may believe
    missing = [name for name in manifest["image"] if not (current and _sound(root / name))]
    for name in progress(missing) if progress and missing else missing:
        with replaced(root / name, sync=False) as scratch:
            draw(name, seed).save(scratch, format="PNG", compress_level=1)
    if not current:
        write_text(stamp, wanted)
    return len(missing)


def _sound(path: Path) -> bool:
    """Whether a picture is there and whole: every part of a PNG carries its own check."""
    try:
        with Image.open(path, formats=["PNG"]) as drawn:
            drawn.load()
    except (OSError, SyntaxError, ValueError, zlib.error, struct.error):
        return False
    return True


def _stamp(seed: int) -> str:
    """The seed and a digest of all that decides a pixel."""
    digest = hashlib.sha256(inspect.getsource(draw).encode())
    for path in sorted(Path(synthetic.__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return f"seed {seed}\ndrawing {digest.hexdigest()}\n"
