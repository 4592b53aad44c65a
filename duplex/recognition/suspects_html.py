"""Write an HTML page that shows images with likely wrong labels (suspects) as thumbnails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from duplex.recognition.neighbours import thumbnail
from duplex.system.files import write_text

STYLE = """:root { color-scheme: light dark } body { font: 15px/1.4 system-ui, sans-serif; margin: 1rem }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .8rem }
figure { margin: 0 } img { width: 96px; height: 96px; object-fit: contain }
figcaption { font-size: .8rem; overflow-wrap: anywhere }
s { color: #b3541e } small { opacity: .7 }"""


def write_suspects_page(path: Path, title: str, rows: Iterable[Mapping[str, Any]], root: Path) -> None:
    """Write an HTML page of images whose labels are likely wrong, each with its current and its suggested label.

    rows: lines of the list of suspects, in the order of the page.
    root: folder of the image files.
    """
    figures = "\n".join(_figure(row, root) for row in rows)
    write_text(
        path,
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>"
        f"<main>\n{figures}\n</main></html>\n",
    )


def _figure(row: Mapping[str, Any], root: Path) -> str:
    data = thumbnail(root / row["image"])
    image = f'<img src="{data}" alt="" loading="lazy">' if data else "<p>no image</p>"
    label, better = f"{row['state']} {row['object']}", f"{row['better_state']} {row['better_object']}"
    return (
        f"<figure>{image}<figcaption><s>{escape(label)}</s> {escape(better)}<br>"
        f"<small>{row['rank']}. {escape(str(row['image']))}</small></figcaption></figure>"
    )
