"""Pages of the manual that are made from the code, and the checks before the site is built."""

import doctest
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

pytest.importorskip("mkdocs_jupyter", reason="needs the extra docs (`make docs` installs it)")
pytest.importorskip("mkdocstrings", reason="needs the extra docs (`make docs` installs it)")


from docs.builder.commands import commands_page
from docs.builder.examples import read_examples
from docs.builder.pages import api_pages, methods_page, page_text
from docs.builder.parameters import with_section
from docs.builder.public_names import names_on_page, undocumented
from docs.builder.references import TOPICS, missing_references, read_references
from docs.builder.tables import Field, read_classes, table
from duplex import PUBLIC
from duplex.cli import app
from duplex.methods.registry import installed_methods

ROOT = Path(__file__).parents[2]


def test_every_command_has_a_section() -> None:
    page = commands_page()
    assert {f"## duplex {name}" for name in get_command(app).commands} <= set(page.splitlines()) | {  # type: ignore[attr-defined]
        f"## duplex {name}" for name in ("cache", "data", "encoders")
    }
    assert "## duplex cache verify" in page
    assert "| `--json` |" in page


def test_every_kind_of_the_package_has_a_section_with_its_options() -> None:
    page = methods_page()
    own = [kind for kind in installed_methods() if (ROOT / f"duplex/methods/{kind}.py").is_file()]
    assert len(own) > 15
    assert {f"## {kind}" for kind in own} <= set(page.splitlines())
    assert "| `contrast` | `NonNegative` | `1.0` | weight of L_ts + L_to |" in page


def test_a_field_is_read_with_its_comment_and_default(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('class A:\n    """Doc."""\n    x: int = 3  # how many | of them\n    y: str\n    _z: int = 1\n')
    assert read_classes(path) == {
        "A": ("Doc.", [Field("x", "int", "3", "how many | of them"), Field("y", "str", "", "")])
    }
    assert table(read_classes(path)["A"][1]).splitlines()[2] == "| `x` | `int` | `3` | how many \\| of them |"


def test_parameter_notes_become_a_section_and_other_lines_stay() -> None:
    text = "Do it.\n\nx: a number.\n    Positive.\n\nNote: not y: never."
    shown = "Do it.\n\nArgs:\n    x: a number.\n        Positive.\n\nNote: not y: never."
    assert with_section(text, {"x"}) == shown


def test_every_public_name_stands_on_the_api_page_and_is_described() -> None:
    shown = names_on_page(ROOT / "docs/reference/api.md")
    assert {f"duplex.{name}" for name in PUBLIC} <= set(shown)
    assert undocumented(ROOT, shown) == []


def test_every_public_name_has_an_example() -> None:
    assert set(read_examples(ROOT)) == set(PUBLIC)
    pages = api_pages()
    assert "\n* [`Answer`](api/Answer.md): An image's best" in pages["reference/api.md"]
    assert "\n\n## Example" in pages["reference/api/Answer.md"]
    assert "doctest" not in pages["reference/api/Answer.md"]
    assert pages["reference/api/check_method.md"].startswith("::: duplex.testing.check_method\n")


@pytest.mark.slow
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/reference/examples.txt").read_text(encoding="utf-8")
    runner = doctest.DocTestRunner()
    runner.run(doctest.DocTestParser().get_doctest(text, {}, "examples.txt", None, 0))
    assert runner.tries > 30 and runner.failures == 0


def test_pages_are_written_without_importing_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, '.'); from docs.builder.pages import write_pages;"
        f"write_pages(Path({str(tmp_path / 'manual')!r})); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    written = {path.relative_to(tmp_path / "manual").as_posix() for path in tmp_path.rglob("*.*")}
    assert {
        "index.md",
        "curve.png",
        "results/methods_shapes.csv",
        "project/security.md",
        "reference/commands.md",
    } <= written
    assert not [name for name in written if name.endswith((".py", ".bib"))]


def test_links_lead_to_the_page_that_shows_a_file() -> None:
    assert page_text("concepts.md", "[a](../CHANGELOG.md) [b](../params.yaml)") == "[a](project/changelog.md) b"
    assert page_text("library.md", "[a](../examples/quick_start.ipynb)") == "[a](tutorials/quick_start.ipynb)"
    assert page_text("project/security.md", "[a](docs/results.md#x)") == "[a](../results.md#x)"
    assert page_text("reference/api.md", "![a](../curve.png)") == "![a](../curve.png)"


def test_references_have_keys_and_topics_and_all_citations_are_among_them() -> None:
    references = read_references(ROOT / "docs/references.bib")
    assert len({entry.key for entry in references}) == len(references) > 35
    assert {entry.fields["topic"] for entry in references} == set(TOPICS)
    assert missing_references(ROOT, references) == []


def test_a_citation_a_kind_and_a_quoted_row_without_an_entry_are_named() -> None:
    references = [entry for entry in read_references(ROOT / "docs/references.bib") if entry.key != "troika"]
    missing = missing_references(ROOT, references)
    assert "duplex/methods/troika.py: Huang 2024 has no entry" in missing
    assert "docs/methods.md: no entry troika" in missing
    assert "pyproject.toml: kind troika has no entry" in missing
    assert "duplex/report/quoted.yaml: Troika has no entry" in missing
