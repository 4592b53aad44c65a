"""Hashes of code: which edits change those of which stages, and that no edit of a comment or docstring changes one."""

import shutil
import sys
import zipfile
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from duplex.system import code as hashing
from duplex.system.code import NEUTRAL, UNKNOWN_CODE, code_files, code_hash, plugin_files, plugin_hash
from tests.subprocesses import ROOT
from tests.test_architecture import imported_names, imports, modules

METHODS = ("duplex", "prompt_method", "closed_form")
STAGES = ("prepare", "extract", "train", "evaluate")
TINY = "duplex.encoders.tiny"


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def stage_hash(stage: str, *modules: str) -> str:
    return code_hash(ROOT / "pipeline" / f"{stage}.py", *modules)


def hashes() -> dict[str, str]:
    clip = "duplex.encoders.open_clip"
    methods = {name: f"duplex.methods.{name}" for name in METHODS}
    return {
        "prepare": stage_hash("prepare"),
        "extract": stage_hash("extract", clip),
        **{f"train {name}": stage_hash("train", module, clip) for name, module in methods.items()},
        "evaluate duplex": stage_hash("evaluate", methods["duplex"], clip),
        "report": stage_hash("report", *methods.values()),
    }


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "duplex"
    shutil.copytree(ROOT / "duplex", folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(hashing, "PACKAGE", folder)
    return folder


def edited(file: Path, work: Callable[[], Any], text: str = "\nEDITED = 1\n") -> Any:
    """What `work` returns while a file of the package has another line."""
    before = file.read_bytes()
    file.write_bytes(before + text.encode())
    try:
        return work()
    finally:
        file.write_bytes(before)


def test_an_edit_changes_the_hashes_of_the_stages_that_use_the_code(package: Path) -> None:
    before = hashes()

    def changed_by_an_edit(module: str) -> set[str]:
        after = edited(package / f"{module}.py", hashes)
        return {name for name in before if before[name] != after[name]}

    assert edited(package / "labels.py", hashes, "\n# A comment.\n'A docstring.'\n") == before
    train = {f"train {name}" for name in METHODS}
    runs = {*train, "evaluate duplex"}
    for module in ("evaluation/curve", "methods/word_feasibility", "features/tokens"):
        assert changed_by_an_edit(module) >= runs, module
    assert changed_by_an_edit("labels") >= {"prepare", *runs}
    assert changed_by_an_edit("data/images") >= {"prepare", "extract"}
    for module in ("evaluation/metrics", "evaluation/intervals"):  # what chooses an epoch is in evaluation/curve
        assert changed_by_an_edit(module) == {"evaluate duplex", "report"}, module
    assert changed_by_an_edit("methods/duplex") == {"train duplex", "evaluate duplex", "report"}
    assert changed_by_an_edit("methods/prompt_method") == {
        "train duplex", "train prompt_method", "evaluate duplex", "report",  # duplex extends prompt_method
    }  # fmt: skip
    assert changed_by_an_edit("methods/closed_form") == {"train closed_form", "report"}
    assert changed_by_an_edit("report/tables") == {"report"}
    for module in ("library", "cli/model", "errors", "project/run", "training/logs"):
        assert changed_by_an_edit(module) == set(), module


def reached(stage: str, *modules: str) -> set[str]:
    """Modules that a stage's script imports, directly or not, without those of `NEUTRAL`."""
    waiting = {name for name in imported_names(ROOT / "pipeline" / f"{stage}.py") if name in imports()} | {*modules}
    found: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module not in found and module not in NEUTRAL:
            found.add(module)
            parents = {module.rpartition(".")[0]} & imports().keys()  # which Python runs first
            waiting |= imports()[module] | parents
    return found


@pytest.mark.slow
def test_a_stage_depends_on_every_module_that_it_reaches_and_on_no_other(package: Path) -> None:
    of_a_run = ("duplex.methods.duplex", TINY)
    used = {"prepare": (), "extract": (TINY,), "train": of_a_run, "evaluate": of_a_run}

    for stage in STAGES:
        before = stage_hash(stage, *used[stage])
        inside = reached(stage, *used[stage])
        assert not inside & NEUTRAL.keys()
        places = {name: package / file.relative_to(ROOT / "duplex") for name, file in modules().items()}
        for module in inside:
            assert edited(places[module], lambda stage=stage: stage_hash(stage, *used[stage])) != before, module
        for module in modules().keys() - inside:
            places[module].write_text(f"{places[module].read_text()}\nEDITED = 1\n")
        assert stage_hash(stage, *used[stage]) == before
        for module in modules().keys() - inside:
            shutil.copyfile(modules()[module], places[module])


def test_packaged_files_count_where_a_module_names_them(package: Path) -> None:
    before = stage_hash("extract", TINY), stage_hash("extract", "duplex.encoders.open_clip")
    file = package / "encoders" / "tiny" / "weights.safetensors"
    after = edited(file, lambda: (stage_hash("extract", TINY), stage_hash("extract", "duplex.encoders.open_clip")))
    assert after[0] != before[0] and after[1] == before[1]
    data = [file for file in package.rglob("*") if file.is_file() and file.suffix not in (".py", ".typed")]
    named = set(code_files(*(module for module in modules() if module not in NEUTRAL)).values())
    assert not [file.name for file in data if file not in named]


def test_what_is_neutral_exists_and_has_a_reason() -> None:
    assert all(module in modules() and reason for module, reason in NEUTRAL.items())


def test_a_missing_module_of_the_package_is_an_error() -> None:
    for missing in ("duplex.methods.absent", ROOT / "pipeline" / "absent.py"):
        with pytest.raises(FileNotFoundError, match="incomplete"):
            code_hash(missing)


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
    assert {"my_kind.py", "duplex/methods/duplex.py"} <= set(code_files("my_kind"))
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
