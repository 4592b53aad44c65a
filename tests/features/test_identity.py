"""What a cache was made by: what is refused, what differs, and the command that mends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from duplex.errors import DuplexError
from duplex.features.identity import IMPORTED, LIBRARIES, SPOKEN, cache_identity, check_identity, difference, repair

ENCODER = {"encoder": "e", "weights": "w", "precision": "fp32", "dim": "3", "torch": "2"}
CACHE = Path("artifacts/shoes/features.h5")


def test_an_identity_holds_what_was_asked_for_and_nothing_else() -> None:
    assert cache_identity(ENCODER, "m") == {**ENCODER, "manifest": "m"}
    assert cache_identity(ENCODER, "m", "patch", 0, 2) == {
        **ENCODER,
        **{"manifest": "m", "tokens": "patch", "limit": "0", "depth": "2"},
    }


@pytest.mark.parametrize("key", [*SPOKEN, "something"])
@pytest.mark.parametrize("value", ["other", None])
def test_whatever_is_expected_must_be_there(key: str, value: str | None) -> None:
    stored = {**dict.fromkeys(SPOKEN, "a"), "something": "a"}
    check_identity(stored, stored, CACHE)
    changed = {**stored, key: value} if value is not None else {k: v for k, v in stored.items() if k != key}
    with pytest.raises(DuplexError) as refused:
        check_identity(changed, stored, CACHE)
    says = f"{CACHE} was made with another {SPOKEN.get(key, key)} ({value or 'none'}, not a); {repair(CACHE)}"
    assert str(refused.value) == says


def test_what_nobody_asks_for_may_be_anything_but_views_or_a_part() -> None:
    expect = {"manifest": "m", **dict.fromkeys(LIBRARIES, "1")}
    stored = {**ENCODER, "manifest": "m", **dict.fromkeys(LIBRARIES, "2")}
    check_identity(stored, expect, CACHE)
    for key, says in (("views", "holds views of training pictures"), ("limit", "holds only the first 4 rows")):
        with pytest.raises(DuplexError, match=says):
            check_identity({**stored, key: "4"}, expect, CACHE)
        check_identity({**stored, key: "4"}, {**expect, key: "4"}, CACHE)


def test_of_imported_features_rows_and_width_alone_are_known() -> None:
    stored = {"encoder": IMPORTED, "weights": "theirs", "manifest": "m", "dim": "3"}
    expect = {**ENCODER, "manifest": "m", "views": "2"}
    check_identity(stored, expect, CACHE)
    for key in ("manifest", "dim"):
        with pytest.raises(DuplexError, match=f"another {SPOKEN[key]}"):
            check_identity({**stored, key: "other"}, expect, CACHE)


def test_long_values_are_shown_by_their_beginning() -> None:
    for length in (40, 41):
        with pytest.raises(DuplexError) as refused:
            check_identity({"weights": "0123456789abcdef" * 3}, {"weights": "x" * length}, CACHE)
        wanted = "x" * 40 if length == 40 else "x" * 12 + "…"
        assert f"(0123456789ab…, not {wanted})" in str(refused.value)


def test_a_difference_is_the_first_key_of_either_side() -> None:
    assert difference(ENCODER, dict(ENCODER)) is None
    assert difference({"a": "1", "dim": "3"}, {"a": "1"}) == "feature width" == difference({}, {"dim": "3", "e": "1"})
    assert difference({"torch": "1"}, {"torch": "2"}) == "torch version"
    assert difference({"limit": "1"}, {}) == "limit"


def test_the_repair_names_the_data_set_where_the_place_tells_it() -> None:
    assert repair(CACHE) == "`duplex extract --dataset shoes` makes it again"
    for place in ("features.h5", "artifacts/shoes/other.h5"):
        assert repair(Path(place)) == f"`duplex extract --dataset NAME --out {place}` makes it again"


def test_the_repair_of_a_shard_is_that_shard_and_of_imported_features_their_import() -> None:
    shard = CACHE.with_name("features.shard-1-of-3.h5")
    assert repair(shard) == "`duplex extract --dataset shoes --shard 1/3` makes it again"
    elsewhere = Path("other.shard-0-of-2.h5")
    assert repair(elsewhere) == "`duplex extract --dataset NAME --out other.h5 --shard 0/2` makes it again"
    stored = {"encoder": IMPORTED, "manifest": "m"}
    with pytest.raises(DuplexError, match="; `duplex cache import FILE --dataset shoes` makes it again"):
        check_identity(stored, {"manifest": "n"}, CACHE)


def test_what_is_expected_to_be_absent_is_refused_where_it_is_there() -> None:
    check_identity(ENCODER, {"depth": None}, CACHE)
    with pytest.raises(DuplexError, match=r"another depth \(2, not none\)"):
        check_identity({**ENCODER, "depth": "2"}, {"depth": None}, CACHE)


def test_bits_are_named_where_they_are_not_the_usual_sixteen() -> None:
    assert "bits" not in cache_identity(ENCODER, "m", depth=2)
    assert cache_identity(ENCODER, "m", depth=2, bits=8)["bits"] == "8"
    assert "bits" not in cache_identity(ENCODER, "m", bits=8), "without a depth there is nothing to keep in them"
