"""Hashes of the code that results depend on.

`STAGES` lists the modules and folders that belong to a stage. For a method or an encoder family, the hash covers its
module and what that imports from `methods/` and `encoders/`; for a plug-in, its whole top-level package. Syntax trees
without docstrings are hashed, so edits of comments, docstrings and formatting change no hash.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

STAGES: dict[str, tuple[str, ...]] = {  # stage -> modules, or folders of modules
    "prepare": ("labels", "data/contents", "data/images", "data/label_studio", "data/sources", "data/tables"),
    "shapes": ("data/shapes",),  # beside `prepare` and `extract`, for the data set whose images it draws
    "extract": ("data/images", "encoders/base", "encoders/image_blocks", "encoders/open_clip", "features"),
    "train": (
        *("labels", "options", "training", "features/file", "features/tokens", "system/threads"),
        *("encoders/base", "encoders/image_blocks", "encoders/prompt_tree", "encoders/text"),
        *("evaluation/accumulate", "evaluation/probabilities", "evaluation/feasibility", "evaluation/vectors"),
        *("methods/base", "methods/finetuned", "methods/augmentation"),
    ),
    "evaluate": ("training/run", "training/scoring", "training/inputs", "evaluation", "methods/base"),
    "stream": ("project/stream",),  # beside `evaluate`, with the module of the adapter
    "inventory": (),
    "maps": ("project/runs", "report/figures"),
    "report": ("report", "project/report", "project/runs"),
}
FOLLOWED = ("data", "encoders", "features", "methods")  # rooms from which the imports of a method or encoder count

PACKAGE = Path(__file__).parents[1]
UNKNOWN_CODE = "unknown"  # instead of the hash of a class without a file, as in a notebook
IRRELEVANT_FIELDS = {"ctx", "kind", "type_comment", "type_ignores", "type_params"}  # of nodes of a syntax tree
Files = dict[str, Path]  # by their paths below the folder in which their package lies


def code_hash(*stages: str, modules: Iterable[str] = ()) -> str:
    """Hash of the code of `stages` (keys of `STAGES`) and of `modules`, such as `duplex.methods.gaussian`."""
    return _digest(code_files(*stages, modules=modules))


def code_files(*stages: str, modules: Iterable[str] = ()) -> Files:
    files: Files = {}
    for module in modules:
        files |= _with_imports(_room_file(module) or plugin_files(module), _room_file)
    for part in (part for stage in stages for part in STAGES[stage]):
        found = _files_of([PACKAGE / part, PACKAGE / f"{part}.py"], PACKAGE.parent)
        if not found:
            raise FileNotFoundError(f"the package is incomplete: {PACKAGE / part} is missing; reinstall duplex-czsl")
        files |= found
    return files


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
        for name in _parse(waiting.pop().read_bytes())[1]:
            more = {key: path for key, path in find(name).items() if key not in files}
            files |= more
            waiting += more.values()
    return files


def _room_file(module: str) -> Files:
    """Dict of the one file of a module, if it is in a folder of `FOLLOWED`; an empty dict for other modules."""
    package, *parts = module.split(".")
    if package != PACKAGE.name or not parts or parts[0] not in FOLLOWED:
        return {}
    place = PACKAGE.joinpath(*parts)
    return _files_of([place.with_suffix(".py"), place / "__init__.py"], PACKAGE.parent)


def _files_of(places: Iterable[Path], root: Path | None = None) -> Files:
    files: Files = {}
    for place in places:
        for path in [place] if place.is_file() else place.rglob("*.py"):
            files[path.relative_to(root or place.parent).as_posix()] = path
    return files


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
    lines = [f"{key}\0{_parse(path.read_bytes())[0]}\n" for key, path in sorted(files.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@lru_cache(maxsize=2048)
def _parse(source: bytes) -> tuple[str, frozenset[str]]:
    """Hash of a module's syntax tree, and names of the modules that it imports (`from a import b`: `a` and `a.b`)."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a compiled module
        return hashlib.sha256(source).hexdigest(), frozenset()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    return hashlib.sha256(" ".join(_tokens(tree)).encode()).hexdigest(), frozenset(names)


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
