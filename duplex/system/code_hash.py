"""Hash the code that a pipeline stage or a method uses, so that results of changed code can be found to be outdated.

The code is that of all modules that the stage's or method's own module imports, found without running it. Imports are
followed, also inside functions but not under `if TYPE_CHECKING`: into this package, into the package of the method or
stage, and into files in the same folder. Syntax trees without docstrings are hashed: comments, docstrings and
formatting change no hash. Of a compiled module, the bytes of its file are hashed.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import os
import sys
from collections.abc import Collection, Iterator
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder, all_suffixes
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from weakref import WeakKeyDictionary

PACKAGE = __name__.partition(".")[0]
SCRIPT = "__main__"  # name of the module of a script or notebook
UNKNOWN_CODE = hashlib.sha256().hexdigest()  # hash of modules without any file
# Modules that change no number: messages, places of files, and options, whose values are hashed instead.
IGNORED_MODULES = tuple(
    f"{PACKAGE}.{name}"
    for name in (
        "artifacts",
        "config",
        "errors",
        "stages.outdated_runs",
        "system.allocator",
        "system.code_hash",
        "system.entry",
        "system.files",
        "system.progress",
        "system.version",
    )
)
_loaded_hashes: WeakKeyDictionary[type, tuple[str | None, list[object]]] = WeakKeyDictionary()
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


def plugin_hash(module: str, plugin: type | None = None) -> str | None:
    """Return the hash of a plug-in's code, without the code of this package; None for a module of this package.

    A plug-in is a class for duplex, such as a method, from another package or file. For a module without a file, as in
    a notebook, the source of the class is hashed, with that of its base classes in the same module. Without this
    source, the hash is `UNKNOWN_CODE`.

    module: name of the module that defines it.
    plugin: the class.
    """
    if module.partition(".")[0] == PACKAGE:
        return None
    code = code_hash(module, ignored=(PACKAGE,))
    return _class_hash(plugin) if code == UNKNOWN_CODE and plugin is not None else code


def loaded_plugin_hash(module: str, plugin: type) -> str | None:
    """Return the hash that `plugin_hash` gave when it was first asked for the class `plugin`, not that of edited files.

    The files are hashed again after a reload of a module, or after the code of its functions has been replaced, as
    IPython's `%autoreload` does.
    """
    if module.partition(".")[0] == PACKAGE:
        return None
    names = {name.partition(".")[0] for name in (module, plugin.__module__)}
    parts = [part for name, part in [*sys.modules.items()] if name.partition(".")[0] in names]
    running = [item for part in parts if isinstance(part, ModuleType) for item in _running_code(part)]
    code, before = _loaded_hashes.get(plugin, (None, []))
    if not before or {*map(id, before)} - {*map(id, running)}:
        code = plugin_hash(module, plugin)
        _loaded_hashes[plugin] = code, running
    return code


def _running_code(module: ModuleType) -> Iterator[object]:
    """Yield the objects of a loaded module that a reload replaces: its import spec and the code of its functions."""
    yield module.__spec__
    for value in [*vars(module).values()]:
        if getattr(value, "__module__", None) == module.__name__:
            parts = [*vars(value).values()] if isinstance(value, type) else [value]
            yield from (part.__code__ for part in parts if inspect.isfunction(part))


def _class_hash(plugin: type) -> str:
    nodes = [_class_node(each) for each in plugin.__mro__ if each.__module__ == plugin.__module__]
    code = [" ".join(_tokens(_RunTimeCode().visit(node))) for node in nodes if node is not None]
    return hashlib.sha256("\0".join(code).encode()).hexdigest() if len(code) == len(nodes) else UNKNOWN_CODE


def _class_node(plugin: type) -> ast.ClassDef | None:
    """Return the syntax tree of a class, or None if its source is unknown.

    The source is found by the class's functions, since `inspect.getsource` fails for classes of a notebook.
    """
    for function in filter(inspect.isfunction, map(inspect.unwrap, vars(plugin).values())):
        text = "".join(linecache.getlines(function.__code__.co_filename, function.__globals__))
        try:
            nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
        except (SyntaxError, ValueError):
            continue
        line = function.__code__.co_firstlineno
        for node in nodes:
            if node.name == plugin.__name__ and node.lineno <= line <= (node.end_lineno or 0):
                return node
    return None


def imported_modules(*entries: str, ignored: Collection[str] = ()) -> dict[str, Path]:
    """Return, by name, the files of the modules `entries`, of all modules that they import, and of parent packages.

    Imports are followed into this package, into the packages of `entries`, and into files in the same folder as an
    entry module, which a method in the project's folder may import. Installed packages are not followed.
    """
    waiting = [_own_name(name) for name in entries]
    packages = {PACKAGE, *(name.partition(".")[0] for name in waiting)}
    folders = {_own_folder(name) for name in packages - {PACKAGE}} - {None}
    left_out = (*IGNORED_MODULES, *ignored)
    modules: dict[str, Path] = {}
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


def _own_name(module: str) -> str:
    """Return the name by which a module can be imported; for `__main__` started as `python -m NAME`, this is NAME.

    Other names are returned as they are.
    """
    spec = getattr(sys.modules.get(SCRIPT), "__spec__", None) if module == SCRIPT else None
    return module if spec is None else spec.name


def _own_folder(top: str) -> Path | None:
    """Return the folder that holds a top-level module or package; None if it is part of Python, or installed."""
    path = None if top in sys.stdlib_module_names else _file(top) or _namespace(top)
    if path is None or {"site-packages", "dist-packages"} & set(path.parts):
        return None
    return path.parent.parent if path.name == "__init__.py" else path.parent


def _namespace(top: str) -> Path | None:
    """Return the first folder of a top-level package without `__init__.py`; None if there is no such package."""
    spec = _spec(top, os.getcwd(), *sys.path)
    return next(map(Path, (spec and spec.submodule_search_locations) or ()), None)


def imported_names(name: str, path: Path) -> set[str]:
    """Return the names of all modules that a module imports, except for type checkers only.

    `from a import b` gives both `a` and `a.b`.
    """
    return set(_parsed(name, path)[1])


def _file(name: str) -> Path | None:
    """Return the file of a module, its source if there is one; None if the module has no file.

    Only a top-level package is searched by Python's import system; its modules are looked up by their paths. A running
    script has no import spec, and its `__file__` is used.
    """
    top, *rest = name.split(".")
    spec = _spec(top, os.getcwd(), *sys.path) if top else None
    if not rest:
        origin = getattr(sys.modules.get(top), "__file__", None) if spec is None else spec.origin
        return Path(origin) if origin and Path(origin).is_file() else None
    places = [Path(folder, *rest) for folder in (spec and spec.submodule_search_locations) or ()]
    files = (file for place in places if place.parent.is_dir() for file in _module_files(place))
    return next((file for file in files if file.is_file()), None)


def _module_files(place: Path) -> Iterator[Path]:
    """Yield the possible files of a module: for `a/b`, these are such as `a/b.py` and `a/b/__init__.py`.

    place: path of the module without suffix.
    """
    for suffix in all_suffixes():
        yield from (place.with_name(f"{place.name}{suffix}"), place / f"__init__{suffix}")


@lru_cache(maxsize=64)
def _spec(top: str, folder: str, *search: str) -> ModuleSpec | None:
    """Return the import spec of a top-level module or package; None if it cannot be found.

    folder: the project's folder, which is searched last; a user's methods may be modules there.
    search: Python's search path, which is not used but part of the key of this function's cache.
    """
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
    except (SyntaxError, ValueError):  # ValueError: zero bytes, as in a compiled module
        return hashlib.sha256(text).hexdigest(), ()
    code = " ".join(_tokens(tree))
    return hashlib.sha256(code.encode()).hexdigest(), tuple(sorted(set(_imports(name, path, tree))))


class _RunTimeCode(ast.NodeTransformer):
    """Removes docstrings, and code under `if TYPE_CHECKING`, from a syntax tree."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        name = node.test.attr if isinstance(node.test, ast.Attribute) else getattr(node.test, "id", None)
        return node.orelse if name == "TYPE_CHECKING" else node

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
