from typing import Any

import pytest

from duplex.methods.compcos import CompCos
from duplex.methods.word_feasibility import feasibility
from tests.methods.field import LABELS, SEEN, M, N, batch, build, check_losses, scores
from tests.methods.loops import close, composed, cross_entropy, dot, mlp, unit

ROW: dict[str, Any] = {"width": 5, "layers": 1, "scale": 7.0}


def cosine(method, z, c):
    return dot(unit(mlp(method.head, unit(z))), composed(method, c))


@pytest.mark.parametrize("world", ["closed", "open"])
def test_losses_and_scores_by_loops(world):
    method, images = build(CompCos, world, margin=0.5, margin_epochs=4, **ROW), batch(4)
    method.after_epoch(2)
    rho = feasibility(method.words.states.detach().numpy(), method.words.objects.detach().numpy(), LABELS)
    columns = SEEN if world == "closed" else range(M * N)
    rows = [
        [7.0 * (cosine(method, z, c) - (0.0 if c in SEEN else 0.5 * 2 / 4 * rho[c])) for c in columns]
        for z in images.cls
    ]
    own = [list(columns).index(c) for c in images.compositions.tolist()]
    check_losses(method, images, composition=cross_entropy(rows, own))
    candidates = [3, 11, 0]
    close(scores(method, candidates, images), [[7.0 * cosine(method, z, c) for c in candidates] for z in images.cls])


def test_the_first_epoch_excludes_unseen_compositions():
    images = batch(5)
    aside, closed = build(CompCos, "open", **ROW), build(CompCos, **ROW)
    close(
        aside.losses(images, aside.shared())["composition"].item(),
        closed.losses(images, closed.shared())["composition"].item(),
    )
