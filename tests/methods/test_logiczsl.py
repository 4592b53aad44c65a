import pytest

from duplex.errors import UsageError
from duplex.methods.logiczsl import LogicZsl, parse_rules
from tests.methods.field import LABELS, SEEN, M, N, batch, build, check_losses
from tests.methods.loops import softmax

WRITTEN = ("state: red excludes hollow", "state: striped implies Faux.Fur", "object: star implies heart")


def rules_by_hand(written):
    """(kind, a, b, excludes?)"""
    if written:
        found = []
        for line in written:
            kind, a, verb, b = line.replace(":", "").split()
            names = LABELS.states if kind == "state" else LABELS.objects
            i, j = names.index(a), names.index(b)
            found.append((kind, i, j, verb == "excludes"))
            if verb == "excludes":
                found.append((kind, j, i, True))
        return found
    states = {(a // N, b // N) for a in SEEN for b in SEEN if a % N == b % N and a != b}
    objects = {(a % N, b % N) for a in SEEN for b in SEEN if a // N == b // N and a != b}
    return [("state", *ab, True) for ab in states] + [("object", *ab, True) for ab in objects]


@pytest.mark.parametrize("written", [(), WRITTEN])
def test_losses_by_loops(written):
    method, images = build(LogicZsl, width=5, rules_weight=0.6, rules_written=written), batch(4)
    t = method.shared()
    z = method.paths.adapt(images.cls)
    f = method.paths.factor_posteriors(z, t)
    formed = related = 0.0
    for i in range(4):
        p_c = softmax(method.paths.logits(z, t.compositions)[i])
        p_s, p_o = f.log_s[i].exp().tolist(), f.log_o[i].exp().tolist()
        q_s = [sum(p for p, c in zip(p_c, SEEN, strict=True) if c // N == m) for m in range(M)]
        q_o = [sum(p for p, c in zip(p_c, SEEN, strict=True) if c % N == n) for n in range(N)]

        def lacks(a, b):
            return 1 - (1 - a + a * b)

        for p, c in zip(p_c, SEEN, strict=True):
            s, o = p_s[c // N], p_o[c % N]
            formed += lacks(p, s) + lacks(p, o) + lacks(s * o, p)
        for kind, a, b, excludes in rules_by_hand(written):
            p, q = (p_s, q_s) if kind == "state" else (p_o, q_o)
            related += lacks(p[a], 1 - q[b]) if excludes else lacks(p[a], q[b])
    check_losses(method, images, composition_rules=0.6 * formed / 4, primitive_rules=0.6 * related / 4)


@pytest.mark.parametrize(
    ("line", "says"),
    [("state: red loves hollow", "no rule"), ("state: blue excludes red", "blue"),
     ("object: star implies star", "relates the object 'star' to itself")],
)  # fmt: skip
def test_malformed_rules_and_those_of_unknown_or_equal_primitives_are_refused(line, says):
    with pytest.raises(UsageError, match=says):
        parse_rules(LogicZsl.Options(rules_written=(line,)).rules_written, LABELS)
