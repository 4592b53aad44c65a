"""Which code a run stands on: the modules that an entry point and a kind of method import, found by reading them.

A stage depends on the hash of these files, so that changing a shared part repeats all that use it and adding a method
repeats nothing. Imports are followed wherever they stand, in functions too, but for those that only type checkers see.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from duplex.methods.registry import source_of

OURS = __name__.partition(".")[0]
# What these say, where files lie and how they are written changes no number.
SAYING = tuple(
    f"{OURS}.{name}"
    for name in ("errors", "system.progress", "config.artifacts", "system.files", "system.lock", "system.allocator")
)


def code_of_run(entry: str, kind: str) -> str:
    """sha256 of all that `entry`, a module of this program, does with methods of a kind."""
    return hash_of(modules_of(entry) | modules_of(source_of(kind).module))


def hash_of(modules: dict[str, Path]) -> str:
    digest = hashlib.sha256()
    for name in sorted(modules):
        digest.update(name.encode() + b"\0" + hashlib.sha256(modules[name].read_bytes()).digest())
    return digest.hexdigest()


@lru_cache(maxsize=256)
def _closure(entry: str) -> tuple[tuple[str, Path], ...]:
    followed = {OURS, entry.partition(".")[0]}
    found: dict[str, Path] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name in found or name in SAYING or name.partition(".")[0] not in followed:
            continue
        path = _file(name)
        if path is None:
            continue
        found[name] = path
        waiting += [name.rpartition(".")[0]] if "." in name else []
        waiting += _imported(name, path)
    return tuple(found.items())


def modules_of(entry: str) -> dict[str, Path]:
    """Name -> file of a module, of all that it imports from this program and from its own package, and of their
    packages."""
    return dict(_closure(entry))


def _file(name: str) -> Path | None:
    try:
        spec = find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _imported(name: str, path: Path) -> Iterator[str]:
    """Names that a file imports; `from a import b` may mean the module `a.b`."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in _seen_at_run_time(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _seen_at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                yield from _seen_at_run_time(other)
            continue
        yield node
        yield from _seen_at_run_time(node)
