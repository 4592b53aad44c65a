"""List small changes of the code that no test notices.

    python -m benchmarks.mutants duplex/labels.py --sample 50     # or: make mutants ARGS="..."

A mutant is a module with one operator, number, condition or call changed. It is checked by the tests that mirror the
module (`tests_of`), then by those that mirror the modules which import it, in a child process that was forked after the
heavy imports and has the changed module in memory: no file changes, and most mutants take one or two seconds. A mutant
whose tests all pass is printed as a survivor. Some survivors are equivalent to the original, so that no test can notice
them; they count as survivors.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib.abc
import importlib.util
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from itertools import islice
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("data", "evaluation", "features", "methods", "training")  # those that compute results
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.USub: ast.UAdd,
}  # fmt: skip

# sizes of blocks and thresholds between two algorithms: they change memory and time, and no result
SIZES = {
    "AHEAD", "ANNOUNCED", "BLOCK", "BLOCK_BYTES", "BLOCK_REORDERED", "BLOCK_SCORES", "BLOCK_SEARCHED",
    "CELLS", "CHUNK", "IMAGES", "READ_EVERY", "ROWS", "STEP", "TABLE", "step",
}  # fmt: skip
POLL_SECONDS = 0.02  # between two looks at a child


@dataclass(frozen=True)
class Mutant:
    """A module with one change."""

    module: str  # path
    line: int
    before: str  # the first line of the changed statement
    after: str
    source: str

    @property
    def name(self) -> str:
        return f"{self.module}: `{self.before}` -> `{self.after}`"


def modules() -> list[str]:
    """The modules of the rooms that compute, and those beside the rooms, as far as tests mirror them."""
    paths = [
        *(ROOT / "duplex").glob("*.py"),
        *(path for room in ROOMS for path in (ROOT / "duplex" / room).rglob("*.py")),
    ]
    names = sorted(path.relative_to(ROOT).as_posix() for path in paths if path.stem != "__init__")
    return [name for name in names if tests_of(name)]


def tests_of(module: str) -> list[str]:
    """The test files that mirror a module.

    They are those of its folder whose name begins with its name or which import it or, with a registry in its folder,
    every module through that. Without any, they are those of other folders that import it. Beside the rooms, where the
    tests of whole pipelines are, the name alone counts.
    """
    path, every = Path(module), _imports("tests/**/test_*.py")
    name = module.removesuffix(".py").replace("/", ".")
    own = [test for test in every if test.parent == ROOT / "tests" / path.parent.relative_to("duplex")]
    importing = [test for test, imported in every.items() if name in imported]
    mirrors = [test for test in own if test.stem.startswith(f"test_{path.stem}")]
    if len(path.parts) > 2:
        mirrors += [test for test in own if test in importing]
        registry = f"{name.rpartition('.')[0]}.registry"
        mirrors = [*(mirrors or importing), *(test for test in own if registry in every[test])]
    return [test.relative_to(ROOT).as_posix() for test in dict.fromkeys(mirrors)]


def tests_of_users(module: str) -> list[str]:
    """The test files that mirror the modules of `ROOMS` which import a module, without those that mirror itself."""
    name, tests = module.removesuffix(".py").replace("/", "."), []
    for room in ROOMS:
        users = [path for path, imported in _imports(f"duplex/{room}/*.py").items() if name in imported]
        tests += [test for path in users for test in tests_of(path.relative_to(ROOT).as_posix())]
    return [test for test in dict.fromkeys(tests) if test not in tests_of(module)]


@cache
def _imports(pattern: str) -> dict[Path, set[str]]:
    """What each file of a pattern imports: modules, and names in modules, which may be modules too."""
    found = {}
    for path in sorted(ROOT.glob(pattern)):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        found[path] = imported
    return found


def mutants(path: Path, order: random.Random | None = None) -> Iterator[Mutant]:
    """Yield a mutant for each operator, number, truth value, condition, and call whose value is unused.

    `order` shuffles them; None: as in the file.
    """
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    module = path.relative_to(ROOT).as_posix()
    ignored = set(_without_effect(tree)) | set(_size_nodes(tree))
    places = [
        (number, node, change)
        for number, node in enumerate(ast.walk(tree))
        for change in range(0 if node in ignored else _changes(node))
    ]
    if order is not None:
        order.shuffle(places)
    for number, node, change in places:
        changed = ast.parse(text)  # faster than a deep copy
        target = next(child for place, child in enumerate(ast.walk(changed)) if place == number)
        before = _statement(tree, node)
        _apply(changed, target, change)
        after = _statement(changed, target)
        if before is not None and after is not None and (texts := (_text(before), _text(after)))[0] != texts[1]:
            yield Mutant(module, before.lineno, *texts, ast.unparse(changed))


def _without_effect(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield nodes without effect: annotations, imports for type checking, `strict=` of `zip`, assertions, and the
    sign of `dim=-1`."""
    for node in ast.walk(tree):
        said = getattr(node, "annotation", None) or getattr(node, "returns", None)
        yield from ast.walk(said) if said is not None else ()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield node
        if isinstance(node, ast.keyword) and (node.arg == "strict" or ast.unparse(node) in ("dim=-1", "axis=-1")):
            yield node.value
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("softmax", "logsumexp")):
            yield from (argument for argument in node.args if ast.unparse(argument) == "-1")


