"""Folder trees as data sets: `state/object/*.jpg`, or `state object/*.jpg`."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from duplex.data.image_tree import ImageTree
from duplex.data.names import relative_path
from duplex.errors import DuplexError

FORMS = "`state/object/image.jpg` or `state object/image.jpg`"


def read_folder(root: Path) -> pd.DataFrame:
    """Return the columns image, state and object of every image below `root`, labelled by its folders.

    Raise DuplexError for an image elsewhere, for a tree that mixes both forms, or for no image.
    """
    rows = []
    tree = ImageTree(root)
    for path in tree.images():
        parts = relative_path(path, root).split("/")
        if len(parts) not in (2, 3):
            raise DuplexError(f"{root / path} does not lie in {FORMS}; move it or list the images in a table")
        state, thing = parts[:2] if len(parts) == 3 else _pair(parts[0], root)
        rows.append((len(parts), path, state, thing))
    if not rows:
        skipped = "; ".join(f"{len(names)} skipped ({why})" for why, names in tree.skipped.items())
        raise DuplexError(f"{root} holds no images in {FORMS}{'; ' if skipped else ''}{skipped}")
    frame = pd.DataFrame(rows, columns=["depth", "image", "state", "object"])
    if frame["depth"].nunique() > 1:
        deep, flat = (frame.loc[frame["depth"] == depth, "image"].iloc[0] for depth in (3, 2))
        raise DuplexError(f"{root} mixes {deep!r} and {flat!r}; use one of {FORMS} for all")
    return frame[["image", "state", "object"]].astype(str)


def _pair(folder: str, root: Path) -> list[str]:
    """Split a folder name such as `sliced apple` or `sliced_apple` into state and object."""
    words = folder.split() if " " in folder else folder.split("_")
    if len(words) != 2 or not all(words):
        raise DuplexError(
            f"{root / folder}: the name is not two words, a state and an object; use `state/object/` folders"
        )
    return words
