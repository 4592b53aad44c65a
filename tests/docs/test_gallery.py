"""The examples of the gallery are short, run, and print what the page shows."""

import re
import runpy
from pathlib import Path

import pytest

from docs.builder.gallery import ROOT, SCRIPTS, THUMBNAILS, environment, names
from tests.subprocesses import Forked

NUMBER = re.compile(r"\d+(?:\.\d+)?")


def test_every_example_is_short_and_shown_with_its_output_and_a_small_picture() -> None:
    page = (ROOT / "docs/gallery.md").read_text(encoding="utf-8")
    assert {path.stem for path in SCRIPTS.glob("*.py")} == set(names())
    sizes = []
    for name in names():
        assert len((SCRIPTS / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 30
        assert f"<!-- file: ../examples/gallery/{name}.txt -->" in page and f"](assets/gallery/{name}.png)" in page
        sizes.append((THUMBNAILS / f"{name}.png").stat().st_size)
    assert max(sizes) < 30_000 and sum(sizes) < 200_000


@pytest.mark.long
def test_the_examples_print_what_the_page_shows(tmp_path: Path) -> None:
    """The last digits depend on the processor, and with them few answers."""
    for name in names():
        script, given = SCRIPTS / f"{name}.py", environment(tmp_path)
        process = Forked(runpy.run_path, str(script), None, "__main__", cwd=tmp_path, env=given)
        printed, errors = process.communicate()
        assert process.wait() == 0, errors
        shown = script.with_suffix(".txt").read_text(encoding="utf-8")
        assert len(printed.splitlines()) == len(shown.splitlines()), name
        pairs = zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True)
        close = [abs(float(one) - float(other)) <= max(2.0, 0.1 * float(other)) for one, other in pairs]
        assert sum(close) >= 0.8 * len(close), f"{name}: {printed}"
        assert (tmp_path / f"{name}.png").is_file()
