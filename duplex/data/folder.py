"""A folder tree of one's own: `state/object/*.jpg`, or `state object/*.jpg`."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from duplex.data.names import relative_path
from duplex.data.tree import PictureTree
from duplex.errors import DuplexError

FORMS = "`state/object/picture.jpg` or `state object/picture.jpg`"


def read_folder(root: Path) -> pd.DataFrame:
    """Every picture below `root`, labelled by the folders it lies in; one form for the whole tree."""
    rows = []
    tree = PictureTree(root)
    for path in tree.pictures():
        parts = relative_path(path, root).split("/")
        if len(parts) not in (2, 3):
            raise DuplexError(f"{root / path} does not lie in {FORMS}; move it or list the pictures in a table")
        state, thing = parts[:2] if len(parts) == 3 else _pair(parts[0], root)
        rows.append((len(parts), path, state, thing))
    if not rows:
        passed = "; ".join(f"{len(names)} passed over ({why})" for why, names in tree.passed.items())
        raise DuplexError(f"{root} holds no pictures in {FORMS}{'; ' if passed else ''}{passed}")
    frame = pd.DataFrame(rows, columns=["depth", "image", "state", "object"])
    if frame["depth"].nunique() > 1:
        deep, flat = (frame.loc[frame["depth"] == depth, "image"].iloc[0] for depth in (3, 2))
        raise DuplexError(f"{root} mixes {deep!r} and {flat!r}; use one of {FORMS} for all")
    return frame[["image", "state", "object"]].astype(str)


def _pair(folder: str, root: Path) -> list[str]:
    """`sliced apple`, or `sliced_apple`: where the state ends must be plain."""
    words = folder.split() if " " in folder else folder.split("_")
    if len(words) != 2 or not all(words):
        raise DuplexError(
            f"{root / folder}: where the state ends and the object begins is not plain; use `state/object/` folders"
        )
    return words
