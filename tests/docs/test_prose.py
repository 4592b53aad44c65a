"""Pages keep to the limits of length and of numbers, and tables have the numbers of their prose."""

from pathlib import Path

import pytest

from docs.builder import limits, prose
from docs.builder.prose import decimals, find_too_long, find_untraced, manual, numbers, sentences, untraced

PAGE = """# Title

By 1.5 points (0.3 to 2.7), `f(0.1)` leads [the other](other.md) with 3.25. It was run 20 times.

| a | 7.7 |

```text
8.8
```

<!-- table: x.csv -->
| 9.9 |
<!-- end -->
"""


@pytest.fixture
def manual_of_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page whose numbers, but 3.25, are in its table; the only page of a manual."""
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "README", tmp_path / "README.md")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# Project\n")
    (tmp_path / "mkdocs.yml").write_text("nav:\n")
    (tmp_path / "docs/x.csv").write_text("AUC,low,high,seconds\n-1.52,+0.28,2.7,9.9\n")
    page = tmp_path / "docs/page.md"
    page.write_text(PAGE)
    return page


def test_the_pages_keep_to_their_limits() -> None:
    assert find_too_long() == []
    assert max(map(len, prose.README.read_text(encoding="utf-8").splitlines())) <= 120


def test_tables_have_the_numbers_of_the_prose() -> None:
    assert find_untraced() == []


def test_every_constant_stands_in_a_page() -> None:
    shown = {number for page in manual() for number in decimals(prose.prose(page.read_text(encoding="utf-8")))}
    assert set(limits.CONSTANTS) <= shown


def test_prose_is_neither_tables_nor_code_nor_parts_made_from_files() -> None:
    assert decimals(prose.prose(PAGE)) == ["1.5", "0.3", "2.7", "3.25"]
    assert [len(numbers(sentence)) for sentence in sentences(PAGE)] == [0, 2, 0, 0]


def test_a_number_that_no_table_has_is_named(manual_of_one_page: Path) -> None:
    assert untraced(manual_of_one_page) == ["3.25"]
    assert find_untraced() == ["docs/page.md: no table that it shows or links has 3.25"]


def test_the_table_of_a_linked_page_has_a_number(manual_of_one_page: Path) -> None:
    folder = manual_of_one_page.parent
    (folder / "y.csv").write_text('note\n"from 3.248 to 4"\n')
    (folder / "other.md").write_text("<!-- table: y.csv -->\n<!-- end -->\n")
    assert untraced(manual_of_one_page) == []


@pytest.mark.parametrize(
    "limit, line",
    [
        ("PAGES", "docs: 1 pages, at most 0"),
        ("LINES", "docs: 11 lines, at most 0"),
        ("PAGE_LINES", "docs/page.md: 11 lines, at most 0"),
        ("DECIMALS", "docs: 4 decimals in prose, at most 0"),
    ],
)
def test_what_exceeds_a_limit_is_one_line(
    limit: str, line: str, manual_of_one_page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, limit, 0)
    assert find_too_long() == [line]


def test_a_wide_table_is_named(manual_of_one_page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COLUMNS", 2)
    with manual_of_one_page.open("a") as page:
        page.write("\n|  | S | U |\n| --- | --- | --- |\n| dual | 1 | 2 |\n\n| a | b |\n|---|---|\n| 1 | 2 |\n")
    assert find_too_long() == ["docs/page.md: 3 columns of “ | S | U”, at most 2"]


def test_a_sentence_with_many_numbers_is_named(manual_of_one_page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NUMBERS", 1)
    (line,) = find_too_long()
    assert line.startswith("docs/page.md: 2 numbers in “By 1.5 points") and line.endswith("3.25.”, at most 1")
