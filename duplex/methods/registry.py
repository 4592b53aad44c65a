"""Find, check and build methods by kind: an entry point of `duplex.methods`, or `module:Class`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import MISSING, fields, replace
from functools import lru_cache
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from duplex.errors import DuplexError, UsageError
from duplex.options import Options, TrainingOptions
from duplex.system.code import UNKNOWN_CODE, plugin_hash
from duplex.system.plugins import installed_plugins, load_plugin, module_of, provider

if TYPE_CHECKING:
    from duplex.methods.base import Method, MethodContext

GROUP = "duplex.methods"
ARGUMENTS = {"data", "method", "seed", "world", "on_step", "on_epoch"}  # of `duplex.fit`
KNOWN_NEEDS = ("cls", "patch", "text", "words")
HINTS = {
    "text": "needs the text tower of the encoder that made the features, but there is none; give an encoder with one "
    "(`encoder=`, or the data set's encoder in params.yaml), or a kind that needs no `text` (`duplex methods`)",
    "words": "needs word vectors, but has none; give a GloVe file (`word_vectors=`, or evaluation.word_vectors)",
    "patch": 'needs patch tokens, but there are none; load the images with tokens="patch" or, in a project, set '
    "extraction.tokens to patch in params.yaml and extract the features again (`duplex extract`)",
}
SCRIPTS = ("__main__", "__mp_main__")  # of a running script, also in its processes

_temporary: dict[str, type[Method[Any]]] = {}
_code: WeakKeyDictionary[type, str | None] = WeakKeyDictionary()  # hashes of code


class BrokenMethodError(DuplexError):
    """Raised for a kind whose class cannot be imported or is not a valid method."""


def installed_methods() -> dict[str, EntryPoint]:
    return installed_plugins(GROUP)


def method_entry_point(kind: str) -> EntryPoint:
    """The entry point of a kind, a new one for `module:Class`; UsageError if unknown."""
    if ":" in kind:
        return EntryPoint(kind, kind, GROUP)
    known = installed_methods()
    if kind not in known:
        raise UsageError(f"unknown kind of method {kind!r}; known: {', '.join(known)}, or module:Class")
    return known[kind]


@contextmanager
def temporary_kind(method_class: type[Method[Any]]) -> Iterator[str]:
    """Register a class for the length of a `with` block; yields the name to find it by."""
    kind = f"{method_class.__module__}:{method_class.__qualname__}"
    _temporary[kind] = method_class
    try:
        yield kind
    finally:
        del _temporary[kind]


def find_method(kind: str) -> type[Method[Any]]:
    """The class of a kind, even `module:Class` in this folder; BrokenMethodError if unusable."""
    if kind in _temporary:
        return _checked_options(kind, _temporary[kind])
    module, _, name = kind.partition(":")
    defined = getattr(sys.modules.get(module), "__dict__", {}).get(name.partition(".")[0])
    if module in SCRIPTS and defined is None:
        raise BrokenMethodError(
            f"method kind {kind!r} is a class of another script or notebook; move the class into a module and train "
            "again, or load the run in the script that defines the class"
        )
    return _load_method(kind, id(defined))


@lru_cache(maxsize=256)
def _load_method(kind: str, identity: int) -> type[Method[Any]]:
    # identity: `id` of the class as defined now, so that a redefined class is loaded again
    from duplex.methods.base import Method

    folder = os.getcwd()
    if ":" in kind and folder not in sys.path:
        sys.path.append(folder)
    advice = ", or remove its methods from params.yaml"
    value: type[Method[Any]] = load_plugin(method_entry_point(kind), "method kind", Method, advice, BrokenMethodError)
    return _checked_options(kind, value)


def _checked_options(kind: str, value: type[Method[Any]]) -> type[Method[Any]]:
    if not (isinstance(value.Options, type) and issubclass(value.Options, Options)):
        name = f"{value.__module__}:{value.__qualname__}"
        raise BrokenMethodError(f"method kind {kind!r}: {name}.Options must be a subclass of duplex.options.Options")
    taken = {field.name for field in fields(TrainingOptions)} | ARGUMENTS  # by `duplex.fit`
    for field in fields(value.Options):
        if field.name in taken:
            name = f"its option {field.name!r}"
            raise BrokenMethodError(f"method kind {kind!r}: {name} is a setting of duplex.fit too; rename it")
    if value not in _code:  # before its file is edited
        code = plugin_hash(module_of(method_entry_point(kind)))
        _code[value] = f"{code} {uuid4()}" if code == UNKNOWN_CODE else code  # while it lives
    return value


def plugin_code_hash(kind: str) -> str | None:
    """Hash of a plug-in's code when it was imported; None for a kind of this package."""
    return _code[find_method(kind)]


def parse_options(kind: str, record: Mapping[str, Any]) -> Options:
    """Make a kind's options from a dict; raises `OptionError` for unknown keys and wrong values."""
    return find_method(kind).Options.from_dict(record)


def make_method(kind: str, options: Options, context: MethodContext) -> Method[Any]:
    """Build a method, with its fine-tuned blocks if any; UsageError if an input is missing."""
    method_class = find_method(kind)
    for need in sorted(method_class.needs(options)):
        available = getattr(context, need) is not None if need in ("text", "words") else need in context.inputs
        if not available:
            hint = HINTS.get(need, f"needs the input {need!r}, but the data set has only {', '.join(context.inputs)}")
            raise UsageError(f"method kind {kind!r} {hint}")
    if context.parts and not method_class.reads_joined:
        both = [other for other in installed_methods() if _reads_joined(other)]
        raise UsageError(
            f"method kind {kind!r} reads the features of one encoder, but the data set has those of "
            f"{len(context.parts)}; name one (`encoder` of the method in params.yaml), or choose a method of kind "
            f"{' or '.join(both)}, such as closed_form, linear, dual or dual_visual"
        )
    if context.finetuned_blocks is None or method_class.combines_runs:
        return method_class(context, options)
    own_tower = replace(context, text=copy(context.text))  # fine-tuning may change the tower
    method = method_class(own_tower, options)
    if not method.groups():
        instead = ", or set `losses`" if hasattr(options, "losses") else ""
        raise UsageError(
            f"method kind {kind!r} trains nothing with these options, so it cannot fine-tune the encoder; "
            f"remove `finetune`{instead}"
        )
    from duplex.methods.finetuned import WithFinetuning

    return WithFinetuning(method, context.finetuned_blocks())


def _reads_joined(kind: str) -> bool:
    try:
        return find_method(kind).reads_joined
    except BrokenMethodError:
        return False


def describe_method(kind: str) -> dict[str, Any]:
    """A kind's source, needs and options; with a key `error` if it cannot be loaded."""
    source = method_entry_point(kind)
    record: dict[str, Any] = {"kind": kind, "source": provider(source), "module": module_of(source)}
    try:
        method_class = find_method(kind)
    except BrokenMethodError as error:
        return {**record, "needs": [], "options": [], "error": str(error)}
    defaults: dict[str, Any] = {}
    complete = True
    for field in fields(method_class.Options):
        if field.metadata.get("hidden"):
            continue
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if default is MISSING:
            default = None
            complete = False
        if isinstance(default, Options):
            defaults |= {f"{field.name}.{key}": value for key, value in default.to_dict().items()}
        else:
            defaults[field.name] = list(default) if isinstance(default, tuple) else default
    needs = sorted(method_class.needs(method_class.Options())) if complete else []
    types = method_class.Options.describe_types()
    options = [{"name": name, "type": types[name], "default": default} for name, default in defaults.items()]
    return {**record, "needs": needs, "options": options}
