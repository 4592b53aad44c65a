"""Options and arguments: what the first refused value and the last allowed one are, and what the message says."""

from typing import Any

import pytest

from duplex.errors import UsageError, require_whole, shown
from duplex.options import AutoFinetune, FinetuneOptions, OptionError, SplitOptions, TrainingOptions


@pytest.mark.parametrize(
    ("make", "key", "allowed", "refused"),
    [
        (TrainingOptions, "batch_size", (1, 10**6), (0, 10**6 + 1, True, 1.0)),
        (TrainingOptions, "learning_rate", (1e-9, 9.99), (0.0, 10.0)),
        (TrainingOptions, "clip", (1e-9, 50.0, None), (0.0,)),
        (TrainingOptions, "decay", (1e-9, 1.0), (0.0, 1.01)),
        (TrainingOptions, "threads", (1, 1024, "auto"), (0, 1025, "all", 1.5, True)),
        (TrainingOptions, "memory", (2**-8,), (2**-8 - 1e-6,)),
        (AutoFinetune, "minutes", (1e-3, 60.0), (0.0,)),
        (FinetuneOptions, "blocks", (1, "all"), (0, "none")),
        (FinetuneOptions, "augment", (["crop", "flip"],), (["crop", "crop"], ["blur"])),
        (SplitOptions, "seed", (0, 2**63 - 1), (-1, 2**63)),
        (SplitOptions, "val_unseen", (1e-9, 0.84), (0.0, 0.85, 1.0)),
        (SplitOptions, "unseen_states", (0.0, 0.99), (1.0,)),
    ],
)
def test_values_are_allowed_up_to_their_bounds(make, key, allowed, refused):
    needed: dict[Any, dict[str, Any]] = {
        TrainingOptions: {"learning_rate": 0.1, "batch_size": 8, "epochs": 12},
        FinetuneOptions: {"blocks": 1},
    }
    given = needed.get(make, {})
    for value in allowed:
        kept = getattr(make.from_dict({**given, key: value}), key)
        assert kept == (tuple(value) if isinstance(value, list) else value)
    for value in refused:
        with pytest.raises(OptionError, match=key):
            make.from_dict({**given, key: value})


def test_widths_are_those_of_docs_finetuning():
    widths = {"bottleneck": 64, "parallel": 64, "lora": 8, "experts": 8, "concepts": 64, "full": 64}
    assert {name: FinetuneOptions(1, adapter=name).inner_width for name in widths} == widths
    assert FinetuneOptions(1, width=3).inner_width == 3


def test_an_option_that_does_not_belong_to_another_is_refused():
    for adapter in ("lora", "full", "concepts", "experts"):
        with pytest.raises(OptionError, match=f"{adapter} has no dropout"):
            FinetuneOptions(1, adapter=adapter, dropout=0.2)
    assert FinetuneOptions("all").depth > FinetuneOptions(999).depth == 999


def test_whole_numbers_have_inclusive_bounds():
    assert [require_whole(value, "k", 2, 4) for value in (2, 3, 4)] == [2, 3, 4]
    for value in (1, 5, True, 2.0, "2"):
        with pytest.raises(UsageError, match=f"^k is {value!r}; expected a whole number from 2 to 4$"):
            require_whole(value, "k", 2, 4)
    with pytest.raises(UsageError, match=r"expected a whole number of at least 1$"):
        require_whole(0, "k")
    assert require_whole(10**9, "k") == 10**9
    assert shown("a\nb" * 40) == repr("a\nb" * 40)[:80]
