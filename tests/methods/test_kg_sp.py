import numpy as np
import torch

from duplex.methods.kg_sp import KgSp
from tests.methods.field import LABELS, M, N, batch, build, check_losses, scores, targets, words
from tests.methods.loops import close, cross_entropy, mlp, softmax, unit


def test_losses_and_scores_by_loops():
    method, images = build(KgSp, width=5), batch(4)
    states, objects = ([mlp(part, unit(z)) for z in images.cls] for part in (method.states, method.objects))
    _, m, n = targets(images)
    check_losses(method, images, state=cross_entropy(states, m), object=cross_entropy(objects, n))
    candidates = [7, 2, 11]
    expected = [
        [softmax(s)[c // N] * softmax(o)[c % N] for c in candidates] for s, o in zip(states, objects, strict=True)
    ]
    close(scores(method, candidates, images), expected)


def test_losses_of_partial_labels_by_loops():
    """Images 0 and 2 have a state alone, image 3 has an object alone."""
    own = LABELS.partial_index(
        [*(LABELS.states[m] for m in (1, 0, 3)), ""], ["", LABELS.objects[1], "", LABELS.objects[2]]
    )
    assert own.tolist() == [-2, 1, -4, -1 - M - 2]
    method, images = build(KgSp, width=5), batch(4, compositions=own)
    states, objects = ([mlp(part, unit(z)) for z in images.cls] for part in (method.states, method.objects))
    expected = {"state": cross_entropy(states[:3], [1, 0, 3]), "object": cross_entropy(objects[1::2], [1, 2])}
    check_losses(method, images, **expected)
    alone = batch(4, compositions=np.full(4, -2))
    losses = method.losses(alone, ())
    assert losses["object"].item() == 0 and not torch.autograd.grad(losses["object"], method.objects[0].weight)[0].any()


def test_pseudo_losses_of_partial_labels_by_loops():
    """Images 0 and 2 have a state alone, image 3 has an object alone."""
    own = np.array([-2, 4, -4, -1 - M - 2])
    method, images, vectors = build(KgSp, width=5, pseudo_labels=True), batch(4, compositions=own), words()
    cosines = [[max(0.0, float(unit(s) @ unit(o))) for o in vectors.objects] for s in vectors.states]
    states, objects = ([mlp(part, unit(z)) for z in images.cls] for part in (method.states, method.objects))
    torch.manual_seed(3)
    g, h = (-torch.empty(4, count, dtype=torch.float64).exponential_().log() for count in (M, N))
    state = max(range(M), key=lambda m: cosines[m][2] * float(states[3][m]) + float(g[3, m]))
    drawn = [
        max(range(N), key=lambda n: cosines[m][n] * float(objects[i][n]) + float(h[i, n])) for i, m in ((0, 1), (2, 3))
    ]
    expected = {"state": cross_entropy(states[:3], [1, 1, 3]), "object": cross_entropy(objects[1::2], [1, 2])}
    expected |= {"pseudo_state": cross_entropy(states[3:], [state])}
    expected |= {"pseudo_object": cross_entropy(objects[:3:2], drawn)}
    torch.manual_seed(3)
    check_losses(method, images, **expected)
    whole = method.losses(batch(4), ())
    assert whole["pseudo_state"].item() == whole["pseudo_object"].item() == 0
