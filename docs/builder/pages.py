"""Write the pages of the site as files: those of docs/, of the repository's top, and those made from the code."""

from __future__ import annotations

import re
import shutil
from importlib.metadata import entry_points
from pathlib import Path

from docs.builder.commands import commands_page
from docs.builder.examples import read_examples
from docs.builder.public_names import names_on_page
from docs.builder.tables import read_classes, table

ROOT = Path(__file__).resolve().parents[2]
TOP = {"CONTRIBUTING.md": "contributing", "CHANGELOG.md": "changelog", "SECURITY.md": "security"}
PARAMS = ("duplex/config/params.py", "duplex/options.py", "duplex/data/contents.py")  # classes of params.yaml
LINK = re.compile(r"\[([^\]\n]*)\]\(([^)#:\s]+)(#[^)]*)?\)")
SOURCES = shutil.ignore_patterns("builder", "__pycache__", "*.py", "*.bib", "*.txt")  # no parts of the site


def write_pages(folder: Path) -> None:
    """Write all pages but the notebooks, with pictures and tables, into an empty folder."""
    shutil.copytree(ROOT / "docs", folder, ignore=SOURCES)
    pages = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.md")}
    pages |= {f"project/{name}.md": (ROOT / path).read_text(encoding="utf-8") for path, name in TOP.items()}
    pages |= {"reference/commands.md": commands_page(), "reference/params.md": params_page()}
    pages |= {"reference/methods.md": methods_page()}
    pages |= api_pages()
    for uri, text in pages.items():
        (folder / uri).parent.mkdir(exist_ok=True)
        (folder / uri).write_text(page_text(uri, text), encoding="utf-8")


def page_text(uri: str, text: str) -> str:
    """A page whose links to files of the repository lead to the pages that show them.

    Where no page shows a file, the words stay and the link goes.
    """
    source = Path(uri)
    is_top = source.parts[0] == "project"
    folder = Path() if is_top else Path("docs") / source.parent
    up = "../" * (len(source.parts) - 1)

    def replaced(match: re.Match[str]) -> str:
        words, path, anchor = match[1], match[2], match[3] or ""
        target = _normal(folder / path)
        if target in TOP:
            return f"[{words}]({up}project/{TOP[target]}.md{anchor})"
        if target.endswith(".ipynb"):
            return f"[{words}]({up}tutorials/{Path(target).name})"
        if not target.startswith("docs/"):
            return words
        return f"[{words}]({up}{target.removeprefix('docs/')}{anchor})" if is_top else match[0]

    return LINK.sub(replaced, text)


def _normal(path: Path) -> str:
    """A relative path without `..`.

    >>> _normal(Path("docs/../params.yaml"))
    'params.yaml'
    """
    parts: list[str] = []
    for part in path.parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts)


def api_pages() -> dict[str, str]:
    """The API's overview, which links each name to its page, and a page per name with its example."""
    page = ROOT / "docs/reference/api.md"
    examples, overview, pages = read_examples(ROOT), page.read_text(encoding="utf-8"), {}
    for name in names_on_page(page):
        short = name.rpartition(".")[2]
        overview = overview.replace(f"* `{short}`: ", f"* [`{short}`](api/{short}.md): ")
        example = f"\n## Example\n\n```pycon\n{examples[short]}\n```\n" if short in examples else ""
        pages[f"reference/api/{short}.md"] = f"::: {name}\n    options: {{heading_level: 1}}\n{example}"
    return {"reference/api.md": overview, **pages}


def params_page() -> str:
    """A table per section of params.yaml."""
    parts = [
        "# params.yaml\n\nGenerated from the classes that read the file. Unknown keys and wrong values are refused with"
        " the key's name; `duplex params --check` checks a file.\n"
    ]
    for module in PARAMS:
        for name, (doc, rows) in read_classes(ROOT / module).items():
            if rows and name not in ("Params", "OptionError"):
                parts.append(f"## {name}\n\n{doc}\n\n{table(rows)}\n")
    return "\n".join(parts)


def methods_page() -> str:
    """A section per kind of method: its summary and its options."""
    parts = [
        "# Methods and their options\n\nGenerated from the modules of the kinds that come with the package."
        " [Published methods](../methods.md) has their sources, and how each was checked.\n"
    ]
    for kind in sorted(entry_points(group="duplex.methods"), key=lambda point: point.name):
        path = ROOT / f"{kind.module.replace('.', '/')}.py"
        if not path.is_file():
            continue  # of another distribution
        classes = read_classes(path)
        options = [rows for name, (_, rows) in classes.items() if name.endswith("Options") and rows]
        parts.append(f"## {kind.name}\n\n{classes[kind.attr][0]}\n")
        parts += [f"{table(rows)}\n" for rows in options] or ["It has no options of its own.\n"]
    return "\n".join(parts)
