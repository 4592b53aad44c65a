"""Make the manual; every problem is one line.

`python -m docs.builder` writes the parts of README.md and docs/ that are made from files, and checks all pages. With
`--check` it writes nothing. With `--site`, as `make docs` runs it, it checks and then writes the site to site/.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
from importlib.util import find_spec

from docs.builder.blocks import ROOT, pages, stale_blocks, write_blocks
from docs.builder.prose import find_too_long, find_untraced
from duplex.errors import install_command

PAGES = ROOT / "build/manual"  # the pages as mkdocs reads them: `docs_dir` of mkdocs.yml
NEEDED = ("mkdocs", "material", "mkdocstrings", "mkdocs_jupyter")


def main() -> int:
    """Write or check, then build; the result is the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.builder", description=__doc__)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="write nothing")
    choice.add_argument("--site", action="store_true", help="check, then write the site")
    wanted = parser.parse_args()
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"the manual needs {', '.join(missing)}: {install_command('docs')}", file=sys.stderr)
        return 1
    problems = [] if wanted.check or wanted.site else write_blocks()
    problems = problems or [*find_stale(), *find_undocumented(), *find_uncited()]
    problems = problems or [*find_too_long(), *find_untraced()]
    if wanted.site:
        problems = problems or build()
    for line in problems:
        print(line, file=sys.stderr)
    if wanted.site and not problems:
        print(f"wrote {ROOT / 'site' / 'index.html'}")
    return int(bool(problems))


def find_stale() -> list[str]:
    """One line per part of a page that does not show what its file holds."""
    return [line for page in pages() for line in stale_blocks(page)]


def find_undocumented() -> list[str]:
    """One line per public name that the API page lacks, or that has no docstring or no example."""
    from docs.builder.examples import read_examples
    from docs.builder.public_names import names_on_page, undocumented
    from duplex import PUBLIC

    shown = names_on_page(ROOT / "docs/reference/api.md")
    examples = read_examples(ROOT)
    absent = [f"duplex.{name}: not in docs/reference/api.md" for name in PUBLIC if f"duplex.{name}" not in shown]
    absent += [f"duplex.{name}: no example in docs/reference/examples.txt" for name in PUBLIC if name not in examples]
    return absent + [f"{name}: has no docstring that describes it" for name in undocumented(ROOT, shown)]


def find_uncited() -> list[str]:
    """One line per citation without an entry in docs/references.bib."""
    from docs.builder.references import missing_references, read_references

    return missing_references(ROOT, read_references(ROOT / "docs/references.bib"))


def build() -> list[str]:
    """Build the site; the result is mkdocs' warnings and errors."""
    from mkdocs.commands.build import build as build_site
    from mkdocs.config import load_config
    from mkdocs.exceptions import MkDocsException

    from docs.builder.notebooks import executed_notebook
    from docs.builder.pages import write_pages

    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage().splitlines()[0])  # type: ignore[method-assign]
    logging.getLogger("mkdocs").addHandler(handler)
    try:
        shutil.rmtree(PAGES, ignore_errors=True)
        write_pages(PAGES)
        (PAGES / "tutorials").mkdir(exist_ok=True)
        for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
            shutil.copy(executed_notebook(notebook, ROOT), PAGES / "tutorials")
        config = load_config(str(ROOT / "mkdocs.yml"))
        names = sorted((PAGES / "reference/api").glob("*.md"), key=lambda page: page.stem.lower())
        reference = next(section["Reference"] for section in config.nav if "Reference" in section)
        overview = next(entry for entry in reference if "Python API" in entry)
        overview["Python API"] = ["reference/api.md", *({page.stem: f"reference/api/{page.name}"} for page in names)]
        config.plugins.on_startup(command="build", dirty=False)
        build_site(config)
    except (MkDocsException, ValueError) as error:
        lines.append(str(error).splitlines()[0])
    return lines


if __name__ == "__main__":
    sys.exit(main())
