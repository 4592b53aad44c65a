"""Loading plug-ins."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from duplex.errors import DuplexError
from duplex.system.plugins import load_plugin


def test_a_plugin_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    for target, message in (("broken:Mine", "ModuleNotFoundError"), ("json:loads", "is no subclass of builtins.dict")):
        with pytest.raises(DuplexError, match=rf"plug-in 'mine' of {target[:4]}.*{message}"):
            load_plugin(EntryPoint("mine", target, "any.group"), "plug-in", dict)
