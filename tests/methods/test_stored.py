"""How many numbers a checkpoint of every built-in kind holds, part by part, counted from its layers: a file that has
been written loads only while that stays."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from duplex.methods.registry import find
from tests.methods.field import SEEN, TOKEN, WORD, M, N, build
from tests.methods.test_ranges import OURS
from tests.methods.world import DIM

TEXT = 16  # width of the text tower's token embeddings
ROW = {"width": 5, "image_width": 7, "out": 6, "factor_width": 9, "context_width": 10, "adapter_width": 4, "heads": 2,
       "inner": 3, "clusters": 2, "layers": 2, "image_layers": 3}  # fmt: skip


def linear(inside: int, out: int) -> int:
    return inside * out + out


def mlp(inside: int, width: int, out: int, layers: int) -> int:
    """Every hidden layer is linear, with a scale and a shift a unit."""
    sizes = [inside, *[width] * layers]
    return sum(linear(a, b) + 2 * b for a, b in pairwise(sizes)) + linear(sizes[-1], out)


def attention(inside: int) -> int:
    """Queries and outputs over the feature's width, keys and values over what is read."""
    return 2 * linear(DIM, DIM) + 2 * linear(inside, DIM)


def block(inside: int) -> int:
    """Cross-attention after norms of both, and a feed-forward part after its own."""
    return 2 * DIM + 2 * inside + attention(inside) + 2 * DIM + linear(DIM, 4 * DIM) + linear(4 * DIM, DIM)


def through(width: int) -> int:
    return linear(DIM, width) + linear(width, DIM)


WORDS = (M + N) * WORD
COMPOSER = (WORD + WORD) * 5 + 5
SOFT = (3 + M + N) * TEXT  # a context of three words and a vector a primitive
THREE = {"paths.prompts": SOFT + 2 * 3 * TEXT, "paths.adapter": through(4), "paths.factors": 2 * through(5)}
FIELD = {**THREE, "paths.adapter": through(64)}
OPEN = len(SEEN) + 4  # with the unseen compositions of the closed world
GRAPH = {"words": WORDS, "network": OPEN + linear(WORD, 5) + linear(5, 6), "head": mlp(DIM, 7, 6, 3)}
MEANS = (M + N + 1) * DIM
CODEBOOK = MEANS + len(SEEN) * (1 + DIM)
CONCEPT = linear(DIM, 5) + 2 * linear(TOKEN, 5)
HELD: dict[str, dict[str, int]] = {
    "ade": {"words": WORDS, **dict.fromkeys(("attend_c", "attend_s", "attend_o"), CONCEPT),
            **dict.fromkeys(("embed_s", "embed_o"), linear(WORD, 5)), "composer": COMPOSER},
    "caila": dict.fromkeys(("images", "texts"), 3 * through(5)),
    "canet": {"words": WORDS, **dict.fromkeys(("see_s", "see_o", "see_c"), mlp(DIM, 5, WORD, 2)),
              "learner": linear(WORD, 5) + 2 * 5 + linear(5, WORD) + linear(WORD, 5) + linear(WORD, WORD),
              "join": mlp(WORD + DIM, 5, WORD, 1), "compose": mlp(2 * WORD, 5, WORD, 1)},
    "cds": {**FIELD, "context": mlp(2 * DIM, 10, 1, 1)},
    "cge": GRAPH,
    "cge_visual": {**GRAPH, "codebook": CODEBOOK, "factors": 2 * through(9), "fusion": 2 * DIM * DIM,
                   **dict.fromkeys(("embed_s", "embed_o"), linear(WORD, DIM))},
    "closed_form": {**THREE, "counts": len(SEEN), "sums": len(SEEN) * DIM, "moment": DIM * DIM, "chosen": 2,
                    "weights": 3},
    "cluspro": {**FIELD, "states": M * 2 * DIM, "objects": N * 2 * DIM},
    "co_cge": GRAPH,
    "compcos": {"words": WORDS, "head": mlp(DIM, 5, 5, 2), "composer": COMPOSER},
    "dfsp": {"prompts": SOFT, "project": linear(TOKEN, DIM), "to_image": block(DIM), "to_itself": block(DIM)},
    "duplex": {**THREE, "codebook": CODEBOOK, "fusion": 2 * DIM * DIM},
    "gipcol": {"prompts": SOFT + OPEN + linear(TEXT, 5) + linear(5, TEXT)},
    "ivr": {"words": WORDS, "embed": mlp(DIM, 5, 5, 2), "composer": COMPOSER,
            "of_states": linear(5, 5) + 2 * 5 + 2 * linear(5, M),
            "of_objects": linear(5, 5) + 2 * 5 + 2 * linear(5, N)},
    "kg_sp": {"states": mlp(DIM, 5, M, 2), "objects": mlp(DIM, 5, N, 2)},
    "lde": {"centre": DIM, "states": M * DIM, "objects": N * DIM},
    "logiczsl": FIELD,
    "plid": {"prompts": SOFT, "enrich": 4 * DIM * DIM, "factors": 2 * through(5)},
    "prompts": THREE,
    "scen": {"words": WORDS, **dict.fromkeys(("encode_s", "encode_o"), mlp(DIM, 5, 5, 2)), "classify_s": linear(5, M),
             "classify_o": linear(5, N), "fuse": linear(2 * 5, 5), "composer": COMPOSER},
    "troika": {**FIELD, "traction": DIM + 2 * TOKEN
               + 2 * (attention(TOKEN) + 2 * DIM + linear(DIM, 3 * DIM) + linear(3 * DIM, DIM))},
    "vp_cmjl": {**FIELD, "states": M * DIM, "objects": N * DIM, "from_state": DIM * DIM, "from_object": DIM * DIM,
                "read_s": block(DIM), "read_o": block(DIM)},
}  # fmt: skip

BOOK = {f"codebook.{name}" for name in ("known", "rows", "mean_s", "mean_o", "mean_all")}
TABLES, TIES = {"words.states", "words.objects"}, {"network.graph.weights"}
STILL = {  # what no step of the optimiser moves
    "ade": TABLES, "cge": TABLES | TIES, "cge_visual": TABLES | TIES | BOOK, "co_cge": TABLES | TIES, "duplex": BOOK,
    "scen": TABLES, "closed_form": {"counts", "sums", "moment", "chosen", "weights"}, "cluspro": {"states", "objects"},
    "gipcol": {"prompts.network.graph.weights"}, "lde": {"centre", "states", "objects"},
}  # fmt: skip


@pytest.mark.parametrize("kind", OURS)
def test_a_checkpoint_holds_so_many_numbers(kind):
    spoken = find(kind).Options.spoken_types()
    row: dict[str, Any] = {name: value for name, value in ROW.items() if name in spoken}
    found: Counter[str] = Counter()
    method = build(find(kind), **row)
    for name, rows in method.state_dict().items():
        parts = name.split(".")
        found[".".join(parts[: 2 if parts[0] == "paths" else 1])] += rows.numel()
    assert found == HELD[kind]
    trained = {name for name, _ in method.named_parameters()}
    assert {name for name in method.state_dict() if name not in trained} == STILL.get(kind, set())
