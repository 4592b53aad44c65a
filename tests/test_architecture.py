"""The floors of docs/architecture.md, held against every import of the package."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.subprocesses import ROOT

PACKAGE = ROOT / "duplex"
APART = [{"encoders", "data"}, {"layers", "features"}, {"evaluation", "encoders"}, {"evaluation", "data"},
         {"evaluation", "methods"}, {"evaluation", "layers"}]  # fmt: skip
KNOW_NO_METHOD = ("stages", "runs", "library", "report", "training", "config")
NO_FILES = re.compile(r"^\s*(?:from|import) (?:h5py|pandas|dvc|duplex\.(?:features|data|config|artifacts))\b", re.M)


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = path
    return found


@cache
def imports() -> dict[str, set[str]]:
    """Module -> modules of the package that it imports when it runs, in functions too; a package's own parts are not
    imports of it."""
    return {name: imported_names(path) & modules().keys() - {name} for name, path in modules().items()}


class WithoutTypes(ast.NodeTransformer):
    """Removes imports for type checkers."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else node


def imported_names(path: Path) -> set[str]:
    """Names of the modules that a module imports; `from a import b` gives both `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(WithoutTypes().visit(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            names.update([str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)])
    return names


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else name


@cache
def floors() -> dict[str, int]:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", (ROOT / "docs" / "architecture.md").read_text(), re.M)
    return {name: int(floor) for floor, names in rows for name in re.findall(r"`(\w+)`", names)}


def test_every_room_has_a_floor():
    rooms = {room(name) for name in modules()} - {"duplex"}
    assert rooms == set(floors())


def test_nobody_looks_up():
    up = [
        f"{name} -> {other}"
        for name, others in imports().items()
        for other in others
        if "duplex" not in (room(name), room(other)) and floors()[room(name)] < floors()[room(other)]
    ]
    assert not up


@pytest.mark.parametrize("pair", APART, ids=lambda pair: " and ".join(sorted(pair)))
def test_rooms_that_do_not_know_each_other(pair):
    known = [f"{a} -> {b}" for a, others in imports().items() for b in others if {room(a), room(b)} == pair]
    assert not known


def test_there_is_no_circle():
    edges = {
        name: {other for other in others if not name.startswith(f"{other}.")} for name, others in imports().items()
    }
    in_order = list(TopologicalSorter(edges).static_order())  # raises CycleError
    assert set(in_order) == set(modules())


def test_methods_and_layers_read_no_file():
    for name, path in modules().items():
        if room(name) in ("methods", "layers"):
            assert not NO_FILES.search(path.read_text()), name


def test_the_common_rooms_name_no_method():
    """No import of a method's module, and no kind or row of params.yaml as a string."""
    common = {"__init__", "base", "registry", "with_finetuning"}
    kinds = {path.stem for path in (PACKAGE / "methods").glob("*.py")} - common
    own = {f"duplex.methods.{kind}" for kind in kinds}
    words = re.compile(r"""["'](?:clip|coop|csp|cso|prompts|duplex_\w+|static\w*|codebook|counterfactual)["']""")
    for name, path in modules().items():
        if room(name) in KNOW_NO_METHOD:
            assert not own & imports()[name], name
            found = words.search(path.read_text())
            assert not found, f"{name}: {found}"


def test_scripts_are_glue():
    for path in (ROOT / "pipeline").glob("*.py"):
        assert len(path.read_text().splitlines()) < 60, path
