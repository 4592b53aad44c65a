"""Kinds by name: what is there, what is asked for wrongly, what a setting lacks."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, version
from typing import Any

import pytest

from duplex.errors import UsageError
from duplex.methods import registry
from duplex.methods.base import Method
from duplex.methods.duplex import Duplex, DuplexOptions
from duplex.methods.prompts import PromptMethod, PromptOptions
from duplex.methods.registry import BrokenMethod, describe, find, make, parse, source_of, sources
from duplex.options import OptionError, Options
from tests.methods.world import small_setting


def test_built_in_kinds_are_found_as_all_others_are():
    assert find("duplex") is Duplex
    assert find("prompts") is PromptMethod
    assert {"duplex", "prompts"} <= set(sources())
    assert find("duplex.methods.prompts:PromptMethod") is PromptMethod


def test_an_unknown_kind_lists_the_known_ones():
    with pytest.raises(UsageError, match=r"unknown kind of method 'duplx'; known: .*duplex.*prompts.*module:Class"):
        find("duplx")


NUMBER = 3


class Optionless(Method[Any]):
    Options = 3  # type: ignore[assignment]


class Misled(Method[Any]):
    Options = int  # type: ignore[assignment]


class Failing(type):
    @property
    def failing(cls) -> Any:
        raise KeyError

    @property
    def talking(cls) -> Any:
        raise ValueError("first line\nsecond line")


class Nested(metaclass=Failing):
    pass


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nowhere.at_all:Method", "cannot be loaded .ModuleNotFoundError"),
        ("duplex.methods.prompts:Nothing", "cannot be loaded .AttributeError"),
        ("duplex.methods.prompts:PromptOptions", "no subclass of duplex.methods.base.Method"),
        ("duplex.methods.prompts:TEMPLATE_OF_NONE.x", "cannot be loaded .AttributeError"),
        (f"{__name__}:NUMBER", r"tests\.methods\.test_registry:NUMBER is no subclass of duplex.methods.base.Method"),
        (f"{__name__}:Optionless", r"Optionless\.Options is no subclass of duplex.options.Options"),
        (f"{__name__}:Misled", r"Misled\.Options is no subclass of duplex.options.Options"),
        (f"{__name__}:Nested.failing", r"of tests\.methods\.test_registry cannot be loaded .KeyError: KeyError.; mend"),
        (f"{__name__}:Nested.talking", r"cannot be loaded .ValueError: first line.; mend"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(kind, said):
    with pytest.raises(BrokenMethod, match=said) as caught:
        find(kind)
    told = describe(kind)
    assert told["needs"] == told["options"] == [] and told["error"] == str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_setting_that_lacks_what_a_method_needs_is_named():
    setting = small_setting()
    with pytest.raises(UsageError, match=r"method kind 'duplex' reads prompts through a text tower.*`duplex methods`"):
        make("duplex", DuplexOptions(), dataclasses.replace(setting, text=None))
    with pytest.raises(UsageError, match="needs the input 'cls', and this cache holds patch"):
        make("prompts", PromptOptions(), dataclasses.replace(setting, inputs={"patch": (4, 8)}))


class Worded(Method[Options]):
    @classmethod
    def needs(cls, options):
        return frozenset({"cls", "words", "patch"})


def test_words_and_patch_tokens_have_sentences_of_their_own():
    kind, setting = f"{__name__}:Worded", small_setting()
    with pytest.raises(
        UsageError, match=r"reads patch tokens.*extraction.tokens to patch.*`duplex extract --dataset NAME`"
    ):
        make(kind, Options(), setting)
    with pytest.raises(UsageError, match=r"needs word vectors.*evaluation\.word_vectors"):
        make(kind, Options(), dataclasses.replace(setting, inputs={"cls": (8,), "patch": (4, 8)}))


@pytest.mark.parametrize("kind", ["duplex", "prompts"])
def test_options_survive_json(kind):
    row = find(kind).Options()
    assert parse(kind, json.loads(json.dumps(row.to_dict()))) == row


def test_options_are_refused_where_they_are_made():
    with pytest.raises(OptionError, match=r"^context: input should be 'learned' or 'fixed'"):
        PromptOptions(context="lerned")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="losses"):
        PromptOptions(losses=("ch",))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="width: input should be a valid integer"):
        dataclasses.replace(PromptOptions(), width=3.5)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"codebook: unknown key; known: context,"):
        parse("prompts", {"codebook": "none"})
    with pytest.raises(TypeError):
        PromptOptions(codebook="none")


def test_a_description_names_options_needs_and_provider():
    found = describe("prompts")
    assert found["needs"] == ["cls", "text"]
    assert found["source"].startswith("duplex ")
    options = {one["name"]: one for one in found["options"]}
    assert options["losses"] == {"name": "losses", "type": "list of s | o | ct", "default": ["s", "o", "ct"]}


@dataclass(frozen=True)
class Asking(Options):
    depth: int
    names: tuple[str, ...] = field(default_factory=lambda: ("a", "b"))
    rate: float = 0.5


class Demanding(Method[Asking]):
    Options = Asking

    @classmethod
    def needs(cls, options):
        return frozenset({f"{options.depth} of them"})


def test_options_without_a_default_leave_open_what_a_kind_needs():
    found = describe(f"{__name__}:Demanding")
    assert found["source"] == found["module"] == __name__
    assert found["needs"] == [] and "error" not in found
    assert [(one["name"], one["default"]) for one in found["options"]] == [
        ("depth", None), ("names", ["a", "b"]), ("rate", 0.5),
    ]  # fmt: skip


def test_of_two_with_one_name_this_programs_counts(monkeypatch):
    others = [EntryPoint(*pair, "duplex.methods") for pair in (("prompts", "alien:A"), ("b", "z:Z"), ("b", "alien:B"))]
    there = [*others, *registry.entry_points(group="duplex.methods")]
    monkeypatch.setattr(registry, "entry_points", lambda group: there if group == "duplex.methods" else [])
    found = sources()
    assert list(found) == sorted(found)
    assert found["prompts"].module == "duplex.methods.prompts"
    assert found["prompts"].provider == f"duplex {version('duplex')}"
    assert (found["b"].module, found["b"].target, found["b"].provider) == ("alien", "alien:B", "alien")
    assert source_of("some.where:Kind") == registry.Source("some.where:Kind", "some.where:Kind", "some.where")


def test_a_class_of_the_projects_own_folder_is_found_and_no_other_kind_looks_there(tmp_path, monkeypatch):
    (tmp_path / "home_made.py").write_text("from duplex.methods.prompts import PromptMethod as Made\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = list(sys.path)
    find.cache_clear()
    find("prompts")
    assert sys.path == before
    assert issubclass(find("home_made:Made"), PromptMethod)
    find.cache_clear()
    find("home_made:Made")
    assert sys.path == [*before, os.getcwd()]
    sys.modules.pop("home_made")


def test_a_tail_goes_before_a_method_that_trains_something():
    there = dataclasses.replace(small_setting(), image_tail=lambda: pytest.fail("it is made all the same"))
    with pytest.raises(UsageError, match="'prompts' trains nothing with these options, so a tail would stay"):
        make("prompts", PromptOptions(losses=()), there)
    assert isinstance(make("prompts", PromptOptions(losses=()), small_setting()), PromptMethod)
