from benchmarks.depth import measure


def test_every_number_of_blocks_is_measured() -> None:
    found = measure([0, 1, 2], batch=1, rounds=1, layers=3, width=64)
    assert set(found["seconds_a_step"]) == {"0", "1", "2", "all"} and min(found["seconds_a_step"].values()) > 0
    assert found["bytes_an_image"] == {"0": 1536, "1": 1536 + 2 * 257 * 64, "2": 1536 + 2 * 257 * 64}
    assert found["speedup_depth2"] == found["seconds_a_step"]["all"] / found["seconds_a_step"]["2"]
