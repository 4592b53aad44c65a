"""Registry of the kinds of methods: find, import, check and build the class of a method by the name of its kind.

A kind is an entry point of the group `duplex.methods` in any package, or a class given as `module:Class`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import lru_cache
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

from duplex.errors import DuplexError, UsageError, shown
from duplex.options import Options, TrainingOptions
from duplex.system.code_hash import loaded_plugin_hash
from duplex.system.plugins import installed_plugins, load_plugin, module_of, provider

if TYPE_CHECKING:
    from duplex.methods.base import Method, MethodContext

GROUP = "duplex.methods"
ARGUMENTS = {"data", "method", "seed", "world", "on_step", "on_epoch"}  # of `duplex.fit`, beside training options
KNOWN_NEEDS = ("cls", "patch", "text", "words")
HINTS = {
    "text": "needs prompts, and the encoder of these features has no text tower; choose a kind without `text` "
    "(`duplex methods`), or an encoder with a text tower in params.yaml",
    "words": "needs word vectors; set evaluation.word_vectors in params.yaml to a file in GloVe format",
    "patch": "needs patch tokens, and this cache has none; set extraction.tokens to patch in params.yaml and "
    "extract the data set's features again (`duplex extract`)",
}
SCRIPTS = ("__main__", "__mp_main__")  # module of a running script, here and in the processes that it starts

_temporary: dict[str, type[Method[Any]]] = {}


class BrokenMethod(DuplexError):
    """Error raised if the class of a kind of method cannot be imported, or is no valid method."""


def installed_methods() -> dict[str, EntryPoint]:
    """Return name of the kind -> entry point for all installed kinds of methods, sorted by name."""
    return installed_plugins(GROUP)


def require_text_kind(kind: object) -> str:
    """Return `kind`, the name of a kind of method, if it is a string; else raise `UsageError`."""
    if isinstance(kind, str):
        return kind
    name = getattr(kind, "__name__", None) if isinstance(kind, type) else None
    hint = "" if name is None else f"; build a class directly: {name}(context, {name}.Options())"
    expected = f"a name that `duplex methods` lists, or module:Class{hint}"
    raise UsageError(f"the kind of method is {kind!r:.80}; expected {expected}")


def method_source(kind: str) -> EntryPoint:
    """Return the entry point of an installed kind of method, or of a class given as `module:Class`.

    Raises `UsageError` for other kinds."""
    if ":" in require_text_kind(kind):
        return EntryPoint(kind, kind, GROUP)
    known = installed_methods()
    if kind not in known:
        raise UsageError(f"unknown kind of method {kind!r}; known: {', '.join(known)}, or module:Class")
    return known[kind]


@contextmanager
def report_exits(kind: str) -> Iterator[None]:
    """Context manager: raise `DuplexError`, which names the method's `kind`, if a method's code in the block calls
    `sys.exit()`, or raises StopIteration, which would end a caller's `map` without an error."""
    try:
        yield
    except StopIteration as error:
        raise DuplexError(
            f"method kind {kind!r}, or a function given to fit, raised {error!r}; fix its code"
        ) from error
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # `sys.exit` would end the program without a word
        call = f"{type(error).__name__}({', '.join(map(repr, error.args))})"
        raise DuplexError(
            f"method kind {kind!r}, or a function given to fit, raised {call}; it must not call sys.exit()"
        ) from error


@contextmanager
def temporary_kind(method_class: type[Method[Any]]) -> Iterator[str]:
    """Context manager: yield a name by which `find_method` finds a class inside the block, importable or not."""
    kind = f"{method_class.__module__}:{method_class.__qualname__}"
    _temporary[kind] = method_class
    try:
        yield kind
    finally:
        del _temporary[kind]


def find_method(kind: str) -> type[Method[Any]]:
    """Import and return the class of a kind of method. `module:Class` is also looked up in the current folder.

    Raise `BrokenMethod`, which names the package, if the import fails or the class is no `Method`."""
    if require_text_kind(kind) in _temporary:
        return _checked_options(kind, _temporary[kind])
    module, _, name = kind.partition(":")
    defined = getattr(sys.modules.get(module), "__dict__", {}).get(name.partition(".")[0])
    if module in SCRIPTS and defined is None:
        raise BrokenMethod(
            f"method kind {kind!r} is a class of another script or notebook; move the class into a module and train "
            "again, or load the run in the script that defines the class"
        )
    return _load_method(kind, id(defined))


@lru_cache(maxsize=256)
def _load_method(kind: str, identity: int) -> type[Method[Any]]:
    """Import and cache the class of a kind of method.

    identity: `id` of the class as defined now; part of the cache's key, so that a redefined class is loaded again.
    """
    from duplex.methods.base import Method

    folder = os.getcwd()
    if ":" in kind and folder not in sys.path:
        sys.path.append(folder)
    advice = ", or remove its methods from params.yaml"
    value: type[Method[Any]] = load_plugin(method_source(kind), "method kind", Method, advice, BrokenMethod)
    return _checked_options(kind, value)


