"""Draw the manual's pictures: `python -m docs.pictures` writes them to docs/, and with a name only that one.

problem and method.png show ideas, rooms.png the code. curve.png and curves.svg are drawn from runs in
artifacts/, gains.svg from tables in docs/results. The SVG files follow the reader's colour scheme.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import matplotlib
import pandas as pd

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from duplex.data.shapes import draw as draw_shape
from duplex.report.blocks import Axis, Chart, Series, coordinate, draw, standalone_svg
from tests.test_architecture import ORDER, arrows

HERE = Path(__file__).parent
INK, SOFT, CARD = "#22303a", "#5d6b75", "#eef3f4"
TEAL, ORANGE, PURPLE = "#0f6f86", "#c96f1a", "#7a4f96"
RUN = Path("artifacts/shapes/cso/0")  # whose curve is annotated
CURVES = ("clip", "linear", "duplex", "dual", "dual_finetuned")  # methods on shapes, seed 0
GAINS = {"photographs": "photos_untouched.csv", "drawn shapes": "shapes_untouched.csv"}  # the same encoder
OVER = "over linear, closed"  # their column
PAPER = "<style>svg { background: #fff } @media (prefers-color-scheme: dark) { svg { background: #14171d } }</style>"


def main() -> None:
    """Draw all pictures, or those named."""
    drawings = {"problem": problem, "method": method, "curve": curve, "rooms": rooms}
    charts = {"curves": curves, "gains": gains}
    for name in sys.argv[1:] or [*drawings, *charts]:
        if name in charts:
            (HERE / f"{name}.svg").write_text(charts[name](), encoding="utf-8")
            continue
        figure = drawings[name]()
        figure.savefig(HERE / f"{name}.png", dpi=130, facecolor="white", metadata={"Software": None})
        plt.close(figure)


def rooms() -> Figure:
    """Show which rooms of the package import which, lowest first."""
    figure, axes = plt.subplots(figsize=(6, 5.4), layout="constrained")
    for importer, imported in arrows():
        axes.plot(ORDER.index(imported), ORDER.index(importer), "s", color=TEAL, markersize=8)
    places = range(len(ORDER))
    axes.plot(places, places, "s", color=CARD, markersize=8)
    axes.set_xticks(places, ORDER, rotation=90, color=INK)
    axes.set_yticks(places, ORDER, color=INK)
    axes.invert_yaxis()
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.set_frame_on(False)
    axes.set_xlabel("a room (row) imports the rooms marked in its row", color=SOFT)
    return figure


def problem() -> Figure:
    """Show the task: pairs seen in training, and an image of a pair that was not."""
    figure = plt.figure(figsize=(10, 3.4))
    figure.text(0.24, 0.93, "training shows", ha="center", size=14, color=SOFT)
    figure.text(0.63, 0.93, "then comes", ha="center", size=14, color=SOFT)
    figure.text(0.87, 0.93, "the answer", ha="center", size=14, color=SOFT)
    shown = [("red", "heart"), ("striped", "star"), ("red", "circle")]
    for place, (state, thing) in enumerate(shown):
        _image(figure, 0.015 + 0.155 * place, state, thing, f"{state} {thing}", INK)
    _image(figure, 0.555, "striped", "heart", "never seen together", ORANGE)
    axes = _canvas(figure)
    _arrow(axes, (4.85, 1.75), (5.45, 1.75))
    _arrow(axes, (7.2, 1.75), (7.75, 1.75))
    _box(axes, (7.85, 1.15), (1.95, 1.2), "striped heart", "from its two words", TEAL)
    axes.text(5, 0.16, "Every state and every object was seen; the pair was not.", ha="center", size=13, color=INK)
    return figure


def method() -> Figure:
    """Show the paper's method: three prompts, two kinds of prototypes, and the score."""
    figure = plt.figure(figsize=(10, 4.4))
    axes = _canvas(figure, height=4.4)
    _box(axes, (0.1, 3.0), (2.1, 1.1), "three prompts", "a photo of [striped]\n[heart] · [striped] · [heart]", TEAL)
    _box(axes, (0.1, 0.4), (2.1, 1.1), "the image", "frozen CLIP feature x", SOFT)
    _box(axes, (3.0, 3.0), (2.3, 1.1), "text prototypes", "of pairs, states and\nobjects: t_c, t_s, t_o", TEAL)
    _box(
        axes,
        (3.0, 1.7),
        (2.3, 1.0),
        "visual prototypes",
        "a codebook, averaged over\ntraining and refined on a graph",
        ORANGE,
    )
    _box(axes, (3.0, 0.4), (2.3, 1.1), "disentanglers", "x_s for the state,\nx_o for the object", PURPLE)
    _arrow(axes, (2.24, 3.55), (2.96, 3.55))
    _arrow(axes, (2.24, 0.95), (2.96, 0.95))
    _arrow(axes, (4.15, 2.98), (4.15, 2.72))  # p(s | x) and p(o | x) weigh the messages
    _arrow(axes, (4.15, 1.52), (4.15, 1.68))  # factors are the messages
    _box(axes, (6.0, 3.0), (1.8, 1.1), "semantic", "p(c | x) by words", TEAL)
    _box(axes, (6.0, 1.7), (1.8, 1.0), "visual", "p(c | x) by images", ORANGE)
    _box(axes, (6.0, 0.4), (1.8, 1.1), "factors", "p(s | x) p(o | x)", PURPLE)
    for y in (3.55, 2.2, 0.95):
        _arrow(axes, (5.34, y), (5.96, y))
        _arrow(axes, (7.84, y), (8.36, 2.2 + 0.25 * (y - 2.2)))
    _box(axes, (8.4, 1.55), (1.5, 1.3), "score", "their sum;\nthe best pair wins", INK)
    return figure


