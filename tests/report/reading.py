"""Parser of the page: its elements, and the numbers that they cite."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

EMPTY = {"meta", "link", "img", "br", "path", "circle", "rect"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    parents: tuple[Element, ...]
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join("".join(self.pieces).split())


class Page(HTMLParser):
    """Elements of a page with their whole text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        element = Element(tag, {key: value or "" for key, value in attrs}, tuple(self._open))
        self.elements.append(element)
        if tag not in EMPTY:
            self._open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.elements.append(Element(tag, {key: value or "" for key, value in attrs}, tuple(self._open)))

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
            self._open.pop()

    def handle_data(self, data):
        for element in self._open:
            element.pieces.append(data)

    def all(self, tag: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag]


def cited(sources: str) -> float:
    """Return the mean of the numbers at `file#/a/b file#/c/d`."""
    values = []
    for source in sources.split():
        file, place = source.split("#")
        value = json.loads(Path(file).read_text())
        for key in place.split("/")[1:]:
            value = value[key.replace("~1", "/").replace("~0", "~")]
        values.append(value)
    return math.fsum(values) / len(values)
