"""Render the blocks of a report: a self-contained HTML page, Markdown, SVG files, and HTML for a notebook."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from duplex.report.blocks import Block, Figure, Report, TableRow
from duplex.report.charts import standalone_svg
from duplex.system.files import replace_folder, write_json

STYLES, SCRIPT = ("page.css", "charts.css"), "page.js"


def render_page(report: Report) -> str:
    """The report as an HTML page, with styles, script, drawings and images embedded."""
    *styles, script = (files("duplex.report").joinpath(name).read_text(encoding="utf-8") for name in (*STYLES, SCRIPT))
    template = _environment().get_template("page.html.j2")
    return template.render(report=report, style=Markup("\n".join(styles)), script=Markup(script))


def render_notebook(title: str, blocks: Sequence[Block]) -> str:
    """Tables and figures as HTML for a notebook, which has its own style sheet."""
    return _environment().get_template("notebook.html.j2").render(title=title, blocks=blocks)


def render_markdown(report: Report) -> str:
    return _environment().get_template("report.md.j2").render(report=report)


def write_report(report: Report, folder: Path, figures: Path, numbers: Mapping[str, object] | None = None) -> Path:
    """Write a report to files and return the path of its HTML page, index.html.

    Both folders are replaced as a whole, because their old files may be links into DVC's cache.

    Args:
        folder: gets index.html and report.md.
        figures: folder that gets the figures as SVG files.
        numbers: file name -> JSON record, for further files in `folder`.
    """
    with replace_folder(figures) as fresh:
        for figure in report.figures:
            (fresh / f"{figure.name}.svg").write_text(standalone_svg(figure.svg), encoding="utf-8")
    with replace_folder(folder) as fresh:
        for name, record in (numbers or {}).items():
            write_json(fresh / name, record)
        (fresh / "report.md").write_text(render_markdown(report), encoding="utf-8")
        (fresh / "index.html").write_text(render_page(report), encoding="utf-8")
    return folder / "index.html"


def _environment() -> Environment:
    """Templates of HTML escape all values; Markdown templates escape those with the filter `md`."""
    environment = Environment(
        loader=PackageLoader("duplex.report", ""),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        drawing=lambda figure: Markup(figure.svg),  # `charts` escapes its texts
        data_uri=_data_uri,
        md=plain_markdown,
        md_row=_markdown_row,
        groupby_runs=_runs,
    )
    return environment


def _data_uri(figure: Figure) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(standalone_svg(figure.svg).encode()).decode("ascii")


def _runs(blocks: Sequence[Block]) -> list[tuple[str, list[Block]]]:
    """Adjacent blocks of one kind as (kind, blocks), so that figures stand side by side."""
    return [(kind, list(run)) for kind, run in groupby(blocks, key=lambda block: block.kind)]


def plain_markdown(text: object) -> str:
    """A text on one line with all special characters of Markdown escaped, for paragraphs and table cells."""
    out = str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for mark in "\\`*_[]|":
        out = out.replace(mark, "\\" + mark)
    return " ".join(out.split())


def _markdown_row(row: TableRow) -> str:
    cells = []
    for cell in row.cells:
        text = plain_markdown(cell.text)
        form = {1: "**{}**", 2: "<u>{}</u>"}.get(cell.rank, "{}")
        cells.append(f"{form.format(text)} {cell.spread}".strip())
    return "| " + " | ".join(cells) + " |"
