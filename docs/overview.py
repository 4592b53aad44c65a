"""Draw the README's figure from the last run: `python docs/overview.py` writes docs/overview.png."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import pandas as pd
from PIL import Image

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
PUBLISHED = {"clip": "#8a8f98", "csp": "#5b8bb0", "cso": "#3a7d5c", "duplex": "#b4472f"}  # published methods
OURS = {"closed_form": "#d08a2e", "dual": "#8b5fa8", "dual_finetuned": "#0f6f86"}
METHOD = "dual_finetuned"
SHOWN = 12
SEED = 0


def main() -> None:
    runs = Path("artifacts/shapes")
    table = pd.read_csv(runs / METHOD / "0/predictions.csv").query("world == 'closed'")
    rows = table.sample(SHOWN, random_state=SEED)
    figure = plt.figure(figsize=(11, 4.2), facecolor="white")
    grid = figure.add_gridspec(2, 10, wspace=0.25, hspace=0.45, left=0.01, right=0.985, top=0.88, bottom=0.13)
    for place, row in enumerate(rows.itertuples()):
        axes = figure.add_subplot(grid[place // 6, place % 6])
        axes.imshow(Image.open(Path("data/shapes") / row.image))
        axes.axis("off")
        axes.set_title(row.top1, fontsize=8, color="#1d7a46" if row.right else "#b3261e", pad=3)
        axes.text(0.5, -0.04, row.label, transform=axes.transAxes, ha="center", va="top", fontsize=8, color="#444")
    axes = figure.add_subplot(grid[:, 7:])
    for method, colour in (PUBLISHED | OURS).items():
        curve = pd.read_csv(runs / method / "0/curve.csv").query("world == 'closed'")
        style, name = ("-", f"{method} (ours)") if method in OURS else ("--", method)
        axes.plot(100 * curve["unseen"], 100 * curve["seen"], style, color=colour, label=name, linewidth=1.8)
    axes.set_xlabel("unseen accuracy, %", fontsize=9)
    axes.set_ylabel("seen accuracy, %", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    caption = f"random test images: prediction of {METHOD} above, label below"
    figure.text(0.01, 0.95, caption, fontsize=10, color="#222")
    figure.savefig(HERE / "overview.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
