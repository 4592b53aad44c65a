"""List small changes of the code that no test notices.

    python -m benchmarks.mutants duplex/labels.py --sample 50     # or: make mutants ARGS="..."

A mutant is a module with one operator, number, condition or call changed. -1 becomes 0: +1 is the same dimension of a
matrix. What changes no result, or only memory and time, is left out (`_without_effect`). A mutant is checked by the
fast tests that run its line, in a child process that was forked after the heavy imports and has the changed module in
memory: no file changes, and most mutants take a few seconds. Which tests run which line is found out by running the
suite once under `coverage` (some ten minutes; kept in `.coverage.tests.json` until a module or a test is newer). A
mutant whose tests all pass, or pass for `SECONDS`, is printed as a survivor. Some survivors are equivalent to the
original, so that no test can notice them, and some are noticed by slow tests or by processes that tests start; all of
them count as survivors.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib.abc
import importlib.util
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from itertools import accumulate, islice
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

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
    "SETTINGS", "(PATCHES, WIDTH)",  # of the small task in duplex/testing.py
}  # fmt: skip
HINTS = {"madvise", "read_ahead"}  # functions that tell the system what is read next
SEEDED = {"default_rng", "manual_seed", "small_batch"}  # functions whose numbers are seeds, or sizes of the small task
POLL_SECONDS = 0.02  # between two looks at a child
SECONDS = 60.0  # that the tests of one mutant take together, at most


@dataclass(frozen=True)
class Mutant:
    """A module with one change."""

    module: str  # path
    line: int  # the first of the changed statement
    before: str  # the first line of the changed statement
    after: str
    source: str


def modules() -> list[str]:
    """The modules of the rooms that compute, and those beside the rooms."""
    paths = [
        *(ROOT / "duplex").glob("*.py"),
        *(path for room in ROOMS for path in (ROOT / "duplex" / room).rglob("*.py")),
    ]
    return sorted(path.relative_to(ROOT).as_posix() for path in paths if path.stem != "__init__")


@dataclass(frozen=True)
class Runs:
    """Which tests run which lines, and how long they take.

    A test is its node id. A fixture that several tests share is its file, because every test of the file may depend on
    it.
    """

    seconds: dict[str, float]
    lines: dict[str, dict[str, list[str]]]  # module -> line -> tests

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests that may notice a mutant, those of the module's own test files first, then the fast ones.

        A line that only the import runs may matter to every test of the module. Tests that together take longer than
        `SECONDS` are left out.
        """
        lines = self.lines.get(mutant.module, {})
        tests = set(lines.get(str(mutant.line), ())) or {test for some in lines.values() for test in some}
        own = f"test_{Path(mutant.module).stem}"
        order = sorted(tests, key=lambda test: (not Path(test.split("::")[0]).name.startswith(own), self.seconds[test]))
        total = accumulate(self.seconds[test] for test in order)
        return [test for test, until in zip(order, total, strict=True) if until <= SECONDS]


class _Contexts:
    """A pytest plugin that tells `coverage` which test or shared fixture runs, and measures the tests that pass."""

    def __init__(self, coverage: Any) -> None:
        self.coverage = coverage
        self.seconds: dict[str, float] = defaultdict(float)
        self.without: set[str] = set()  # skipped tests, those that fail beside `coverage`, and their files

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began = time.monotonic()
        self.coverage.switch_context(item.nodeid)
        result = yield
        self.seconds[item.nodeid] += time.monotonic() - began
        self.seconds[item.nodeid.split("::")[0]] += time.monotonic() - began
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.without |= {report.nodeid, report.nodeid.split("::")[0]}

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        node = request._pyfuncitem.nodeid
        self.coverage.switch_context(node.split("::")[0])
        try:
            return (yield)
        finally:
            self.coverage.switch_context(node)


def runs() -> Runs:
    """Read `.coverage.tests.json`; write it first if it is missing or older than a module or a test."""
    path = ROOT / ".coverage.tests.json"
    sources = [source for folder in ("duplex", "tests") for source in (ROOT / folder).rglob("*.py")]
    if not path.exists() or path.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        print("finding out which tests run which line", file=sys.stderr, flush=True)
        process = os.fork()
        if process == 0:
            _collect(path)
        if os.waitpid(process, 0)[1] != 0:
            sys.exit("The suite did not run.")
    return Runs(**json.loads(path.read_text(encoding="utf-8")))


