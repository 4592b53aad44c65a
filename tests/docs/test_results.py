"""Tables of results: from a file with one number per cell to a page."""

import re
from pathlib import Path

import pytest

pytest.importorskip("mkdocs_jupyter", reason="needs the extra docs (`make docs` installs it)")

from docs.builder.results import DIRECTIVE, INCLUDED, QUOTED, result_table, with_tables
from docs.readme_table import TABLE, readme_table
from duplex.report.claims import published_rows

ROOT = Path(__file__).parents[2]
CSV = """method,AUC,AUC ±,AUC low,AUC high,over cso,over cso low,over cso high,trained
cso,26.2,0.3,23.3,29.0,,,,416320
dual,31.3,0.3,28.2,34.4,-0.5,-1.2,+0.2,416320
"""


def test_a_file_is_shown_with_errors_and_intervals_in_one_cell(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(CSV)
    assert result_table(tmp_path / "x.csv").replace("\xa0", " ").splitlines() == [
        "| method | AUC | over cso | trained |",
        "| --- | --- | --- | --- |",
        "| cso | 26.2 ± 0.3 (23.3 to 29.0) |  | 416320 |",
        "| dual | 31.3 ± 0.3 (28.2 to 34.4) | −0.5 (−1.2 to +0.2) | 416320 |",
    ]


def test_a_directive_is_replaced_by_its_table_and_a_link(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a\n-1\n")
    page = with_tables("Before\n\n[Table: x.csv](x.csv)\n\nafter", tmp_path)
    assert page == "Before\n\n| a |\n| --- |\n| −1 |\n\n[CSV](x.csv)\n\nafter"


@pytest.mark.parametrize("benchmark", ["mit-states", "ut-zappos", "cgqa"])
def test_quoted_numbers_are_listed_by_world_the_newest_last(benchmark: str) -> None:
    page = with_tables(f"Before\n\n[Quoted: {benchmark}](../duplex/report/quoted.yaml)\n", ROOT / "docs")
    lines = [line.strip("| ").split(" | ") for line in page.splitlines()[2:]]
    assert lines[0] == ["world", "method", "year", "backbone", "S", "U", "HM", "AUC", "quoted from"]
    assert [line[0] for line in lines[2:]] == sorted(line[0] for line in lines[2:])
    for world in ("closed", "open"):
        years = [int(line[2]) for line in lines[2:] if line[0] == world]
        rows = [row for row in published_rows(world) if benchmark in row]
        assert len(years) == len(rows) > 20 and years == sorted(years)
        duplex = next(line for line in lines[2:] if line[:2] == [world, "Duplex"])
        numbers, errors = next((row[benchmark], row["errors"][benchmark]) for row in rows if row["method"] == "Duplex")
        cells = [f"{number:.1f}\xa0±\xa0{error:.1f}" for number, error in zip(numbers, errors, strict=True)]
        assert duplex[3:8] == ["CLIP ViT-L/14", *cells]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_every_directive_names_a_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = [*DIRECTIVE.findall(text), *(name for name, _ in INCLUDED.findall(text))]
    names += [name for _, name in QUOTED.findall(text)]
    assert len(re.findall(r"\[(?:Table|File|Quoted): |\{\{", text)) == len(names), (
        "write [Table: x.csv](results/x.csv) on a line"
    )
    assert all((page.parent / name).is_file() for name in names)


def test_the_readme_has_the_numbers_of_the_results() -> None:
    shown = TABLE.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert shown and shown[0] == readme_table(), "run `python docs/readme_table.py`"


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 70 and max(map(len, lines)) <= 120


def test_every_result_file_is_shown() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    names = {path.name for path in (ROOT / "docs/results").glob("*.csv")}
    assert names == {Path(name).name for name in re.findall(DIRECTIVE, pages)}