def curve() -> Figure:
    """Show one seen–unseen curve with the places that the numbers S, U, HM and AUC describe."""
    table = pd.read_csv(RUN / "curve.csv").query("world == 'closed'")
    numbers = json.loads((RUN / "metrics.json").read_text(encoding="utf-8"))["closed"]
    seen, unseen = 100 * table["seen"], 100 * table["unseen"]
    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    axes.fill_between(unseen, seen, color=TEAL, alpha=0.15)
    axes.plot(unseen, seen, color=TEAL, linewidth=2)
    best = int((2 * seen * unseen / (seen + unseen)).argmax())
    marks = [
        (unseen.iloc[0], seen.max(), f"S = {seen.max():.1f}: bias so low that\nno unseen pair wins", (0.06, 0.8)),
        (
            unseen.max(),
            seen.iloc[int(unseen.argmax())],
            f"U = {unseen.max():.1f}: bias so high that\nno seen pair wins",
            (0.58, 0.3),
        ),
        (unseen.iloc[best], seen.iloc[best], f"HM = {numbers['hm']:.1f}:\nbest balance", (0.8, 0.93)),
    ]
    for x, y, words, place in marks:
        axes.plot([x], [y], "o", color=ORANGE, markersize=8)
        axes.annotate(words, (x, y), xytext=place, textcoords="axes fraction", size=11, va="top", color=INK,
                      arrowprops={"arrowstyle": "-", "color": SOFT})  # fmt: skip
    axes.text(0.3, 0.3, f"AUC = {numbers['auc']:.1f}", transform=axes.transAxes, size=16, color=TEAL)
    axes.set(xlabel="accuracy on images of unseen pairs, %", ylabel="accuracy on images of seen pairs, %")
    axes.set_title(
        f"A bias is added to unseen pairs ({RUN.parent.name} on shapes, seed {RUN.name})", size=11, color=SOFT
    )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def curves() -> str:
    """Show the accuracy on images of seen pairs against that on images of unseen pairs, by method."""
    lines = []
    for method in CURVES:
        table = pd.read_csv(RUN.parents[1] / method / "0/curve.csv").query("world == 'closed'")
        lines.append(Series(method, (100 * table["unseen"]).tolist(), (100 * table["seen"]).tolist()))
    alt = f"Accuracy on known pairs against accuracy on new pairs of drawn shapes: {', '.join(CURVES)}."
    return _file(draw(Chart(alt, "new pairs right, %", "known pairs right, %", lines)))


