"""Parts of pages that are made from files: `python -m docs.builder` writes what stands between two comments.

A part begins with a line `<!-- KIND: WHAT -->` and ends with a line `<!-- end -->`. Paths are relative to the page.
After the path of a CSV file, `| NAME | NAME` lists the columns to show, in this order, on one line or several.

| kind | what | shows |
|---|---|---|
| `table` | a CSV file, or a YAML file that collects cells of CSV files | a table |
| `published` | a benchmark, such as `mit-states` | its table of published numbers |
| `file` | a file | its text |
| `references` | a BibTeX file | its entries by topic |
| `names` | public names | each with the first sentence of its docstring |
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from docs.builder.quoted import quoted_records
from docs.builder.references import references_list
from docs.builder.results import markdown_table, table_of_file

ROOT = Path(__file__).resolve().parents[2]
START = re.compile(r"^<!-- (\w+): ([^>]+?) -->$", re.M)
BLOCK = re.compile(START.pattern + r"\n(.*?)^<!-- end -->$", re.M | re.S)
LANGUAGES = {".py": "python", ".txt": "text"}  # of files whose ending is not their language's name


@dataclass(frozen=True)
class Block:
    """A part of a page that is made from a file: its kind, what it shows, and its lines on the page."""

    kind: str
    what: str
    body: str

    @property
    def path(self) -> str:
        """The path of its file, without the columns to show."""
        return self.what.partition("|")[0].strip()

    def lines(self, body: str) -> str:
        """The part with its two comments, with these lines between them."""
        return f"<!-- {self.kind}: {self.what} -->\n{body}<!-- end -->"


def blocks(markdown: str) -> list[Block]:
    """The parts of a page that are made from files.

    Raises `ValueError` if a part has no end.
    """
    found = [Block(*match.groups()) for match in BLOCK.finditer(markdown)]
    if len(found) != len(START.findall(markdown)):
        raise ValueError("a part <!-- KIND: WHAT --> has no line <!-- end -->")
    return found


def without_blocks(markdown: str) -> str:
    """A page without the parts that are made from files."""
    return BLOCK.sub("", markdown)


def rendered(block: Block, folder: Path) -> str:
    """What a part of a page in a folder should show, as Markdown.

    Raises `FileNotFoundError` if its file is absent, and `ValueError` if there is no such kind, row, column or name.
    """
    if block.kind not in KINDS:
        raise ValueError(f"no kind of part {block.kind!r}; there are {', '.join(KINDS)}")
    return KINDS[block.kind](block.what, folder).rstrip() + "\n"


def with_blocks(markdown: str, folder: Path) -> str:
    """A page in a folder whose parts show what their files hold."""
    for block in blocks(markdown):
        markdown = markdown.replace(block.lines(block.body), block.lines(rendered(block, folder)))
    return markdown


def pages() -> list[Path]:
    """The pages at the repository's top and those of the manual."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def write_blocks() -> list[str]:
    """Write what the parts of all pages show; the result is one line per page that cannot be made."""
    problems = []
    for page in pages():
        before = page.read_text(encoding="utf-8")
        try:
            after = with_blocks(before, page.parent)
        except (OSError, ValueError) as error:
            problems.append(problem(page, error))
            continue
        if after != before:
            page.write_text(after, encoding="utf-8")
    return problems


def stale_blocks(page: Path) -> list[str]:
    """One line per part of a page that does not show what its file holds, or cannot be made."""
    where = page.relative_to(ROOT)
    try:
        found = blocks(page.read_text(encoding="utf-8"))
        stale = [block for block in found if rendered(block, page.parent) != block.body]
    except (OSError, ValueError) as error:
        return [problem(page, error)]
    return [f"{where}: {block.kind} {block.path} is out of date; run `python -m docs.builder`" for block in stale]


def problem(page: Path, error: OSError | ValueError) -> str:
    """One line that says why a page cannot be made."""
    missing = isinstance(error, FileNotFoundError) and error.filename
    reason = f"no file {os.path.relpath(missing, page.parent)}" if missing else str(error).splitlines()[0]
    return f"{page.relative_to(ROOT)}: {reason}"


def _published(benchmark: str, _: Path) -> str:
    return markdown_table(*quoted_records(benchmark))


def _table(what: str, folder: Path) -> str:
    name, *columns = (word.strip() for word in what.split("|"))
    text = table_of_file(folder / name, columns)
    link = "CSV with all columns" if columns else "CSV"
    return f"{text}\n\n[{link}]({name})" if name.endswith(".csv") else text


def _file(name: str, folder: Path) -> str:
    path = folder / name
    language = LANGUAGES.get(path.suffix, path.suffix[1:])
    return f"```{language}\n{path.read_text(encoding='utf-8').rstrip()}\n```"


def _references(name: str, folder: Path) -> str:
    return references_list(folder / name)


def _names(names: str, _: Path) -> str:
    from docs.builder.public_names import names_list  # needs griffe, other parts do not

    return names_list(ROOT, names.split())


KINDS: dict[str, Callable[[str, Path], str]] = {
    "table": _table,
    "published": _published,
    "file": _file,
    "references": _references,
    "names": _names,
}
