"""What pages name exists: files, options, links to pages and headings; addresses elsewhere are well formed."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from typer.main import get_command

from duplex.cli import app

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"(?:[\w.-]+/)+[a-z0-9_-]+\.(?:py|yaml|md|csv|json|toml|cff|bib|ipynb)")
MADE = re.compile(
    r"(artifacts|datasets|suspects|data|dvclive|tensorboard|cgqa|dist|ROOT|site|compositional-split-natural)/"
)
GENERATED = ("commands.md", "params.md", "methods.md", "own_images.ipynb")  # by docs/builder
FOREIGN = {"--drop", "--only-changed", "--dist", "--editable", "--constraint"}  # of DVC, pytest and pip


def text_of(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


@cache
def options() -> set[str]:
    """The options of all commands, and those that benchmarks and scripts of the repository read."""
    scripts = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "docs").glob("*.py")]
    found = set(re.findall(r"--[a-z][\w-]+", "\n".join(path.read_text(encoding="utf-8") for path in scripts)))
    return found | set(option_names(get_command(app)))


def option_names(command: Any) -> Iterator[str]:
    for item in command.params:
        yield from (*item.opts, *item.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from option_names(inner)


def anchors(page: Path) -> set[str]:
    """The anchors of a page: its headings as mkdocs writes them, and those that the page sets."""
    text = text_of(page)
    heads = [
        re.sub(r"[^\w\s-]", "", head.replace("`", "")).strip().lower() for head in re.findall(r"^#+ (.+)$", text, re.M)
    ]
    return {re.sub(r"[\s-]+", "-", head) for head in heads} | set(re.findall(r'<a id="([\w-]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    spans = CODE.findall(text_of(page))
    for name in {name for span in spans for name in FILE.findall(span) if not MADE.match(name)}:
        places = (ROOT, ROOT / "duplex", ROOT / "docs", ROOT / "ablations")
        assert any((place / name).is_file() for place in places), f"no file {name}"
    named = {option for span in spans for option in re.findall(r"(?<![\w-])--[a-z][\w-]+", span)}
    assert named <= options() | FOREIGN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_are_alive_and_addresses_well_formed(page: Path) -> None:
    for target in LINK.findall(text_of(page)):
        if "://" in target:
            parts = urlsplit(target)
            assert parts.scheme in ("http", "https") and re.fullmatch(r"[\w-]+(\.[\w-]+)+(:\d+)?", parts.netloc), target
            assert not target.endswith((".", ",", ";")), target
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if linked.name in GENERATED and not linked.is_file():
            continue
        assert linked.is_file(), f"no page {path}"
        assert not anchor or linked.suffix != ".md" or anchor in anchors(linked), f"no heading {target}"
