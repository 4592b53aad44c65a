"""Write a report to files: a self-contained HTML page, a Markdown page, and one SVG file per figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from duplex.report.blocks import Block, Report, TableRow
from duplex.report.charts import standalone_svg
from duplex.system.files import replace_folder, write_json

STYLES, SCRIPT = ("page.css", "charts.css"), "page.js"


def render_page(report: Report) -> str:
    """Return the report as an HTML page, with styles, script, drawings and images embedded."""
    *styles, script = (files("duplex.report").joinpath(name).read_text(encoding="utf-8") for name in (*STYLES, SCRIPT))
    template = _environment().get_template("page.html.j2")
    return template.render(report=report, style=Markup("\n".join(styles)), script=Markup(script))


def render_markdown(report: Report) -> str:
    return _environment().get_template("report.md.j2").render(report=report)


def write_report(report: Report, folder: Path, figures: Path, numbers: Mapping[str, object] | None = None) -> Path:
    """Write a report to files and return the path of its HTML page, index.html.

    folder: gets index.html and report.md.
    figures: folder that gets the figures as SVG files.
    numbers: file name -> JSON record, for further files in `folder`.

    Both folders are replaced as a whole, because their old files may be links into DVC's cache.
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
    """Return the Jinja environment for the report's templates.

    HTML templates escape all values; Markdown templates escape those with the filter `md`.
    """
    environment = Environment(
        loader=PackageLoader("duplex.report", ""),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    drawing = lambda figure: Markup(figure.svg)  # noqa: E731 - `charts` escapes its texts
    environment.filters.update(drawing=drawing, md=plain_markdown, md_row=_markdown_row, groupby_runs=_runs)
    return environment


def _runs(blocks: Sequence[Block]) -> list[tuple[str, list[Block]]]:
    """Group adjacent report blocks of one kind as (kind, blocks), so that figures stand side by side."""
    return [(kind, list(run)) for kind, run in groupby(blocks, key=lambda block: block.kind)]


def plain_markdown(text: object) -> str:
    """Return a text on one line with all special characters of Markdown escaped, for paragraphs and table cells."""
    out = str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for mark in "\\`*_[]|":
        out = out.replace(mark, "\\" + mark)
    return " ".join(out.split())


def _markdown_row(row: TableRow) -> str:
    cells = []
    for cell in row.cells:
        text = plain_markdown(cell.text)
        text = f"**{text}**" if cell.rank == 1 else f"<u>{text}</u>" if cell.rank == 2 else text
        cells.append(f"{text} {cell.spread}".strip())
    return "| " + " | ".join(cells) + " |"
