"""Hashes of code: all modules that Python loads are included, and only changes of what they do change a hash."""

from __future__ import annotations

import linecache
import subprocess
import sys
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from duplex.system.code_hash import IGNORED_MODULES, UNKNOWN_CODE, code_hash, imported_modules, plugin_hash
from tests.subprocesses import ENVIRONMENT, ROOT


def test_a_method_includes_the_layers_and_the_base_that_it_uses_and_no_other_method():
    duplex, prompts = imported_modules("duplex.methods.duplex"), imported_modules("duplex.methods.prompts")
    used = {"duplex.layers.graph", "duplex.layers.codebook", "duplex.layers.paths", "duplex.methods.prompts"}
    assert used <= set(duplex)
    assert not {"duplex.layers.graph", "duplex.methods.duplex"} & set(prompts)
    assert not {"duplex.methods.closed_form", "duplex.methods.troika"} & set(duplex)
    assert {"duplex.methods", "duplex.encoders.text_tower", "duplex.labels"} <= set(prompts)
    assert duplex["duplex.layers.graph"] == ROOT / "duplex" / "layers" / "graph.py"


@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_stages_include_no_method(stage):
    modules = imported_modules(f"duplex.stages.{stage}")
    common = {f"duplex.methods.{name}" for name in ("base", "inspectable", "registry", "with_finetuning")}
    assert {name for name in modules if name.startswith("duplex.methods.")} <= common
    assert {"duplex.training.scoring", "duplex.features.store"} <= set(modules)
    assert not {"duplex.report.page", "duplex.cli", "duplex.synthetic"} & set(modules)


OF_CONFIG = {"duplex.data.source_options"}  # imported by `duplex.config` alone
LOADED = """
import os, sys
import h5py, pandas, pydantic, torch  # slow imports of other packages, once
for kind in ("duplex", "prompts"):
    process = os.fork()
    if process == 0:
        __import__(f"duplex.methods.{kind}")
        import duplex.stages.train
        print(kind, *(name for name in sys.modules if name.startswith("duplex.")), flush=True)
        os._exit(0)
    os.waitpid(process, 0)
"""


def test_all_modules_that_python_loads_are_included():
    done = subprocess.run([sys.executable, "-c", LOADED], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [kind for kind, *_ in lines] == ["duplex", "prompts"]
    for kind, *loaded in lines:
        included = imported_modules(f"duplex.methods.{kind}", "duplex.stages.train")
        assert f"duplex.methods.{kind}" in loaded
        assert {name for name in set(loaded) - set(included) if not name.startswith(IGNORED_MODULES)} <= OF_CONFIG


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A package elsewhere: `kind` imports `part` and, in a function, `late`; `other` is imported for types alone."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for name, text in {
        "__init__": "",
        "kind": '"""Doc."""\nfrom elsewhere import part\n\n\n'
        "def work(x):\n    from .late import value\n    return x + value\n",
        "part": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from elsewhere.other import thing\n",
        "late": "value = 1\n",
        "other": "thing = 2\n",
    }.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("module", "old", "new", "matters"),
    [
        ("kind", "x + value", "x - value", True),
        ("kind", "def work(x)", "def work(x=1)", True),
        ("late", "1", "2", True),
        ("part", "TYPE_CHECKING:\n", "TYPE_CHECKING:\n    pass\nelse:\n", True),
        ("kind", "Doc.", "Another text.", False),
        ("kind", "def work(x):\n", 'def work(x):\n    """Add."""\n    # a comment\n\n', False),
        ("kind", "x + value", "(x\n        + value)", False),
        ("part", "other import thing", "other import thing, thing", False),
        ("other", "2", "3", False),
    ],
)
def test_code_changes_the_hash_and_comments_docstrings_formatting_and_types_do_not(package, module, old, new, matters):
    before = code_hash("elsewhere.kind")
    assert code_hash("elsewhere.kind") == before
    change(package / f"{module}.py", old, new)
    assert (code_hash("elsewhere.kind") != before) == matters


def test_a_module_of_the_working_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "home_made_kind.py").write_text("import duplex.labels\n")
    monkeypatch.chdir(tmp_path)
    assert {"home_made_kind", "duplex.labels"} <= set(imported_modules("home_made_kind"))


def test_a_file_that_is_no_python_is_hashed_as_it_is(package):
    (package / "late.py").write_text("def (")
    before = code_hash("elsewhere.kind")
    (package / "late.py").write_text("def (x")
    assert code_hash("elsewhere.kind") != before


def test_a_file_beside_the_method_is_followed_unless_it_is_installed(tmp_path, monkeypatch):
    (tmp_path / "my_probe.py").write_text("import json\nfrom my_helper import SCALE\n")
    (tmp_path / "my_helper.py").write_text("SCALE = 1\n")
    (tmp_path / "my_other.py").write_text("SCALE = 1\n")
    monkeypatch.chdir(tmp_path)
    assert set(imported_modules("my_probe")) == {"my_probe", "my_helper"}
    before = code_hash("my_probe")
    change(tmp_path / "my_helper.py", "SCALE = 1", "SCALE = 2")
    assert code_hash("my_probe") != before
    site = tmp_path / "lib" / "site-packages"
    site.mkdir(parents=True)
    (site / "my_installed.py").write_text("import my_neighbour\n")
    (site / "my_neighbour.py").touch()
    monkeypatch.syspath_prepend(site)
    assert set(imported_modules("my_installed")) == {"my_installed"}


