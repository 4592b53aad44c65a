"""The table of costs counts the codebook, and times steps in and out of the cache."""

from __future__ import annotations

import pytest

from benchmarks import paper
from duplex.config.params import load_params
from tests.projects import SHIPPED


@pytest.mark.slow
def test_rows_in_and_out_of_the_cache_count_the_codebook() -> None:
    rows = paper.measure_cache(load_params(SHIPPED), "ViT-S-32", batch=2, device="cpu", rounds=1)
    assert list(rows) == ["duplex, images in the cache", "duplex, images out of the cache", "image encoder alone"]
    cached = rows["duplex, images in the cache"]
    assert cached["parameters"] == sum(cached["parts"].values())
    assert cached["with_codebook"] - cached["parameters"] == 16 * 12 * 384  # UT-Zappos' pairs, the encoder's width
    assert all(row["seconds"] > 0 for row in rows.values())
    assert "M with the codebook" in paper.sentence(cached)
