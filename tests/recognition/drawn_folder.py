"""Folders `state/object/*.png` of drawn images, whose words the packaged encoder knows."""

from pathlib import Path

from duplex.data.shapes import draw

STATES, OBJECTS = ("red", "green", "blue", "striped", "hollow"), ("circle", "star", "heart", "moon", "square")
LACKING = {("red", "moon"), ("blue", "star"), ("hollow", "circle")}  # pairs without images


def draw_pair(root: Path, state: str, thing: str, numbers: range) -> list[Path]:
    paths = []
    for number in numbers:
        path = root / state / thing / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(f"{state}_{thing}/{number:04d}.png").save(path, compress_level=1)
        paths.append(path)
    return paths


def draw_folder(root: Path, images: int = 8) -> Path:
    for state in STATES:
        for thing in OBJECTS:
            if (state, thing) not in LACKING:
                draw_pair(root, state, thing, range(images))
    return root
