"""Plug-ins that change the working directory do not move relative paths."""

from __future__ import annotations

import os
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from duplex.system.plugins import load_plugin, restored_folder


@pytest.mark.parametrize("foreign", [True, False])
def test_the_working_directory_is_restored_after_foreign_code(
    foreign: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="an error of the block"), restored_folder(foreign):
        os.chdir("/")
        raise ValueError("an error of the block")
    assert Path.cwd() == (tmp_path if foreign else Path("/"))


def test_importing_a_plugin_keeps_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "moving.py").write_text("import os\nos.chdir('/')\nclass Mine(dict):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert load_plugin(EntryPoint("moving", "moving:Mine", "any.group"), "plug-in", dict).__name__ == "Mine"
    assert Path.cwd() == tmp_path
    del sys.modules["moving"]
