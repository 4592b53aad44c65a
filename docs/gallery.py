"""Draw the gallery of answers: `python docs/gallery.py` writes docs/gallery.png from the predictions of one run.

The images are random ones of the test split, half of them of unseen pairs, drawn by a fixed seed and not selected.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import pandas as pd
from PIL import Image

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
RUN = Path("artifacts/shapes/dual_finetuned/0")
IMAGES = Path("data/shapes")
COLUMNS, SEED = 6, 0
RIGHT, WRONG, NEW = "#1d7a46", "#b3261e", "#7a4f96"


def main() -> None:
    """Draw one row of images of seen pairs and one of unseen pairs."""
    table = pd.read_csv(RUN / "predictions.csv").query("world == 'closed'")
    figure, axes = plt.subplots(2, COLUMNS, figsize=(9.5, 4.4), facecolor="white")
    figure.subplots_adjust(left=0.01, right=0.99, top=0.85, bottom=0.06, wspace=0.15, hspace=0.55)
    for line, seen in zip(axes, (1, 0), strict=True):
        rows = table[table["seen"] == seen].sample(COLUMNS, random_state=SEED)
        for place, row in zip(line, rows.itertuples(), strict=True):
            place.imshow(Image.open(IMAGES / row.image).resize((192, 192)))
            place.axis("off")
            place.set_title(f"{'✓' if row.right else '✗'} {row.top1}", size=11, color=RIGHT if row.right else WRONG)
            colour = "#444444" if seen else NEW
            words = row.label if seen else f"{row.label} (new)"
            place.text(0.5, -0.05, words, transform=place.transAxes, ha="center", va="top", size=10, color=colour)
    caption = f"{RUN.parent.name}, closed world: answer above, label below; test images drawn by seed {SEED}"
    figure.text(0.01, 0.92, caption, size=12, color="#22303a")
    figure.savefig(HERE / "gallery.png", dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    main()
