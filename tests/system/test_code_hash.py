"""Hashes of code: which edits change those of which stages, and that no edit of a comment or docstring changes one."""

import shutil
import sys
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import pytest

from duplex.system import code as hashing
from duplex.system.code import UNKNOWN_CODE, code_files, code_hash, plugin_files, plugin_hash
from tests.subprocesses import ROOT

METHODS = ("duplex", "prompt_method", "closed_form")
TRAIN = {f"train {method}" for method in METHODS}


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def hashes() -> dict[str, str]:
    clip, modules = "duplex.encoders.open_clip", {method: f"duplex.methods.{method}" for method in METHODS}
    return {
        "prepare": code_hash("prepare"),
        "extract": code_hash("extract", modules=[clip]),
        "draw": code_hash("shapes"),
        **{f"train {method}": code_hash("train", modules=[modules[method], clip]) for method in METHODS},
        "evaluate duplex": code_hash("evaluate", modules=[modules["duplex"], clip]),
        "report": code_hash("report", modules=modules.values()),
    }


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy") / "duplex"
    return shutil.copytree(
        ROOT / "duplex", folder, ignore=lambda _, names: {n for n in names if Path(n).suffix not in ("", ".py")}
    )


@pytest.mark.parametrize(
    ("edited", "changed"),
    [("data/tables", {"prepare"}), ("data/shapes", {"draw"}), ("features/extract", {"extract"}),
     ("encoders/open_clip", {"extract", *TRAIN, "evaluate duplex"}), ("training/loop", TRAIN),
     ("training/scoring", {*TRAIN, "evaluate duplex"}), ("methods/base", {*TRAIN, "evaluate duplex", "report"}),
     ("methods/blocks", {*TRAIN, "evaluate duplex", "report"}),
     ("methods/duplex", {"train duplex", "evaluate duplex", "report"}),  # duplex extends prompt_method:
     ("methods/prompt_method", {"train duplex", "train prompt_method", "evaluate duplex", "report"}),
     ("methods/closed_form", {"train closed_form", "report"}),
     ("methods/codebook", {*TRAIN, "evaluate duplex", "report"}),
     ("evaluation/accumulate", {*TRAIN, "evaluate duplex"}), ("evaluation/metrics", {"evaluate duplex"}),
     ("report/tables", {"report"}), ("project/report", {"report"}), ("config/params", set()), ("cli/model", set())],
)  # fmt: skip
def test_an_edit_changes_the_hashes_of_the_stages_that_use_the_code(package, monkeypatch, edited, changed) -> None:
    monkeypatch.setattr(hashing, "PACKAGE", package)
    before, file = hashes(), package / f"{edited}.py"
    text = file.read_text()
    try:
        file.write_text(f"# A comment.\n{text}\n'''A docstring.'''\n")
        assert hashes() == before
        file.write_text(f"{text}\nEDITED = 1\n")
        after = hashes()
    finally:
        file.write_text(text)
    assert {name for name in before if before[name] != after[name]} == changed


def test_stages_name_modules_that_exist() -> None:
    for stage in hashing.STAGES:
        assert code_files(stage) or stage == "inventory"


MODULE = """'A docstring.'
import json
from my_part import value

class Probe:
    def scale(self, x):
        return x + value
"""
EDITS = [
    ("x + value", "x - value", True),
    ("self, x", "self, x=1", True),
    ("import json", "import json\nOTHER = 1", True),
    ("A docstring.", "Another text.", False),
    ("    def scale(self, x):\n", '    def scale(self, x):\n        """Add."""\n        # a comment\n\n', False),
    ("x + value", "(x\n                + value)", False),
]


@pytest.mark.parametrize(("old", "new", "matters"), EDITS)
def test_code_changes_the_hash_and_comments_docstrings_and_formatting_do_not(tmp_path, monkeypatch, old, new, matters):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_probe.py").write_text(MODULE)
    before = plugin_hash("my_probe")
    assert plugin_hash("my_probe") == before != UNKNOWN_CODE
    change(tmp_path / "my_probe.py", old, new)
    assert (plugin_hash("my_probe") != before) == matters


def test_a_plugin_has_the_files_of_its_package_and_imported_ones_beside_it_unless_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "lib" / "site-packages"
    for folder in (tmp_path, site):
        for name in ("mine/__init__", "mine/deep/part", "beside", "unused", "helpers/scale"):
            (folder / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.py").touch()
        (folder / "mine" / "kind.py").write_text("import json, duplex.labels, beside\n")
        (folder / "beside.py").write_text("from helpers.scale import FACTOR\n")
    package = {"mine/__init__.py", "mine/kind.py", "mine/deep/part.py"}
    monkeypatch.chdir(tmp_path)
    assert set(plugin_files("mine.kind")) == {*package, "beside.py", "helpers/scale.py"}
    monkeypatch.syspath_prepend(site)
    assert set(plugin_files("mine.kind")) == package


def test_a_plugin_method_depends_on_the_layers_of_this_package_that_it_imports(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_kind.py").write_text("from duplex.methods import duplex\n")
    monkeypatch.chdir(tmp_path)
    assert {"my_kind.py", "duplex/methods/duplex.py"} <= set(code_files("train", modules=["my_kind"]))
    assert plugin_hash("duplex.methods.prompt_method") is None


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_the_file_of_a_script_and_its_imports_are_hashed(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "my_script.py").write_text(MODULE)
    (tmp_path / "my_part.py").write_text("value = 1\n")
    script.__file__ = str(tmp_path / "my_script.py")
    assert set(plugin_files("__main__")) == {"my_script.py", "my_part.py"}


def test_code_without_source_is_unknown(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugin_hash("__main__") == UNKNOWN_CODE
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("my_zipped.py", "")
    monkeypatch.syspath_prepend(tmp_path / "all.zip")
    assert plugin_hash("my_zipped") == UNKNOWN_CODE


def test_the_bytes_of_a_compiled_module_are_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / f"my_compiled{EXTENSION_SUFFIXES[0]}"
    monkeypatch.syspath_prepend(tmp_path)
    file.write_bytes(b"\x7fELF\0\xff1")
    before = plugin_hash("my_compiled")
    file.write_bytes(b"\x7fELF\0\xff22")
    assert UNKNOWN_CODE != plugin_hash("my_compiled") != before