def gains() -> str:
    """Show by how many points of AUC each method exceeds two logistic regressions, with 95 % intervals."""
    found: dict[str, dict[str, tuple[float, float, float]]] = {}  # method -> images -> value, low, high
    for images, name in GAINS.items():
        for row in pd.read_csv(HERE / "results" / name).dropna(subset=[OVER]).to_dict("records"):
            found.setdefault(row["method"], {})[images] = (row[OVER], row[f"{OVER} low"], row[f"{OVER} high"])
    order = sorted(found, key=lambda method: -max(value for value, _, _ in found[method].values()))
    bounds = [bound for dots in found.values() for dot in dots.values() for bound in dot]
    steps = [10.0 * tens for tens in range(math.floor(min(bounds) / 10), math.ceil(max(bounds) / 10) + 1)]
    x = Axis(160, 426, steps)
    top, step = 34, 24
    bottom = top + step * len(order)
    parts = [f'<path class="grid" d="M{coordinate(x(tick))} {top}V{bottom}"/>' for tick in steps]
    parts.append(f'<path class="axis" d="M{coordinate(x(0))} {top}V{bottom}"/>')
    for tone, images in enumerate(GAINS):
        parts.append(_dot(170 + 130 * tone, 16, tone) + f'<text x="{180 + 130 * tone}" y="20">{images}</text>')
    for place, method in enumerate(order):
        middle = top + step * (place + 0.5)
        parts.append(f'<text x="150" y="{coordinate(middle + 4)}" text-anchor="end">{method}</text>')
        for tone, images in enumerate(GAINS):
            if images in found[method]:
                value, low, high = found[method][images]
                y = middle - 4 + 8 * tone
                reach = f"M{coordinate(x(low))} {coordinate(y)}H{coordinate(x(high))}"
                parts += [f'<path class="line t{tone}" d="{reach}"/>', _dot(x(value), y, tone)]
    for tick in steps:
        label = f"{tick:+g}".replace("-", "−") if tick else "0"
        parts.append(
            f'<text class="tick" x="{coordinate(x(tick))}" y="{bottom + 16}" text-anchor="middle">{label}</text>'
        )
    notes = ("points of AUC above two logistic regressions, 95 % intervals", "@4: four blocks of the encoder trained")
    for line, words in enumerate(notes):
        parts.append(f'<text class="name" x="426" y="{bottom + 36 + 17 * line}" text-anchor="end">{words}</text>')
    head = f'<svg class="chart" viewBox="0 0 440 {bottom + 62}" role="img" xmlns="http://www.w3.org/2000/svg"'
    alt = f"Methods by AUC above two logistic regressions: {', '.join(order)}."
    return _file("\n".join([f'{head} aria-label="{alt}">', *parts, "</svg>"]))


def _dot(x: float, y: float, tone: int) -> str:
    return f'<circle class="dot t{tone}" cx="{coordinate(x)}" cy="{coordinate(y)}" r="3.5"/>'


def _file(svg: str) -> str:
    """An SVG file with a background of its own, light or dark."""
    return standalone_svg(svg).replace("</svg>", f"{PAPER}\n</svg>")


def _canvas(figure: Figure, height: float = 3.4) -> Axes:
    """Axes over the whole figure, in tenths of its width."""
    axes: Axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 10), ylim=(0, height))
    axes.axis("off")
    return axes


def _image(figure: Figure, left: float, state: str, thing: str, words: str, colour: str) -> None:
    axes = figure.add_axes((left, 0.3, 0.145, 0.5))
    axes.imshow(draw_shape(f"{state}_{thing}/0001.png").resize((224, 224)))
    axes.axis("off")
    axes.set_title(words, size=13, color=colour, y=-0.22)


def _box(axes: Axes, corner: tuple[float, float], size: tuple[float, float], name: str, note: str, colour: str) -> None:
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle=style, facecolor=CARD, edgecolor=colour, linewidth=2))
    x, y = corner[0] + size[0] / 2, corner[1] + size[1] / 2
    middle = y + 0.08 * note.count("\n")
    axes.text(x, middle + 0.12, name, ha="center", va="bottom", size=13, weight="bold", color=colour)
    axes.text(x, middle + 0.02, note, ha="center", va="top", size=10, color=INK)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": SOFT, "linewidth": 2})


if __name__ == "__main__":
    main()
