"""Kinds by name: what is there, what is asked for wrongly, what a setting lacks."""

from __future__ import annotations

import dataclasses
import json

import pytest

from duplex.errors import UsageError
from duplex.methods.base import Method
from duplex.methods.duplex import Duplex, DuplexOptions
from duplex.methods.prompts import PromptMethod, PromptOptions
from duplex.methods.registry import BrokenMethod, describe, find, make, parse, sources
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


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nowhere.at_all:Method", "cannot be loaded .ModuleNotFoundError"),
        ("duplex.methods.prompts:Nothing", "cannot be loaded .AttributeError"),
        ("duplex.methods.prompts:PromptOptions", "no subclass of duplex.methods.base.Method"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(kind, said):
    with pytest.raises(BrokenMethod, match=said) as caught:
        find(kind)
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
    with pytest.raises(UsageError, match=r"reads patch tokens.*extraction.tokens to patch.*`duplex extract`"):
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
