"""Hook of mkdocs: adds the pages that are made from the code, and those of the repository's top."""

from __future__ import annotations

import re
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from docs.builder.commands import commands_page  # noqa: E402
from docs.builder.examples import read_examples, with_examples  # noqa: E402
from docs.builder.results import with_tables  # noqa: E402
from docs.builder.tables import read_classes, table  # noqa: E402

TOP = {"CONTRIBUTING.md": "contributing", "CHANGELOG.md": "changelog", "SECURITY.md": "security"}
PARAMS = ("duplex/config/params.py", "duplex/options.py", "duplex/data/contents.py")  # classes of params.yaml
LINK = re.compile(r"\[([^\]\n]*)\]\(([^)#:\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the generated pages."""
    pages = {f"project/{name}.md": (ROOT / path).read_text(encoding="utf-8") for path, name in TOP.items()}
    pages["reference/commands.md"] = commands_page()
    pages["reference/params.md"] = params_page()
    pages["reference/methods.md"] = methods_page()
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Insert tables of results, and point links to files of the repository at the pages that show them.

    Where no page shows a file, the words stay and the link goes.
    """
    source = Path(page.file.src_uri)
    is_top = source.parts[0] == "project"
    folder = Path() if is_top else Path("docs") / source.parent
    up = "../" * (len(source.parts) - 1)

    def replaced(match: re.Match[str]) -> str:
        words, path, anchor = match[1], match[2], match[3] or ""
        target = _normal(folder / path)
        if target in TOP:
            return f"[{words}]({up}project/{TOP[target]}.md{anchor})"
        uri = target.removeprefix("docs/")
        if not target.startswith("docs/") or path.startswith("project/"):
            return match[0] if files.get_file_from_path(path) else words
        return f"[{words}]({up}{uri}{anchor})" if is_top else match[0]

    shown = LINK.sub(replaced, with_tables(markdown, ROOT / folder))
    return with_examples(shown, read_examples(ROOT)) if page.file.src_uri == "reference/api.md" else shown


def _normal(path: Path) -> str:
    """A relative path without `..`.

    >>> _normal(Path("docs/../params.yaml"))
    'params.yaml'
    """
    parts: list[str] = []
    for part in path.parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts)


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
