"""The package's name in indexes: every command that installs it uses that name."""

import re
import subprocess

from duplex.errors import DISTRIBUTION
from tests.subprocesses import ROOT

TEXTS = (".py", ".md", ".toml", ".yaml", ".html", ".j2", ".ipynb")
INSTALLED_NAME = re.compile(r"pip install[^\n`]*?['\" ](duplex[\w.-]*)\[")


def tracked_texts() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.splitlines() if name.endswith(TEXTS) and (ROOT / name).is_file()]


def test_pyproject_has_the_name_of_the_messages() -> None:
    name = re.search(r'^name = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert name is not None
    assert name[1] == DISTRIBUTION


def test_every_installation_command_names_this_distribution() -> None:
    names = {
        (path, name)
        for path in tracked_texts()
        for name in INSTALLED_NAME.findall((ROOT / path).read_text(encoding="utf-8"))
    }
    assert {name for _, name in names} == {DISTRIBUTION}, names
