"""Suspicious labels as one HTML page with thumbnails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from duplex.recognition.neighbours import thumbnail

STYLE = """:root { color-scheme: light dark } body { font: 15px/1.4 system-ui, sans-serif; margin: 1rem }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .8rem }
figure { margin: 0 } img { width: 96px; height: 96px; object-fit: contain }
figcaption { font-size: .8rem; overflow-wrap: anywhere }
s { color: #b3541e } small { opacity: .7 }"""


def write_sheet(path: Path, title: str, rows: Iterable[Mapping[str, Any]], root: Path) -> None:
    """Most suspicious first: the label, what speaks against it, and the picture, within the page itself."""
    figures = "\n".join(_figure(row, root) for row in rows)
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1><main>\n{figures}\n</main></html>\n",
        encoding="utf-8",
    )


def _figure(row: Mapping[str, Any], root: Path) -> str:
    data = thumbnail(root / row["image"])
    picture = f'<img src="{data}" alt="" loading="lazy">' if data else "<p>no picture</p>"
    label, better = f"{row['state']} {row['object']}", f"{row['better_state']} {row['better_object']}"
    return (
        f"<figure>{picture}<figcaption><s>{escape(label)}</s> {escape(better)}<br>"
        f"<small>{row['rank']}. {escape(str(row['image']))}</small></figcaption></figure>"
    )
