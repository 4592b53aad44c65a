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


def test_without_a_known_object_its_loss_and_gradient_are_zero():
    method = build(KgSp, width=5)
    losses = method.losses(batch(4, compositions=np.full(4, -2)), ())
    assert losses["object"].item() == 0 and not torch.autograd.grad(losses["object"], method.objects[0].weight)[0].any()


def test_pseudo_losses_of_partial_labels_by_loops():
    m, n = [0, 1, 3, 2, 0, None, None, None, 0, 0], [None, 1, None, None, None, 2, 0, 0, None, None]
    names = (["" if k is None else words[k] for k in own] for own, words in ((m, LABELS.states), (n, LABELS.objects)))
    own = LABELS.partial_index(*names)
    assert own.tolist() == [-1, 1 * N + 1, -4, -3, -1, -1 - M - 2, -1 - M, -1 - M, -1, -1]
    method, images, vectors = build(KgSp, width=5, pseudo_labels=True), batch(10, compositions=own), words()
    with torch.no_grad():
        method.states[-1].weight *= -20  # so that draws differ by labels
        method.objects[-1].weight *= -20
    cosines = [[max(0.0, float(unit(s) @ unit(o))) for o in vectors.objects] for s in vectors.states]
    states, objects = ([mlp(part, unit(z)) for z in images.cls] for part in (method.states, method.objects))
    torch.manual_seed(3)
    g, h = (-torch.empty(10, count, dtype=torch.float64).exponential_().log() for count in (M, N))
    expected = {}
    for name, rows, labels in (("state", states, m), ("object", objects, n)):
        known = [i for i in range(10) if labels[i] is not None]
        expected[name] = cross_entropy([rows[i] for i in known], [labels[i] for i in known])
    lacking = [i for i in range(10) if m[i] is None]
    drawn = [max(range(M), key=lambda a: cosines[a][n[i]] * float(states[i][a]) + float(g[i, a])) for i in lacking]
    expected["pseudo_state"] = cross_entropy([states[i] for i in lacking], drawn)
    lacking = [i for i in range(10) if n[i] is None]
    drawn = [max(range(N), key=lambda b: cosines[m[i]][b] * float(objects[i][b]) + float(h[i, b])) for i in lacking]
    expected["pseudo_object"] = cross_entropy([objects[i] for i in lacking], drawn)
    torch.manual_seed(3)
    check_losses(method, images, **expected)
    whole = method.losses(batch(4), ())
    assert whole["pseudo_state"].item() == whole["pseudo_object"].item() == 0
