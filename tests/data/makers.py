"""Made-up data sets in every layout, drawn as the embedded benchmark draws its own: its words are known to `tiny`."""

import io
from collections.abc import Iterable
from functools import cache
from itertools import product
from pathlib import Path

import pandas as pd
import torch
from PIL import Image

from duplex.data.shapes import draw
from duplex.data.sources import FOLDER, METADATA
from duplex.data.tables import read_benchmarks

STATES, OBJECTS = ("red", "striped", "hollow", "green"), ("circle", "star", "heart", "moon")
VAL_UNSEEN, TEST_UNSEEN = (("red", "star"), ("striped", "heart")), (("hollow", "moon"), ("green", "circle"))
PER_PAIR = 4
QUIRKS = ("spaces", "archive", "flat")  # as MIT-States, UT-Zappos and C-GQA have them
Row = tuple[str, str, str, str]


def rows() -> list[Row]:
    """(picture of shapes, state, object, split): every seen pair shows in all three splits."""
    made = []
    unseen = dict.fromkeys(VAL_UNSEEN, "val") | dict.fromkeys(TEST_UNSEEN, "test")
    for state, kind, number in product(STATES, OBJECTS, range(PER_PAIR)):
        split = unseen.get((state, kind)) or {2: "val", 3: "test"}.get(number, "train")
        made.append((f"{state}_{kind}/{number:04d}.png", state, kind, split))
    return made


def save(picture: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_png(picture))


@cache
def _png(picture: str) -> bytes:
    return encoded(draw(picture).convert("RGB"))


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """The bytes of a file of the image."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def write_lists(root: Path, listed: Iterable[Row]) -> None:
    folder = root / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val", "test"):
        pairs = sorted({(state, kind) for _, state, kind, where in listed if where == split})
        (folder / f"{split}_pairs.txt").write_text("".join(f"{s} {o}\n" for s, o in pairs))


def make_standard(root: Path, quirk: str) -> int:
    """A data root in the standard layout with one benchmark's quirks; returns how many rows are good."""
    records, made = [], rows()
    for picture, state, kind, split in made:
        number = Path(picture).name
        record = {"image": f"{state}_{kind}/{number}", "attr": state, "obj": kind, "set": split}
        place = f"images/{state} {kind}/{number}"
        if quirk == "archive":
            record["_image"] = f"{kind}/A. Brand-Name/{state}.{number}"
            place = f"_images/{record['_image']}"
        if quirk == "flat":
            record["image"] = f"{state}-{kind}-{number}"
            place = f"images/{record['image']}"
        save(picture, root / place)
        records.append(record)
    records.append({"image": "x/na.jpg", "_image": "x/na.jpg", "attr": "NA", "obj": "circle", "set": "train"})
    records.append({"image": "x/na.jpg", "_image": "x/na.jpg", "attr": "red", "obj": "circle", "set": "NA"})
    records.append({"image": "x/no.jpg", "_image": "x/no.jpg", "attr": "red", "obj": "nowhere", "set": "train"})
    torch.save(records, root / METADATA)
    write_lists(root, made)
    return len(made)


def make_folder(root: Path, form: str) -> int:
    """`nested`: state/object/*.png; `flat`: `state object/*.png`."""
    made = rows()
    for picture, state, kind, _ in made:
        folder = f"{state}/{kind}" if form == "nested" else f"{state} {kind}"
        save(picture, root / folder / Path(picture).name)
    return len(made)


def make_table(root: Path, suffix: str, *, split: bool) -> Path:
    made = [(f"pictures/{picture}", *rest) for picture, *rest in rows()]
    for picture, *_ in rows():
        save(picture, root / "pictures" / picture)
    frame = pd.DataFrame(made, columns=["image", "state", "object", "split"])
    frame = frame if split else frame.drop(columns="split")
    path = root / f"table{suffix}"
    frame.to_csv(path, index=False) if suffix == ".csv" else frame.to_parquet(path)
    return path


def make_benchmark(root: Path, name: str) -> None:
    """A data root with a benchmark's layout and its numbers of labels, pairs and images, of which one is on disk."""
    counts = read_benchmarks()[name]["counts"]
    states, objects = counts["states"], counts["objects"]
    cover = [place % states * objects + place % objects for place in range(max(states, objects))]  # every word is seen
    pairs = list(dict.fromkeys([*cover, *range(states * objects)]))
    seen = pairs[: counts["train"][0]]
    unseen = iter(pairs[len(seen) :])
    listed: list[Row] = []
    records = []
    for split in ("train", "val", "test"):
        known, new, images = counts[split]
        own = [*seen[:known], *(next(unseen) for _ in range(new))]
        for number in range(images):
            state, kind = f"s{own[number % len(own)] // objects}", f"o{own[number % len(own)] % objects}"
            image = f"{state}_{kind}/{split}{number}.png"
            listed.append((image, state, kind, split))
            records.append({"image": image, "_image": image, "attr": state, "obj": kind, "set": split})
    write_lists(root, listed)
    torch.save(records, root / METADATA)
    for place in ("images", "_images"):
        save(f"{STATES[0]}_{OBJECTS[0]}/0000.png", root / place / listed[0][0])
