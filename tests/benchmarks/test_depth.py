from benchmarks.depth import measure


def test_every_number_of_blocks_is_measured() -> None:
    found = measure(batch=1, layers=4, width=64)
    assert set(found["seconds_a_step"]) == {"0", "1", "2", "4", "all"} and min(found["seconds_a_step"].values()) > 0
    assert found["bytes_an_image"] == {"0": 1536} | dict.fromkeys("124", 1536 + 2 * 257 * 64)
    assert found["speedup_depth2"] == found["seconds_a_step"]["all"] / found["seconds_a_step"]["2"]