def _size_nodes(tree: ast.Module) -> Iterator[ast.AST]:
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in SIZES:
            yield from ast.walk(statement.value)


def _changes(node: ast.AST) -> int:
    """In how many ways a node can be changed."""
    if isinstance(node, ast.Compare):
        return sum(type(operator) in SWAPS for operator in node.ops)
    if isinstance(node, ast.BoolOp | ast.BinOp | ast.UnaryOp | ast.AugAssign):
        return int(type(node.op) in SWAPS or isinstance(node, ast.UnaryOp))
    if isinstance(node, ast.Constant):
        return int(isinstance(node.value, bool | int | float))
    if isinstance(node, ast.If | ast.IfExp):
        return 2
    return int(isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))


def _apply(tree: ast.AST, node: ast.AST, change: int) -> None:
    if isinstance(node, ast.Compare):
        places = [place for place, operator in enumerate(node.ops) if type(operator) in SWAPS]
        node.ops[places[change]] = SWAPS[type(node.ops[places[change]])]()  # type: ignore[call-overload]
    elif isinstance(node, ast.UnaryOp) and type(node.op) not in SWAPS:
        _replace(tree, node, node.operand)
    elif isinstance(node, ast.BoolOp | ast.BinOp | ast.UnaryOp | ast.AugAssign):
        node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
    elif isinstance(node, ast.If | ast.IfExp):
        node.test = ast.Constant(bool(change))
    elif isinstance(node, ast.Expr):
        node.value = ast.Constant(None)
    ast.fix_missing_locations(tree)


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list) and old in value:
                value[value.index(old)] = new


def _statement(tree: ast.AST, node: ast.AST) -> ast.stmt | None:
    """The innermost statement around a node; None inside of annotations and `raise`."""
    innermost: ast.stmt | None = None
    line, column = getattr(node, "lineno", None), getattr(node, "col_offset", None)
    if line is None or column is None:
        return None
    for parent in ast.walk(tree):
        if isinstance(parent, ast.Raise | ast.AnnAssign) and node in ast.walk(parent):
            return None
        if isinstance(parent, ast.stmt) and parent.lineno <= line <= (parent.end_lineno or line):
            innermost = parent
    return innermost


def _text(statement: ast.stmt) -> str:
    return ast.unparse(statement).split("\n", 1)[0].strip()