def _checked_options(kind: str, value: type[Method[Any]]) -> type[Method[Any]]:
    """Return the method class `value` if its options are valid; else raise `BrokenMethod`.

    Its `Options` must be a subclass of `duplex.options.Options`, without names of settings of `duplex.fit`, as a value
    for such an option would never reach the method.
    """
    if not (isinstance(value.Options, type) and issubclass(value.Options, Options)):
        name = f"{value.__module__}:{value.__qualname__}"
        raise BrokenMethod(f"method kind {kind!r}: {name}.Options is no subclass of duplex.options.Options")
    taken = {field.name for field in fields(TrainingOptions)} | ARGUMENTS
    for field in fields(value.Options):
        if field.name in taken:
            name = f"its option {field.name!r}"
            raise BrokenMethod(f"method kind {kind!r}: {name} is a setting of duplex.fit too; rename it")
    loaded_plugin_hash(module_of(method_source(kind)), value)  # before its file is edited
    return value


def method_code(kind: str) -> str | None:
    """Return the hash of the code of a method kind as it was imported; None for a kind of this package."""
    return loaded_plugin_hash(module_of(method_source(kind)), find_method(kind))


def parse_options(kind: str, record: Mapping[str, Any]) -> Options:
    """Return a method kind's options from a mapping; raise `OptionError` for unknown keys and wrong values."""
    return find_method(require_text_kind(kind)).Options.from_dict(record)


def checked_needs(method_class: type[Method[Any]], options: Options) -> frozenset[str]:
    """Return the names of the inputs that a method class needs with some options, such as `cls` and `text`.

    Raise `UsageError`, which names the class, unless its `needs(options)` returns a collection of names.
    """
    needs: Any = method_class.needs(options)
    names: list[Any] = [None] if isinstance(needs, str) or not isinstance(needs, Iterable) else list(needs)
    if not all(isinstance(name, str) for name in names):
        expected = "a frozenset of names, such as frozenset({'cls'})"
        raise UsageError(f"{method_class.__name__}.needs() returned {shown(needs)}; expected {expected}")
    return frozenset(names)


def make_method(kind: str, options: Options, context: MethodContext) -> Method[Any]:
    """Return a new method of a kind, wrapped in `WithFinetuning` if the context has encoder blocks to fine-tune.

    Raise `UsageError` if the context lacks an input that the method needs, or blocks are to be fine-tuned for a method
    that trains nothing."""
    method_class = find_method(require_text_kind(kind))
    _check_arguments(kind, method_class, options, context)
    for need in sorted(checked_needs(method_class, options)):
        available = getattr(context, need) is not None if need in ("text", "words") else need in context.inputs
        if not available:
            hint = HINTS.get(need, f"needs the input {need!r}, and this cache holds {', '.join(context.inputs)}")
            raise UsageError(f"method kind {kind!r} {hint}")
    method = method_class(context, options)
    if context.finetuned_blocks is None or method_class.combines_runs:
        return method
    if not method.groups():
        raise UsageError(
            f"method kind {kind!r} trains nothing with these options, so it cannot fine-tune the encoder; "
            "remove `finetune`, or set `losses`"
        )
    from duplex.methods.with_finetuning import WithFinetuning

    return WithFinetuning(method, context.finetuned_blocks())


def _check_arguments(kind: str, method_class: type[Method[Any]], options: object, context: object) -> None:
    """Raise `UsageError` unless `options` are of the class's type `Options` and `context` is a `MethodContext`."""
    from duplex.methods.base import MethodContext

    if not isinstance(options, method_class.Options):
        expected = method_class.Options.__name__
        raise UsageError(
            f"the options of {kind} are {options!r:.80}; expected {expected}(...), or for a table of "
            f"keys and values parse_options({kind!r}, TABLE)"
        )
    if not isinstance(context, MethodContext):
        raise UsageError(f"the context of {kind} is {context!r:.80}; expected a MethodContext")


def describe_method(kind: str) -> dict[str, Any]:
    """Return the description of a kind that `duplex methods` prints.

    It has the provider, the module, the inputs needed by default, and the options with types and defaults. If the kind
    cannot be loaded or described, it has `error` instead of inputs and options.
    """
    source = method_source(kind)
    record: dict[str, Any] = {"kind": kind, "source": provider(source), "module": module_of(source)}
    try:
        method_class = find_method(kind)
    except BrokenMethod as error:
        return {**record, "needs": [], "options": [], "error": str(error)}
    defaults, complete = {}, True
    shown = [field for field in fields(method_class.Options) if not field.metadata.get("hidden")]
    for field in shown:
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        complete = complete and default is not MISSING
        defaults[field.name] = list(default) if isinstance(default, tuple) else None if default is MISSING else default
    try:
        needs = sorted(checked_needs(method_class, method_class.Options())) if complete else []
    except UsageError as error:
        return {**record, "needs": [], "options": [], "error": str(error)}
    types = method_class.Options.describe_types()
    options = [{"name": name, "type": types[name], "default": default} for name, default in defaults.items()]
    return {**record, "needs": needs, "options": options}
