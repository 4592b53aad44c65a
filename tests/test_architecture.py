"""The rooms of CONTRIBUTING.md, held against every import of the package."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.subprocesses import ROOT

PACKAGE = ROOT / "duplex"
ARROWS = 125
MODULE_LINES = 550  # a subject; a method with a derivation may have more
LONG_LINES = 0.06  # share of lines with 100 characters or more
TRAINING = 49
ORDER = re.findall(r"^\| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)  # lowest first
APART = [("encoders", "data"), ("evaluation", "encoders"), ("evaluation", "data"), ("evaluation", "methods")]
READS_FILES = re.compile(r"^\s*(?:from|import) (?:h5py|pandas|dvc|duplex\.(?:features|data|config|artifacts))\b", re.M)
KNOWS_PARAMS = ("config", "training", "recognition", "library", "project", "cli")


@cache
def modules() -> dict[str, Path]:
    paths = PACKAGE.rglob("*.py")
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


@cache
def imports() -> dict[str, set[str]]:
    """Module -> modules of the package that it imports when it runs, in functions too."""
    return {name: imported_names(path) & modules().keys() - {name} for name, path in modules().items()}


def imported_names(path: Path) -> set[str]:
    """The absolute names that a file imports, also those that may be a module or a part of one; not for type checks."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    unused = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            unused |= {part for statement in node.body for part in ast.walk(statement)}
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node not in unused:
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module and node not in unused:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else name


def arrows() -> set[tuple[str, str]]:
    pairs = {(room(name), room(other)) for name, others in imports().items() for other in others}
    return {(a, b) for a, b in pairs if b not in (a, "duplex")}  # every import of a part imports `duplex` first


def test_every_room_has_a_place():
    assert {room(name) for name in modules()} == set(ORDER)


def test_no_arrow_up():
    assert not [(a, b) for a, b in arrows() if ORDER.index(a) < ORDER.index(b)]


def test_few_arrows():
    assert len(arrows()) <= ARROWS


def test_nobody_in_the_package_imports_its_public_names():
    """`from duplex import Recognizer` in a function would be an arrow to any room that no other test sees."""
    assert not {name for name, others in imports().items() if "duplex" in others}


def test_a_module_is_a_subject():
    lines = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    long = {name: count for name, count in lines.items() if count > MODULE_LINES and room(name) != "methods"}
    assert not long


def test_most_lines_are_short():
    lines = [line for path in modules().values() for line in path.read_text(encoding="utf-8").splitlines()]
    assert sum(len(line) >= 100 for line in lines) <= LONG_LINES * len(lines)


def test_public_names_are_imported_alike_for_python_and_for_type_checkers():
    import duplex

    listed = re.findall(r"^    from ([\w.]+) import (\w+) as \2$", (PACKAGE / "__init__.py").read_text(), re.M)
    assert {name: module for module, name in listed} == duplex.PUBLIC


@pytest.mark.parametrize("pair", APART, ids=" and ".join)
def test_rooms_that_do_not_know_each_other(pair):
    assert not arrows() & {pair, pair[::-1]}


def test_there_is_no_circle():
    edges = {
        name: {other for other in others if not name.startswith(f"{other}.")} for name, others in imports().items()
    }
    in_order = list(TopologicalSorter(edges).static_order())  # raises CycleError
    assert set(in_order) == set(modules())


def test_evaluation_imports_torch_where_it_computes_with_it_alone():
    for name, path in modules().items():
        if room(name) == "evaluation" and not name.endswith(".probabilities"):
            assert not re.search(r"^(?:import|from) torch", path.read_text(), re.M), name


def test_training_loads_few_modules():
    """The stage `train`, besides the modules of the method and of the encoder."""
    code = "import sys, duplex.project.train; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    found = [name for name in done.stdout.split() if name in modules() and modules()[name].name != "__init__.py"]
    assert len(found) <= TRAINING, found


def test_methods_read_no_file():
    for name, path in modules().items():
        if room(name) == "methods":
            assert not READS_FILES.search(path.read_text()), name


def test_only_some_rooms_load_the_parameters():
    for name, path in modules().items():
        if room(name) not in KNOWS_PARAMS:
            assert "load_params(" not in path.read_text().replace("load_params()`", ""), name


def test_other_rooms_name_no_method():
    """No import of a method's module, and no kind or row of params.yaml as a string."""
    points = re.findall(r'^\w+ = "(duplex\.methods\.\w+):', (ROOT / "pyproject.toml").read_text(), re.M)
    words = re.compile(r"""["'](?:clip|coop|csp|cso|prompts|duplex_\w+|static\w*|codebook|counterfactual)["']""")
    for name, path in modules().items():
        if room(name) in ("project", "report", "training", "config"):
            assert not set(points) & imports()[name], name
            found = words.search(path.read_text())
            assert not found, f"{name}: {found}"


def test_python_is_plain():
    """No literal behind a star, no generator unpacked, no conditional in a conditional, at most two names a line."""
    found = []
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if is_clever(node):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


def is_clever(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return any(isinstance(each, ast.Starred) and isinstance(each.value, ast.Tuple) for each in node.args)
    if isinstance(node, ast.IfExp):
        return any(isinstance(each, ast.IfExp) for each in ast.walk(node) if each is not node)
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
        many = isinstance(node.value, ast.Tuple) and len(node.value.elts) > 2
        return many or isinstance(node.value, ast.GeneratorExp)
    return False


def test_scripts_are_glue():
    for path in (ROOT / "pipeline").glob("*.py"):
        assert len(path.read_text().splitlines()) < 60, path
