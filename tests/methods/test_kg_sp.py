from duplex.methods.kg_sp import KgSp
from tests.methods.field import N, batch, build, check_losses, scores, targets
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
