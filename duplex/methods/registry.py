"""Kinds of methods by name: entry points of the group `duplex.methods`, built in and third-party alike, or
`module:Class`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from duplex.errors import DuplexError, UsageError
from duplex.options import Options

if TYPE_CHECKING:
    from duplex.layers.finetuned_blocks import Tail
    from duplex.methods.base import Method, Setting

GROUP = "duplex.methods"
KNOWN_NEEDS = ("cls", "patch", "text", "words")
HINTS = {
    "text": "reads prompts through a text tower, which the encoder of these features has not got; choose a kind "
    "without text (`duplex methods`), or name an encoder with a text tower in params.yaml",
    "words": "needs word vectors; name a GloVe-format file as evaluation.word_vectors in params.yaml",
    "patch": "reads patch tokens, which this cache does not hold; set extraction.tokens to patch in params.yaml and "
    "run `duplex extract --dataset NAME` again",
}


@dataclass(frozen=True)
class Source:
    """Where a kind comes from."""

    kind: str
    target: str  # module:Class
    provider: str  # distribution and version, or the module's own name

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]


class BrokenMethod(DuplexError):
    """A kind that is installed and cannot be used."""


def sources() -> dict[str, Source]:
    """Every kind that is installed; of two with one name, the one of this program, else the first."""
    found: dict[str, Source] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: (not _is_ours(point), point.value)):
        found.setdefault(point.name, Source(point.name, point.value, _provider(point)))
    return dict(sorted(found.items()))


def source_of(kind: str) -> Source:
    """A kind by name; `module:Class` needs no registration."""
    if ":" in kind:
        return Source(kind, kind, kind.partition(":")[0])
    known = sources()
    if kind not in known:
        raise UsageError(f"unknown kind of method {kind!r}; known: {', '.join(known)}, or module:Class")
    return known[kind]


@lru_cache(maxsize=256)
def find(kind: str) -> type[Method[Any]]:
    """The class of a kind. What is wrong with it is one sentence that names its provider."""
    from duplex.methods.base import Method

    source = source_of(kind)
    module, _, name = source.target.partition(":")
    here = os.getcwd()
    if ":" in kind and here not in sys.path:
        sys.path.append(here)  # a module of the project's own folder
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # a plug-in may fail in any way
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BrokenMethod(
            f"method kind {kind!r} of {source.provider} cannot be loaded ({type(error).__name__}: {reason}); mend or "
            "uninstall it, or take its rows out of params.yaml"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise BrokenMethod(f"method kind {kind!r}: {source.target} is no subclass of duplex.methods.base.Method")
    if not (isinstance(found.Options, type) and issubclass(found.Options, Options)):
        raise BrokenMethod(f"method kind {kind!r}: {source.target}.Options is no subclass of duplex.options.Options")
    return found


def parse(kind: str, row: Mapping[str, Any]) -> Options:
    """A row's options, checked by the kind itself."""
    return find(kind).Options.from_dict(row)


def make(kind: str, options: Options, setting: Setting) -> Method[Any]:
    """A fresh method, after a look at whether the setting has what it needs; with its tail, where it has one."""
    method = find(kind)
    for need in sorted(method.needs(options)):
        there = getattr(setting, need) is not None if need in ("text", "words") else need in setting.inputs
        if not there:
            has = ", ".join(setting.inputs)
            raise UsageError(
                f"method kind {kind!r} {HINTS.get(need, f'needs the input {need!r}, and this cache holds {has}')}"
            )
    made = method(setting, options)
    return made if setting.image_tail is None else _tailed(kind, made, setting.image_tail)


def _tailed(kind: str, made: Method[Any], tail: Callable[[], Tail]) -> Method[Any]:
    from duplex.methods.with_finetuning import WithFinetuning

    if not made.groups():
        raise UsageError(
            f"method kind {kind!r} trains nothing with these options, so a tail would stay as it is; "
            "leave `tail` out, or give the row losses"
        )
    return WithFinetuning(made, tail())


def describe(kind: str) -> dict[str, Any]:
    """What `duplex methods` says of a kind: who brings it, what it reads by default, its options."""
    source = source_of(kind)
    said: dict[str, Any] = {"kind": kind, "source": source.provider, "module": source.module}
    try:
        method = find(kind)
    except BrokenMethod as error:
        return {**said, "needs": [], "options": [], "error": str(error)}
    defaults = {field.name: _default(field) for field in fields(method.Options)}
    missing = [name for name, value in defaults.items() if value is MISSING]
    needs = [] if missing else sorted(method.needs(method.Options()))
    options = [
        {"name": name, "type": spoken, "default": None if defaults[name] is MISSING else _plain(defaults[name])}
        for name, spoken in method.Options.spoken_types().items()
    ]
    return {**said, "needs": needs, "options": options}


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _is_ours(point: EntryPoint) -> bool:
    return point.value.startswith("duplex.")


def _provider(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value.partition(":")[0]