def _collect(path: Path) -> NoReturn:
    import coverage

    code: int = 3
    with contextlib.suppress(Exception):
        measured = coverage.Coverage(data_file=None, config_file=False, include=[f"{ROOT}/duplex/*"])
        contexts = _Contexts(measured)
        measured.start()
        done = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin"], [contexts])
        measured.stop()
        data = measured.get_data()
        lines: dict[str, dict[str, list[str]]] = {}
        for file in data.measured_files():
            tests_of_line = lines[Path(file).relative_to(ROOT).as_posix()] = {}
            for line, tests in data.contexts_by_lineno(file).items():
                tests_of_line[str(line)] = sorted({*tests} - {""} - contexts.without)
        if done in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            path.write_text(json.dumps({"seconds": contexts.seconds, "lines": lines}), encoding="utf-8")
            code = 0
    os._exit(code)


def mutants(path: Path, order: random.Random | None = None) -> Iterator[Mutant]:
    """Yield a mutant for each operator, number, truth value, condition, and call whose value is unused.

    `order` shuffles them; None: as in the file.
    """
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    module = path.relative_to(ROOT).as_posix()
    ignored = set(_without_effect(tree))
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
    """Yield nodes whose change no test can notice, or should: annotations, imports for type checking, assertions,
    `strict=` of `zip`, the parser of YAML, what follows from sizes of blocks, hints to the system, seeds, of which each
    is as good as another, and calls that only a GPU runs."""
    for node in ast.walk(tree):
        said = getattr(node, "annotation", None) or getattr(node, "returns", None)
        yield from ast.walk(said) if said is not None else ()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield node
        if isinstance(node, ast.UnaryOp) and ast.unparse(node) == "-1":
            yield node.operand  # the whole is changed
        if isinstance(node, ast.keyword) and node.arg in ("strict", "pure"):
            yield node.value
        if (
            isinstance(node, ast.Assert)
            or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in SIZES)
            or (isinstance(node, ast.BinOp) and ast.unparse(node.left) in SIZES)
            or (isinstance(node, ast.FunctionDef) and node.name in HINTS)
            or (isinstance(node, ast.Expr | ast.Call) and _called(node) in HINTS | SEEDED)
            or (isinstance(node, ast.Expr) and "torch.cuda." in ast.unparse(node))
        ):
            yield from ast.walk(node)


def _called(node: ast.Expr | ast.Call) -> str:
    """The last name of the function that a call, or a statement that is a call, calls."""
    call = node.value if isinstance(node, ast.Expr) else node
    return ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""


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
    elif isinstance(node, ast.UnaryOp) and (type(node.op) not in SWAPS or ast.unparse(node) == "-1"):
        _replace(tree, node, ast.Constant(0) if isinstance(node.op, ast.USub) else node.operand)
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
        from hypothesis import Phase, settings

        settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate))  # nobody reads a smaller failure
        settings.load_profile("mutants")
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other people's take longer to import than most tests
        plugins = ["-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin"]
        options = ["-x", "-q", *plugins, "--hypothesis-seed=0", f"--basetemp={scratch}/t"]
        code = int(pytest.main([*options, *tests]))
    os._exit(code)


def survey(chosen_modules: list[str], found: Runs, sample: int, seed: int) -> float:
    """Print the survivors among at most `sample` random mutants per module; the result is the share that was killed."""
    drawn = survived = 0
    for module in chosen_modules:
        order = mutants(ROOT / module, random.Random(seed) if sample else None)
        chosen = sorted(islice(order, sample or None), key=lambda mutant: mutant.line)
        for mutant in chosen:
            tests = found.tests_of(mutant)
            limit = 20 + 5 * sum(found.seconds[test] for test in tests)
            if not tests or not killed(mutant, tests, limit):
                survived += 1
                change = f"`{mutant.before}` -> `{mutant.after}`"
                print(f"line {mutant.line}, {module}: {change} ({len(tests)} tests)", flush=True)
        drawn += len(chosen)
        counts = f"{drawn - survived} killed, {survived} survived"
        print(f"{module}: {len(chosen)} mutants; of {drawn} {counts}", file=sys.stderr, flush=True)
    share = 1 - survived / max(1, drawn)
    print(f"{100 * share:.1f} % killed", file=sys.stderr)
    return share


def _import_heavy() -> None:
    """Import once what every child needs and no mutant changes."""
    for name in ("torch", "pandas", "h5py", "hypothesis", "PIL.Image", "typer", "pydantic", "rich.progress",
                 "duplex.encoders.open_clip", "safetensors.torch", "huggingface_hub", "ruamel.yaml",
                 "_hypothesis_pytestplugin", "numpy.testing", "torch.utils.data"):  # fmt: skip
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "duplex"]:
        del sys.modules[name]  # which open_clip cannot be imported without, but which are changed
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
        share = survey(args.modules, runs(), args.sample, args.seed)
    sys.exit(share < args.at_least)


if __name__ == "__main__":
    main()
