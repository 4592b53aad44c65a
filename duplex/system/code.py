"""Hashes of the code that results depend on.

The code of a stage is its script in `pipeline/`, everything of this package that it imports, and
the files beside these modules that they name. Of a plug-in, its whole top-level package counts.
Syntax trees without docstrings are hashed.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

# Modules that cannot change a result -> why. Neither they nor what only they import belongs to a stage's code.
NEUTRAL = {
    "duplex": "imports the public names when they are first used",
    "duplex.errors": "messages and exit codes",
    "duplex.artifacts": "says where files lie, not what is in them",
    "duplex.project.plan": "decides whether a stage runs, not what it computes",
    "duplex.project.run": "looks up parameters, files and stamps, which have what it chose",
    "duplex.project.stamps": "tells whether a result is outdated",
    "duplex.system.code": "hashes code",
    "duplex.system.entry": "starts commands and reports their errors",
    "duplex.system.processes": "shows progress and starts processes",
    "duplex.training.logs": "reports losses to loggers",
}

PACKAGE = Path(__file__).parents[1]
TEMPLATE = ".j2"
FILE_NAME = re.compile(r"\w[\w-]*(?:\.\w+)+")
UNKNOWN_CODE = "unknown"  # instead of the hash of a class without a file, as in a notebook
IRRELEVANT_FIELDS = {"ctx", "kind", "type_comment", "type_ignores", "type_params"}  # of nodes of a syntax tree
Files = dict[str, Path]  # by their paths below the folder in which their package lies


def code_hash(*modules: str | Path) -> str:
    """Hash of the code of modules, such as `duplex.methods.gaussian` or `Path("pipeline/train.py")`."""
    return _digest(code_files(*modules))


def code_files(*modules: str | Path) -> Files:
    """The files of modules, of what they import here or beside a plug-in, and of data that they name."""
    files: Files = {}
    for module in modules:
        if isinstance(module, Path):
            found = {f"{module.parent.name}/{module.name}": module} if module.is_file() else {}
        elif module.partition(".")[0] == PACKAGE.name:
            found = _module_file(module)
        else:
            files |= _with_imports(plugin_files(module), _module_file)
            continue
        if not found:
            raise FileNotFoundError(f"the package is incomplete: {module} is missing; reinstall duplex-czsl")
        files |= _with_imports(found, _module_file)
    return files | _named_data(files)


def plugin_hash(module: str) -> str | None:
    """Hash of a plug-in's own code, `UNKNOWN_CODE` if it has no file; None for a module of this package."""
    if module.partition(".")[0] == PACKAGE.name:
        return None
    files = plugin_files(module)
    return _digest(files) if files else UNKNOWN_CODE


def plugin_files(module: str) -> Files:
    """Python files of a plug-in's package and, unless it is in site-packages, of modules beside it that it imports."""
    places = _places(module.partition(".")[0])
    folders = [place.parent for place in places if not {"site-packages", "dist-packages"}.intersection(place.parts)]

    @cache  # which many imports share
    def beside(top: str) -> Files:
        if top == PACKAGE.name:
            return {}
        return _files_of(folder / file for folder in folders for file in (top, f"{top}.py"))

    return _with_imports(_files_of(places), lambda name: beside(name.partition(".")[0]))


def _with_imports(files: Files, find: Callable[[str], Files]) -> Files:
    """`files` and the files of all modules that they import, directly or not; `find` maps a module's name to files."""
    waiting = list(files.values())
    while waiting:
        for name in _parse(waiting.pop().read_bytes()).imports:
            more = {key: path for key, path in find(name).items() if key not in files}
            files |= more
            waiting += more.values()
    return files


def _module_file(module: str) -> Files:
    """The file of a module of this package, and those of its parents; none for other modules and for `NEUTRAL` ones."""
    package, *parts = module.split(".")
    if package != PACKAGE.name or module in NEUTRAL:
        return {}
    place = PACKAGE.joinpath(*parts)
    paths = [path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()]
    if not paths:
        return {}
    parents = [PACKAGE.joinpath(*parts[:depth]) / "__init__.py" for depth in range(1, len(parts))]
    return _files_of(paths + parents)


def _files_of(places: Iterable[Path]) -> Files:
    files: Files = {}
    for place in places:
        root = PACKAGE.parent if PACKAGE in place.parents else place.parent
        for path in [place] if place.is_file() else place.rglob("*.py"):
            files[path.relative_to(root).as_posix()] = path
    return files


def _named_data(files: Files) -> Files:
    """Files of this package, not Python's, whose name is a string in a module or template of the same folder."""
    data: Files = {}
    waiting = [path for path in files.values() if PACKAGE in path.parents]
    while waiting:
        path = waiting.pop()
        source = path.read_bytes()
        is_template = path.suffix == TEMPLATE
        for name in FILE_NAME.findall(source.decode()) if is_template else _parse(source).texts:
            beside = path.parent / name
            key = beside.relative_to(PACKAGE.parent).as_posix()
            if beside.suffix != ".py" and key not in data and beside.is_file():
                data[key] = beside
                waiting += [beside] if beside.suffix == TEMPLATE else []
    return data


def _places(top: str) -> list[Path]:
    """File of a top-level module, or folders of a top-level package; empty if Python finds none on the disk."""
    try:
        spec = find_spec(top) or PathFinder.find_spec(top, [os.getcwd()])
    except ValueError:  # a running script has no import spec
        spec = None
    if spec is not None and spec.submodule_search_locations:
        return [Path(folder) for folder in spec.submodule_search_locations]
    file = getattr(sys.modules.get(top), "__file__", None) if spec is None else spec.origin
    return [Path(file)] if file and Path(file).is_file() else []


def _digest(files: Files) -> str:
    lines = []
    for key, path in sorted(files.items()):
        source = path.read_bytes()
        digest = _parse(source).digest if path.suffix == ".py" else hashlib.sha256(source).hexdigest()
        lines.append(f"{key}\0{digest}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class ParsedModule(NamedTuple):
    """What is known of a module from its source."""

    digest: str  # of the syntax tree
    imports: frozenset[str]  # names of modules; `from a import b` gives `a` and `a.b`
    texts: frozenset[str]  # strings that may be names of files


@lru_cache(maxsize=2048)
def _parse(source: bytes) -> ParsedModule:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a compiled module
        return ParsedModule(hashlib.sha256(source).hexdigest(), frozenset(), frozenset())
    imports: set[str] = set()
    texts: set[str] = set()
    for node in _nodes_that_run(tree):
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and FILE_NAME.fullmatch(node.value):
            texts.add(node.value)
    digest = hashlib.sha256(" ".join(_tokens(tree)).encode()).hexdigest()
    return ParsedModule(digest, frozenset(imports), frozenset(texts))


def _nodes_that_run(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a syntax tree but those under `if TYPE_CHECKING:`."""
    yield node
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        children: Iterable[ast.AST] = node.orelse
    else:
        children = ast.iter_child_nodes(node)
    for child in children:
        yield from _nodes_that_run(child)


def _tokens(node: ast.AST) -> Iterator[str]:
    """Parts of a syntax tree without docstrings, as text that is the same in all versions of Python."""
    yield f"{type(node).__name__}("
    for field in node._fields:
        value = getattr(node, field, None)
        if value is None or value == [] or field in IRRELEVANT_FIELDS:
            continue
        yield f"{field}="
        for part in value if isinstance(value, list) else [value]:
            if not isinstance(part, ast.AST):
                yield repr(part)
            elif not _is_docstring(part):
                yield from _tokens(part)
    yield ")"


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
