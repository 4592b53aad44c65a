"""Hash the code that a stage or a method uses: all modules that its own module imports, found without running it.

Imports are followed, also inside functions but not under `if TYPE_CHECKING`: into this package, into the package of
the method or stage, and into files in the same folder. Syntax trees without docstrings are hashed: comments,
docstrings and formatting change no hash.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Collection, Iterator
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

PACKAGE = __name__.partition(".")[0]
# Modules that change no number: messages, places of files, and options, whose values are hashed instead.
IGNORED_MODULES = tuple(
    f"{PACKAGE}.{name}"
    for name in (
        "artifacts",
        "config",
        "errors",
        "system.allocator",
        "system.code_hash",
        "system.error_report",
        "system.files",
        "system.lock",
        "system.progress",
        "system.renamed",
        "system.version",
    )
)
IRRELEVANT_FIELDS = {"ctx", "kind", "type_comment", "type_ignores", "type_params"}  # of nodes of a syntax tree


def code_hash(*entries: str, ignored: Collection[str] = ()) -> str:
    """Return the sha256 of all code that some modules use: their own and that of the modules that they import.

    entries: names of the modules, such as `duplex.stages.train`.
    ignored: names of modules and packages to leave out, together with modules that only they import.
    """
    digest = hashlib.sha256()
    for name, path in sorted(imported_modules(*entries, ignored=ignored).items()):
        digest.update(f"{name}\0{_parsed(name, path)[0]}\0".encode())
    return digest.hexdigest()


def plugin_hash(module: str) -> str | None:
    """Return the hash of a plug-in's own code, without that of this package; None for a module of this package."""
    return None if module.partition(".")[0] == PACKAGE else code_hash(module, ignored=(PACKAGE,))


def imported_modules(*entries: str, ignored: Collection[str] = ()) -> dict[str, Path]:
    """Return, by name, the files of the modules `entries`, of all modules that they import, and of parent packages.

    Imports are followed into this package, into the packages of `entries`, and into files in the same folder as an
    entry module, which a method in the project's folder may import. Installed packages are not followed.
    """
    packages = {PACKAGE, *(name.partition(".")[0] for name in entries)}
    folders = {_own_folder(name) for name in packages - {PACKAGE}} - {None}
    left_out = (*IGNORED_MODULES, *ignored)
    modules: dict[str, Path] = {}
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        is_left_out = any(name == other or name.startswith(f"{other}.") for other in left_out)
        if name in modules or name == PACKAGE or is_left_out:
            continue
        top = name.partition(".")[0]
        path = _file(name) if top in packages or (folders and _own_folder(top) in folders) else None
        if path is not None:
            modules[name] = path
            waiting += [name.rpartition(".")[0], *_parsed(name, path)[1]]
    return modules


def _own_folder(top: str) -> Path | None:
    """Return the folder that holds a top-level module or package; None if it is part of Python, or installed."""
    path = None if top in sys.stdlib_module_names else _file(top)
    if path is None or {"site-packages", "dist-packages"} & set(path.parts):
        return None
    return path.parent.parent if path.name == "__init__.py" else path.parent


def imported_names(name: str, path: Path) -> set[str]:
    """Return the names that a module imports when it runs; `from a import b` gives both `a` and `a.b`."""
    return set(_parsed(name, path)[1])


def _file(name: str) -> Path | None:
    """Return the source file of a module, or None; only its top-level package is searched by Python's import system."""
    top, *rest = name.split(".")
    spec = _spec(top, os.getcwd(), *sys.path) if top else None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        place = Path(folder, *rest)
        for path in (place.with_name(f"{rest[-1]}.py"), place / "__init__.py"):
            if path.is_file():
                return path
    return None


@lru_cache(maxsize=64)
def _spec(top: str, folder: str, *search: str) -> ModuleSpec | None:
    """Return the import spec of a top-level package; methods may be modules in the project's folder."""
    try:
        return find_spec(top) or PathFinder.find_spec(top, [folder])
    except (ImportError, ValueError):
        return None


def _parsed(name: str, path: Path) -> tuple[str, tuple[str, ...]]:
    """Return the hash of a module's syntax tree and the modules that it imports."""
    state = path.stat()
    return _parse(name, path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1024)
def _parse(name: str, path: Path, *state: int) -> tuple[str, tuple[str, ...]]:
    text = path.read_bytes()
    try:
        tree = _RunTimeCode().visit(ast.parse(text))
    except SyntaxError:
        return hashlib.sha256(text).hexdigest(), ()
    code = " ".join(_tokens(tree))
    return hashlib.sha256(code.encode()).hexdigest(), tuple(sorted(set(_imports(name, path, tree))))


class _RunTimeCode(ast.NodeTransformer):
    """Removes docstrings, and code under `if TYPE_CHECKING`, from a syntax tree."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if "TYPE_CHECKING" in ast.dump(node.test) else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node


def _tokens(node: ast.AST) -> Iterator[str]:
    """Yield the parts of a syntax tree as text that is the same in all versions of Python."""
    yield f"{type(node).__name__}("
    for field in node._fields:
        value = getattr(node, field, None)
        if value is not None and value != [] and field not in IRRELEVANT_FIELDS:
            yield f"{field}="
            for part in value if isinstance(value, list) else [value]:
                yield from _tokens(part) if isinstance(part, ast.AST) else [repr(part)]
    yield ")"


def _imports(name: str, path: Path, tree: ast.AST) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
