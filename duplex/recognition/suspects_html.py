"""Suspicious labels as one HTML page with thumbnails."""

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


def write_sheet(path: Path, title: str, rows: Iterable[Mapping[str, Any]], root: Path, listed: str) -> None:
    """Most suspicious first: the label, what speaks against it, and the picture, within the page itself; in its head
    the list's sha256, `listed`."""
    figures = "\n".join(_figure(row, root) for row in rows)
    write_text(
        path,
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"{_mark(listed)}<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>"
        f"<main>\n{figures}\n</main></html>\n",
    )


def shows(path: Path, listed: str) -> bool:
    """Whether it is the page of a list with that sha256."""
    with path.open("rb") as file:
        return _mark(listed).encode() in file.read(1000)


def _mark(listed: str) -> str:
    return f'<meta name="suspects" content="{listed}">'


def _figure(row: Mapping[str, Any], root: Path) -> str:
    data = thumbnail(root / row["image"])
    picture = f'<img src="{data}" alt="" loading="lazy">' if data else "<p>no picture</p>"
    label, better = f"{row['state']} {row['object']}", f"{row['better_state']} {row['better_object']}"
    return (
        f"<figure>{picture}<figcaption><s>{escape(label)}</s> {escape(better)}<br>"
        f"<small>{row['rank']}. {escape(str(row['image']))}</small></figcaption></figure>"
    )
