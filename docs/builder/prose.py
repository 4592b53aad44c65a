"""What pages say in sentences: how long they are, how many numbers they have, and whether a file has each number.

Prose is a page without tables, code and the parts that are made from files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from docs.builder import limits
from docs.builder.blocks import ROOT, blocks, without_blocks
from docs.builder.quoted import quoted_records
from docs.builder.results import read_csv

README = ROOT / "README.md"
ENTRY = re.compile(r"\.(?:md|ipynb)$", re.M)  # of the navigation
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
CODE = re.compile(r"`[^`\n]+`")
TARGET = re.compile(r"\]\([^)]*\)")  # of a link or a picture
LINKED = re.compile(r"\]\(([^)#:\s]+\.md)")
DECIMAL = re.compile(r"(?<![\w.,/-])(?<!arXiv )[+−-]?(\d[\d,]*\.\d+)(?!\.?\d)")
PERCENTAGE = re.compile(r"(?<![\w.])\d+(?=\s?%)")
BOUND = r"[+−-]?\d[\d.,]*(?: %)?"
INTERVAL = re.compile(rf" \((?:95 % interval )?{BOUND} to {BOUND}\)|\s±\s[\d.]+")  # belongs to the number before it
PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )|\n(?=#)")  # or an item, or a heading
END = re.compile(r"(?<=[.!?])\s+(?=[^a-z])")  # of a sentence
HEAD = re.compile(r"^\| ?(.+) \|\n\|[ :|-]+\|$", re.M)  # of a table
ANY = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")  # number in a cell


def manual() -> list[Path]:
    """README.md and the pages of docs/."""
    return [README, *sorted((ROOT / "docs").rglob("*.md"))]


def prose(page: str) -> str:
    """A page without tables, code, pictures and the parts that are made from files."""
    text = CODE.sub("`…`", FENCED.sub("", without_blocks(page)))
    lines = [line for line in text.splitlines() if not line.startswith(("|", "<!--", "!["))]
    return "\n".join(lines)


def without_tables(page: str) -> str:
    """A page without tables and the parts that are made from files."""
    return "\n".join(line for line in without_blocks(page).splitlines() if not line.startswith("|"))


def sentences(page: str) -> Iterator[str]:
    """The sentences of a page, one line each."""
    for paragraph in PARAGRAPH.split(TARGET.sub("]", prose(page))):
        yield from END.split(" ".join(paragraph.split()))


def decimals(text: str) -> list[str]:
    """The decimal numbers of a text without signs.

    >>> decimals("AUC falls by −0.6 (−1.7 to +0.5) in 3 of 1.0.2 and 1,234.5 s")
    ['0.6', '1.7', '0.5', '1,234.5']
    """
    return DECIMAL.findall(TARGET.sub("]", text))


def numbers(sentence: str) -> list[str]:
    """The decimals and percentages of a sentence; an interval belongs to its number.

    >>> numbers("AUC falls by −0.6 (−1.7 to +0.5) for 20 % of the images")
    ['0.6', '20']
    """
    plain = INTERVAL.sub("", sentence)
    return [*DECIMAL.findall(plain), *PERCENTAGE.findall(plain)]


@cache
def file_numbers(page: Path) -> frozenset[float]:
    """The numbers in the files of the tables that a page shows, measured or published."""
    rows: list[dict[str, str]] = []
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.kind == "table" and block.path.endswith(".csv"):
            rows += read_csv(page.parent / block.path)[1]
        if block.kind == "published":
            rows += quoted_records(block.what)[1]
    cells = " ".join(cell for row in rows for cell in row.values() if cell)
    return frozenset(float(number.replace(",", "")) for number in ANY.findall(cells))


def untraced(page: Path) -> list[str]:
    """The decimals of a page's prose that are no number, rounded alike, of a table on it or on a page that it links."""
    text = page.read_text(encoding="utf-8")
    linked = {(page.parent / name).resolve() for name in LINKED.findall(text)}
    known: set[float] = set()
    for source in [page, *(path for path in linked if path.is_file())]:
        known |= file_numbers(source)
    return [number for number in decimals(prose(text)) if number not in limits.CONSTANTS and not rounds(known, number)]


def rounds(known: set[float], number: str) -> bool:
    """Whether one of these numbers, rounded to as many digits, is this one, whatever the signs."""
    value, unit = float(number.replace(",", "")), 10.0 ** -len(number.partition(".")[2])
    return any(abs(abs(other) - value) <= 0.5001 * unit for other in known)


def find_untraced() -> list[str]:
    """One line per page with decimals that no table has."""
    found = {page: untraced(page) for page in manual()}
    return [
        f"{page.relative_to(ROOT)}: no table that it shows or links has {', '.join(numbers)}"
        for page, numbers in found.items()
        if numbers
    ]


def find_too_long() -> list[str]:
    """One line per count that exceeds its limit."""
    readme = README.read_text(encoding="utf-8")
    texts = {page: page.read_text(encoding="utf-8") for page in manual()[1:]}
    lengths = {page: len(without_blocks(text).splitlines()) for page, text in texts.items()}
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    counts = [
        ("README.md", "lines", len(readme.splitlines()), limits.README_LINES),
        ("README.md", "decimals outside tables", len(decimals(without_tables(readme))), limits.README_DECIMALS),
        ("README.md", "parentheses", TARGET.sub("]", prose(readme)).count("("), limits.README_PARENTHESES),
        ("docs", "pages", len(texts), limits.PAGES),
        ("mkdocs.yml", "entries of navigation", len(ENTRY.findall(navigation)), limits.ENTRIES),
        ("docs", "lines", sum(lengths.values()), limits.LINES),
        ("docs", "decimals in prose", sum(len(decimals(prose(text))) for text in texts.values()), limits.DECIMALS),
    ]
    counts += [(str(page.relative_to(ROOT)), "lines", lines, limits.PAGE_LINES) for page, lines in lengths.items()]
    for page, text in [(README, readme), *texts.items()]:
        where = str(page.relative_to(ROOT))
        heads = HEAD.findall(text)
        counts += [(where, f"columns of “{head}”", head.count(" | ") + 1, limits.COLUMNS) for head in heads]
        counts += [(where, f"numbers in “{line}”", len(numbers(line)), limits.NUMBERS) for line in sentences(text)]
    return [f"{where}: {count} {what}, at most {limit}" for where, what, count, limit in counts if count > limit]
