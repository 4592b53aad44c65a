"""Identities of caches: which are refused, in what they differ, and the command that is suggested."""

from pathlib import Path

import pytest

from duplex.errors import DuplexError
from duplex.features.file import (
    DISPLAY_NAMES,
    IMPORTED,
    LIBRARIES,
    ROOT,
    cache_identity,
    check_identity,
    first_difference,
    repair_hint,
)

ENCODER = {"encoder": "e", "weights": "w", "precision": "fp32", "dim": "3", "torch": "2"}
CACHE = Path("artifacts/shoes/features.h5")


def test_an_identity_has_only_keys_of_options_that_were_set() -> None:
    assert cache_identity(ENCODER, "m") == {**ENCODER, "manifest": "m"}
    wanted = {**ENCODER, "manifest": "m", "tokens": "patch", "block_inputs": "2"}
    assert cache_identity(ENCODER, "m", "patch", 2) == wanted


@pytest.mark.parametrize("key", [*(key for key in DISPLAY_NAMES if key != ROOT), "something"])
@pytest.mark.parametrize("value", ["other", None])
def test_every_expected_value_must_be_equal(key: str, value: str | None) -> None:
    stored = {**dict.fromkeys(DISPLAY_NAMES, "a"), "something": "a"}
    check_identity(stored, stored, CACHE)
    changed = {**stored, key: value} if value is not None else {k: v for k, v in stored.items() if k != key}
    with pytest.raises(DuplexError) as refused:
        check_identity(changed, stored, CACHE)
    name = DISPLAY_NAMES.get(key, key)
    message = f"{CACHE} was made with another {name} (it has {value or 'none'}, but a is needed); {repair_hint(CACHE)}"
    assert str(refused.value) == message


def test_an_identity_without_folder_of_images_fits_any_folder() -> None:
    for stored, expect in (({}, {ROOT: "mypics"}), ({ROOT: "mypics"}, {}), ({ROOT: "mypics"}, {ROOT: None})):
        check_identity(stored, expect, CACHE)
    assert first_difference({}, {ROOT: "mypics"}) is first_difference({ROOT: "mypics"}, {}) is None
    with pytest.raises(DuplexError, match=r"of images \(it has mypics, but pics_v2 is needed\); `duplex extract"):
        check_identity({ROOT: "mypics"}, {ROOT: "pics_v2"}, CACHE)


def test_unexpected_keys_are_allowed() -> None:
    expect = {"manifest": "m", **dict.fromkeys(LIBRARIES, "1")}
    stored = {**ENCODER, "manifest": "m", **dict.fromkeys(LIBRARIES, "2")}
    check_identity(stored, expect, CACHE)


def test_of_imported_features_only_rows_and_width_are_compared() -> None:
    stored = {"encoder": IMPORTED, "weights": "theirs", "manifest": "m", "dim": "3"}
    expect = {**ENCODER, "manifest": "m", "block_inputs": "2"}
    check_identity(stored, expect, CACHE)
    for key in ("manifest", "dim"):
        with pytest.raises(DuplexError, match=f"another {DISPLAY_NAMES[key]}"):
            check_identity({**stored, key: "other"}, expect, CACHE)


def test_a_key_expected_to_be_absent_is_refused_if_present() -> None:
    check_identity(ENCODER, {"block_inputs": None}, CACHE)
    with pytest.raises(DuplexError, match=r"another number of block inputs \(it has 2, but none is needed\)"):
        check_identity({**ENCODER, "block_inputs": "2"}, {"block_inputs": None}, CACHE)
