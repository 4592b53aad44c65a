"""Parts of pages that are made from files: tables of results and of published numbers, listings, lists."""

import re
from pathlib import Path

import pytest

pytest.importorskip("griffe", reason="needs the extra docs (`make docs` installs it)")

from docs.builder import blocks
from docs.builder.blocks import pages, stale_blocks, with_blocks, without_blocks, write_blocks
from docs.builder.results import table_of_file
from duplex.report.claims import published_rows

ROOT = Path(__file__).parents[2]
CSV = """method,AUC,AUC ±,AUC low,AUC high,over cso,over cso low,over cso high,trained
cso,26.2,0.3,23.3,29.0,,,,416320
dual,31.3,0.3,28.2,34.4,-0.5,-1.2,+0.2,416320
"""
PAGE = "Before\n\n<!-- table: x.csv -->\n| a |\n| --- |\n| 1 |\n\n[CSV](x.csv)\n<!-- end -->\n\nafter\n"


def test_a_file_is_shown_with_errors_and_intervals_in_one_cell(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(CSV)
    assert table_of_file(tmp_path / "x.csv").replace("\xa0", " ").splitlines() == [
        "| method | AUC | over cso | trained |",
        "| --- | --- | --- | --- |",
        "| cso | 26.2 ± 0.3 (23.3 to 29.0) |  | 416320 |",
        "| dual | 31.3 ± 0.3 (28.2 to 34.4) | −0.5 (−1.2 to +0.2) | 416320 |",
    ]


def test_chosen_columns_are_shown_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(CSV)
    page = with_blocks("<!-- table: x.csv | method\n| over cso | AUC -->\n<!-- end -->\n", tmp_path)
    assert page.replace("\xa0", " ").splitlines()[2:] == [
        "| method | over cso | AUC |",
        "| --- | --- | --- |",
        "| cso |  | 26.2 ± 0.3 (23.3 to 29.0) |",
        "| dual | −0.5 (−1.2 to +0.2) | 31.3 ± 0.3 (28.2 to 34.4) |",
        "",
        "[CSV with all columns](x.csv)",
        "<!-- end -->",
    ]
    with pytest.raises(ValueError, match=r"x\.csv has no column 'over dual'; it has method, AUC"):
        table_of_file(tmp_path / "x.csv", ["over dual"])


def test_cells_of_files_are_collected_in_a_table(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(CSV)
    rows = """columns: ["", AUC, gain]
rows:
- [ours, {file: x.csv, row: dual, column: AUC}, {file: x.csv, row: dual, column: over cso, negated: true}]
- [theirs, –, {file: x.csv, row: cso, column: trained}]
"""
    (tmp_path / "t.yaml").write_text(rows)
    assert table_of_file(tmp_path / "t.yaml").replace("\xa0", " ").splitlines()[2:] == [
        "| ours | 31.3 (28.2 to 34.4) | +0.5 (−0.2 to +1.2) |",
        "| theirs | – | 416320 |",
    ]
    (tmp_path / "t.yaml").write_text(rows.replace("row: dual", "row: triple"))
    with pytest.raises(ValueError, match=r"x\.csv has no row 'triple'"):
        table_of_file(tmp_path / "t.yaml")


def test_what_stands_between_the_comments_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a\n-1\n")
    page = PAGE.replace("| 1 |", "| −1 |")
    assert with_blocks(PAGE, tmp_path) == page
    assert with_blocks(page, tmp_path) == page
    assert without_blocks(page) == "Before\n\n\n\nafter\n"


def test_a_file_is_shown_as_a_listing(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("print(1)\n")
    page = with_blocks("<!-- file: x.py -->\n<!-- end -->\n", tmp_path)
    assert page == "<!-- file: x.py -->\n```python\nprint(1)\n```\n<!-- end -->\n"


def test_a_stale_part_and_an_absent_file_are_one_line_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    page, table = tmp_path / "docs/page.md", tmp_path / "docs/x.csv"
    page.write_text(PAGE)
    assert stale_blocks(page) == write_blocks() == ["docs/page.md: no file x.csv"]
    table.write_text("a\n2\n")
    assert stale_blocks(page) == ["docs/page.md: table x.csv is out of date; run `python -m docs.builder`"]
    assert write_blocks() == stale_blocks(page) == []
    assert "| 2 |" in page.read_text()


@pytest.mark.parametrize(
    "page, words", [("<!-- table: x.csv -->\n", "no line <!-- end -->"), ("<!-- plot: x -->\n<!-- end -->\n", "'plot'")]
)
def test_a_part_without_an_end_or_of_no_kind_is_refused(page: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        with_blocks(page, tmp_path)


@pytest.mark.parametrize("benchmark", ["mit-states", "ut-zappos", "cgqa"])
def test_published_numbers_are_listed_by_world_the_newest_last(benchmark: str) -> None:
    page = with_blocks(f"<!-- published: {benchmark} -->\n<!-- end -->\n", ROOT)
    lines = [line.strip("| ").split(" | ") for line in page.splitlines()[1:-1]]
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


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_show_what_their_files_hold(page: Path) -> None:
    assert stale_blocks(page) == []
    assert not re.search(r"^\[\w+: |^::: ", page.read_text(encoding="utf-8"), re.M)


def test_every_result_file_is_shown() -> None:
    shown = {Path(block.path) for page in pages() for block in blocks.blocks(page.read_text(encoding="utf-8"))}
    names = {path.name for path in (ROOT / "docs/results").glob("*.csv")}
    assert names == {path.name for path in shown if path.suffix == ".csv"}
