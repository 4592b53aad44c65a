"""The table of costs counts adapters, codebook and fusion, and times steps in and out of the cache."""

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


@pytest.mark.slow
def test_rows_of_the_papers_table_train_adapters_a_codebook_and_a_fusion() -> None:
    rows = paper.measure(paper.PAPER, load_params(SHIPPED), "ViT-S-32", batch=2, device="cpu", rounds=1)
    baseline, untrained, literal, codebook, graph = rows.values()
    width, bottlenecks = 384, 2 * 12
    assert baseline["parts"]["blocks"] == bottlenecks * (2 * 64 * width + 64 + width)
    assert untrained["parameters"] == baseline["parameters"]
    assert untrained["with_codebook"] - untrained["parameters"] == 16 * 12 * width  # a prototype for each pair
    assert literal["parameters"] - baseline["parameters"] == 2 * width**2  # M_s and M_o
    assert codebook["parameters"] - baseline["parameters"] == 16 * 12 * width
    assert graph["parameters"] - codebook["parameters"] == 2 * 2 * 64 * width  # M_s and M_o of rank 64