SCRIPT = '"""Doc."""\nimport my_part\n\n\nclass Probe:\n    def scale(self):\n        return 1  # one\n'
EDITS = [("return 1", "return 2", True), ("  # one", "", False), ("Doc.", "Another text.", False)]


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    """The module of a running script, empty and without a file."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


@pytest.mark.parametrize(("old", "new", "matters"), EDITS)
def test_the_file_of_a_script_is_hashed(script, tmp_path, old, new, matters):
    file = tmp_path / "my_script.py"
    file.write_text(SCRIPT)
    script.__file__ = str(file)
    before = plugin_hash("__main__")
    change(file, old, new)
    assert before != UNKNOWN_CODE and (plugin_hash("__main__") != before) == matters


def test_the_imports_of_a_script_are_followed(script, tmp_path, monkeypatch):
    (tmp_path / "my_script.py").write_text(SCRIPT)
    (tmp_path / "my_part.py").write_text("value = 1\n")
    script.__file__ = str(tmp_path / "my_script.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert set(imported_modules("__main__")) == {"__main__", "my_part"}


def test_a_module_that_runs_as_a_program_has_the_hash_of_its_name(script, package):
    script.__spec__ = ModuleSpec("elsewhere.kind", None)
    assert plugin_hash("__main__") == plugin_hash("elsewhere.kind") != UNKNOWN_CODE


def cell(script: ModuleType, source: str, name: str) -> type:
    """Run source code as IPython runs a cell; return the class `Probe`."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), vars(script))
    return vars(script)["Probe"]


@pytest.mark.parametrize(("old", "new", "matters"), [*EDITS, ("\n\nclass", "\nother = 3\n\nclass", False)])
def test_of_a_class_in_a_notebook_its_own_source_is_hashed(script, monkeypatch, old, new, matters):
    monkeypatch.setattr(linecache, "cache", dict(linecache.cache))
    source = SCRIPT.replace("import my_part", "value = 1")
    first, second = cell(script, source, "<cell 1>"), cell(script, source.replace(old, new), "<cell 2>")
    hashes = [plugin_hash("__main__", each) for each in (first, second)]
    assert UNKNOWN_CODE not in hashes and (hashes[0] != hashes[1]) == matters


@pytest.mark.parametrize(("old", "new", "matters"), EDITS)
def test_base_classes_in_the_notebook_are_hashed_too(script, monkeypatch, old, new, matters):
    monkeypatch.setattr(linecache, "cache", dict(linecache.cache))
    base = SCRIPT.replace("import my_part", "").replace("Probe", "Base")
    hashes = []
    for number, text in enumerate((base, base.replace(old, new))):
        source = f"{text}\n\nclass Probe(Base):\n    def other(self):\n        return 0\n"
        hashes.append(plugin_hash("__main__", cell(script, source, f"<cell {number}>")))
    assert UNKNOWN_CODE not in hashes and (hashes[0] != hashes[1]) == matters


def test_code_without_source_is_unknown(script):
    exec(SCRIPT.replace("import my_part", ""), vars(script))
    assert plugin_hash("__main__", script.Probe) == plugin_hash("__main__") == UNKNOWN_CODE


@pytest.mark.parametrize("place", ["my_compiled", "my_package/compiled"])
def test_the_bytes_of_a_compiled_module_are_hashed(tmp_path, monkeypatch, place):
    file = tmp_path / f"{place}{EXTENSION_SUFFIXES[0]}"
    file.parent.mkdir(exist_ok=True)
    if "/" in place:
        (file.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    hashes = set()
    for code in (b"\x7fELF\0\xff1", b"\x7fELF\0\xff22"):
        file.write_bytes(code)
        hashes.add(plugin_hash(place.replace("/", ".")))
    assert len(hashes) == 2 and UNKNOWN_CODE not in hashes


def test_a_module_in_an_archive_is_hashed_by_its_class(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("my_zipped.py", SCRIPT.replace("import my_part", ""))
    monkeypatch.syspath_prepend(tmp_path / "all.zip")
    module = __import__("my_zipped")
    try:
        assert plugin_hash("my_zipped") == UNKNOWN_CODE != plugin_hash("my_zipped", module.Probe)
    finally:
        del sys.modules["my_zipped"]


def test_helpers_in_a_folder_without_init_are_part_of_the_code(tmp_path, monkeypatch):
    (tmp_path / "helpers_of_probe").mkdir()
    helper = tmp_path / "helpers_of_probe" / "scale.py"
    helper.write_text("FACTOR = 1.0\n")
    (tmp_path / "probe_of_folder.py").write_text("from helpers_of_probe.scale import FACTOR\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = plugin_hash("probe_of_folder")
    helper.write_text("FACTOR = -0.05\n")
    assert plugin_hash("probe_of_folder") != before


@pytest.mark.parametrize("test", ["not TYPE_CHECKING", "TYPE_CHECKING or X"])
def test_code_that_runs_although_its_condition_names_type_checking_is_hashed(tmp_path, monkeypatch, test):
    module = tmp_path / "typed_probe.py"
    text = f"from typing import TYPE_CHECKING\nX = 1\nif {test}:\n    SCALE = 1\n"
    module.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    before = plugin_hash("typed_probe")
    module.write_text(text.replace("SCALE = 1", "SCALE = 20"))
    assert plugin_hash("typed_probe") != before
