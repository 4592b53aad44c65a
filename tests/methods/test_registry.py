"""Kinds of methods: found by name, refused with a reason, described."""

import dataclasses
import os
import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
from torch import nn

from duplex.errors import DISTRIBUTION, UsageError
from duplex.methods.base import Method
from duplex.methods.duplex import Duplex, DuplexOptions
from duplex.methods.finetuned import WithFinetuning
from duplex.methods.prompt_method import PromptMethod, PromptOptions
from duplex.methods.registry import BrokenMethodError, describe_method, find_method, installed_methods, make_method
from duplex.options import FinetuneOptions, Options
from duplex.system import plugins
from duplex.system.plugins import module_of
from tests.methods.world import small_context


def test_kinds_are_found_by_name_or_by_class():
    assert find_method("duplex") is Duplex
    assert {"duplex", "prompts"} <= set(installed_methods())
    assert find_method("duplex.methods.prompt_method:PromptMethod") is PromptMethod


def test_an_unknown_kind_lists_the_known_ones():
    with pytest.raises(UsageError, match=r"unknown kind of method 'duplx'; known: .*duplex.*prompts.*module:Class"):
        find_method("duplx")


@pytest.mark.parametrize("kind", ["nowhere.at_all:Method", "duplex.methods.prompt_method:PromptOptions"])
def test_a_broken_kind_is_described_by_its_error(kind):
    with pytest.raises(BrokenMethodError) as caught:
        find_method(kind)
    assert describe_method(kind)["error"] == str(caught.value)


class NeedsAll(Method[Options]):
    @classmethod
    def needs(cls, options):
        return frozenset({"cls", "words", "patch"})


@pytest.mark.parametrize(
    ("kind", "options", "change", "message"),
    [
        ("duplex", DuplexOptions(), {"text": None}, r"'duplex' needs the text tower.*`duplex methods`"),
        ("prompts", PromptOptions(), {"inputs": {"patch": (4, 8)}}, "needs the input 'cls', .* has only patch"),
        (f"{__name__}:NeedsAll", Options(), {}, r"patch tokens.*extraction.tokens to patch.*`duplex extract`"),
        (f"{__name__}:NeedsAll", Options(), {"inputs": {"cls": (8,), "patch": (4, 8)}}, r"evaluation\.word_vectors"),
    ],
)  # fmt: skip
def test_a_missing_input_is_reported_with_what_to_do(kind, options, change, message):
    with pytest.raises(UsageError, match=message):
        make_method(kind, options, dataclasses.replace(small_context(), **change))


def test_a_description_has_options_needs_and_provider():
    description = describe_method("prompts")
    assert description["needs"] == ["cls", "text"]
    assert description["source"].startswith(f"{DISTRIBUTION} ")
    losses = next(option for option in description["options"] if option["name"] == "losses")
    default = ["state", "object", "semantic"]
    assert losses == {"name": "losses", "type": "list of state | object | semantic", "default": default}


def test_a_built_in_kind_wins_and_one_of_two_distributions_is_refused(monkeypatch):
    others = [EntryPoint(*pair, "duplex.methods") for pair in (("prompts", "alien:A"), ("b", "z:Z"), ("b", "alien:B"))]
    points = [*others, *plugins.entry_points(group="duplex.methods")]
    monkeypatch.setattr(plugins, "entry_points", lambda group, name=None: [p for p in points if name in (None, p.name)])
    assert module_of(installed_methods()["prompts"]) == "duplex.methods.prompt_method"
    with pytest.raises(BrokenMethodError, match=r"^method kind 'b' comes from both alien and z; uninstall one of"):
        find_method("b")


def test_only_module_and_class_are_looked_up_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "home_made.py").write_text("from duplex.methods.prompt_method import PromptMethod as Made\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = list(sys.path)
    find_method("prompts")
    assert sys.path == before
    assert issubclass(find_method("home_made:Made"), PromptMethod)
    assert sys.path == [*before, os.getcwd()]
    sys.modules.pop("home_made")


def test_a_class_of_a_script_is_found_in_that_script_alone(monkeypatch):
    script = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    with pytest.raises(BrokenMethodError, match=r"'__main__:Probe' is a class of another script or notebook; move"):
        find_method("__main__:Probe")
    for _ in range(2):  # a notebook's cell may define the class again
        script.Probe = type("Probe", (PromptMethod,), {"__module__": "__main__"})
        assert find_method("__main__:Probe") is script.Probe


class Blocks(nn.Identity):
    options = FinetuneOptions(1)


def test_a_method_that_trains_nothing_cannot_fine_tune_the_encoder():
    with_blocks = dataclasses.replace(small_context(), finetuned_blocks=lambda: pytest.fail("the blocks are built"))
    with pytest.raises(UsageError, match="'prompts' trains nothing with these options, so it cannot fine-tune"):
        make_method("prompts", PromptOptions(losses=()), with_blocks)
    assert isinstance(make_method("prompts", PromptOptions(losses=()), small_context()), PromptMethod)
    with_blocks = dataclasses.replace(with_blocks, finetuned_blocks=Blocks)  # type: ignore[arg-type]
    trained = make_method("prompts", PromptOptions(), with_blocks)
    assert isinstance(trained, WithFinetuning) and isinstance(trained.blocks, Blocks)
