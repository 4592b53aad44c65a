"""Which code a run stands on: found by following imports, the same as what Python loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from duplex.config import code_hash
from duplex.config.code_hash import code_of_run, modules_of
from tests.subprocesses import ENVIRONMENT, ROOT


def test_a_kind_stands_on_its_own_parts():
    duplex, prompts = modules_of("duplex.methods.duplex"), modules_of("duplex.methods.prompts")
    assert {"duplex.layers.graph", "duplex.layers.codebook", "duplex.layers.paths"} <= set(duplex)
    assert "duplex.layers.graph" not in prompts
    assert "duplex.methods.duplex" not in prompts
    assert "duplex.methods.prompts" not in duplex
    assert {"duplex", "duplex.methods", "duplex.encoders.text", "duplex.labels"} <= set(prompts)


def test_stages_know_no_method():
    for stage in ("train", "evaluate"):
        known = modules_of(f"duplex.stages.{stage}")
        assert not {name for name in known if name.startswith("duplex.methods.")} - {
            f"duplex.methods.{name}" for name in ("base", "inspectable", "registry", "with_finetuning")
        }
        assert {"duplex.training.scoring", "duplex.encoders.clip", "duplex.features.store"} <= set(known), (
            "imported late, too"
        )
        assert not {"duplex.report.page", "duplex.cli"} & set(known)


LOADED = """
import os, sys
import h5py, pandas, pydantic, torch  # what takes seconds and is none of ours, once
for kind in ("duplex", "prompts"):
    process = os.fork()
    if process == 0:
        __import__(f"duplex.methods.{kind}")
        import duplex.stages.train
        print(kind, *(name for name in sys.modules if name.startswith("duplex")), flush=True)
        os._exit(0)
    os.waitpid(process, 0)
"""


def test_nothing_that_python_loads_is_missed():
    """A program that imports a kind and the stage: all of this package's modules that it holds are found."""
    done = subprocess.run([sys.executable, "-c", LOADED], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [kind for kind, *_ in lines] == ["duplex", "prompts"]
    for kind, *held in lines:
        found = {**modules_of(f"duplex.methods.{kind}"), **modules_of("duplex.stages.train")}
        assert f"duplex.methods.{kind}" in held
        assert set(held) - set(found) <= set(code_hash.SAYING)


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A package elsewhere: `kind` imports `part` and, in a function, `late`; `other` imports nothing."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for name, text in {
        "__init__": "",
        "kind": "from elsewhere import part\n\n\ndef work():\n    from .late import value\n    return value\n",
        "part": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from elsewhere.other import thing\n",
        "late": "value = 1\n",
        "other": "thing = 2\n",
    }.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    code_hash._closure.cache_clear()
    yield folder
    code_hash._closure.cache_clear()
    for name in [name for name in sys.modules if name.startswith("elsewhere")]:
        del sys.modules[name]


def test_a_change_in_what_is_imported_changes_the_hash_and_no_other_does(package):
    def now() -> str:
        code_hash._closure.cache_clear()
        return code_of_run("duplex.stages.train", "elsewhere.kind:Method")

    first = now()
    assert now() == first
    (package / "other.py").write_text("thing = 3\n")
    assert now() == first, "seen by type checkers alone"
    for name in ("late", "part", "kind"):
        before = now()
        (package / f"{name}.py").write_text((package / f"{name}.py").read_text() + "\n# more\n")
        assert now() != before, name


def test_files_are_those_of_this_tree():
    assert modules_of("duplex.layers.graph")["duplex.layers.graph"] == ROOT / "duplex" / "layers" / "graph.py"