class _MutantImporter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the changed source in place of the module."""

    def __init__(self, mutant: Mutant) -> None:
        self.name = mutant.module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.mutant = mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, ROOT / self.mutant.module, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.mutant.source, self.mutant.module, "exec"), vars(module))


def killed(mutant: Mutant, tests: Sequence[str], seconds: float) -> bool:
    """Whether the tests fail or take longer than `seconds`.

    Time is counted in polls, so that a pause of the whole run (SIGSTOP) does not count.
    """
    process = os.fork()
    if process == 0:
        _run_tests(mutant, tests)
    for _ in range(round(seconds / POLL_SECONDS)):
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(POLL_SECONDS)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return True


def _run_tests(mutant: Mutant, tests: Sequence[str]) -> None:
    os.setsid()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    code: int = 3
    with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(BaseException):
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = scratch
        sys.meta_path.insert(0, _MutantImporter(mutant))
        import pytest
        from hypothesis import Phase, settings

        settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate))  # nobody reads a smaller failure
        settings.load_profile("mutants")
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other people's take longer to import than most tests
        plugins = ["-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin"]
        options = ["-x", "-q", *plugins, "--hypothesis-seed=0", f"--basetemp={scratch}/t"]
        code = int(pytest.main([*options, *tests]))
        code = 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code  # all of them are slow ones
    os._exit(code)


def survey(chosen_modules: list[str], sample: int, seed: int) -> float:
    """Print the survivors among at most `sample` random mutants per module; the result is the share that was killed."""
    drawn = survived = 0
    for module in chosen_modules:
        order = mutants(ROOT / module, random.Random(seed) if sample else None)
        chosen = sorted(islice(order, sample or None), key=lambda mutant: mutant.line)
        unchanged = Mutant(module, 0, "", "", (ROOT / module).read_text(encoding="utf-8"))
        steps = [tuple(tests) for tests in (tests_of(module), tests_of_users(module)) if tests]
        for mutant in chosen:
            if not any(killed(mutant, tests, _limit(unchanged, tests)) for tests in steps):
                survived += 1
                print(f"line {mutant.line}, {mutant.name}", flush=True)
        drawn += len(chosen)
        counts = f"{drawn - survived} killed, {survived} survived"
        print(f"{module}: {len(chosen)} mutants; of {drawn} {counts}", file=sys.stderr, flush=True)
    share = 1 - survived / max(1, drawn)
    print(f"{100 * share:.1f} % killed", file=sys.stderr)
    return share


@cache
def _limit(unchanged: Mutant, tests: tuple[str, ...]) -> float:
    """The seconds that tests of a mutant may take; exits if they fail without any change."""
    began = time.monotonic()
    if killed(unchanged, tests, 600):
        sys.exit(f"{unchanged.module}: its tests fail without any change: {' '.join(tests)}")
    return 10 + 5 * (time.monotonic() - began)


def _import_heavy() -> None:
    """Import once what every child needs and no mutant changes."""
    for name in ("torch", "pandas", "h5py", "hypothesis", "pytest", "PIL.Image", "typer", "pydantic", "rich.progress",
                 "duplex.encoders.open_clip", "safetensors.torch", "huggingface_hub", "ruamel.yaml",
                 "_hypothesis_pytestplugin", "numpy.testing", "torch.utils.data"):  # fmt: skip
        importlib.import_module(name)
    gc.freeze()  # children need not collect what exists already


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=modules(), help="files of duplex/ (default: those that compute)")
    parser.add_argument("--sample", type=int, default=0, help="largest number of random mutants per module; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--at-least", type=float, default=0.95, help="share that must be killed; exits with 1 otherwise"
    )
    args = parser.parse_args()
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins take longer than most tests
    _import_heavy()
    with tempfile.TemporaryDirectory() as compiled:  # compiled modules, shared by all children
        sys.pycache_prefix, sys.dont_write_bytecode = compiled, False
        share = survey(args.modules, args.sample, args.seed)
    sys.exit(share < args.at_least)


if __name__ == "__main__":
    main()
