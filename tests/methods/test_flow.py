from typing import Any

import pytest
import torch

from duplex.config.params import MethodEntry
from duplex.errors import UsageError
from duplex.methods.flow import Flow
from duplex.options import OptionError
from tests.methods.field import SOFT, batch, build, check_losses, scores, targets
from tests.methods.loops import close, cross_entropy, dot, linear, normed, products, softmax, unit

BASE: dict[str, Any] = {"kind": "cluspro", "width": 5}


def network(layers, *parts):
    first, norm, gelu, last = layers
    return linear(last, gelu(normed(norm, linear(first, torch.cat(parts)))))


def flow(layers, starts, goals, words, scale):
    """The loss of the velocities, and the logits of the ends, one start after the other; times are drawn at once."""
    times = torch.rand(len(starts) * len(goals), 1, dtype=torch.float64)
    error, logits = 0.0, []
    for k, start in enumerate(x for rows in starts for x in rows):
        goal, r = goals[k % len(goals)], float(times[k])
        x = (1 - r) * start + r * goal
        v = network(layers, x, times[k])
        error += sum((float(a) - float(b)) ** 2 for a, b in zip(v, goal - start, strict=True)) / len(times)
        logits.append([scale * dot(unit(x + (1 - r) * v), word) for word in words])
    return error, logits


def moves(method, z_s, z_o):
    """The directions d_s and d_o and the coefficients (a, b) of each image."""
    zero = torch.zeros(1, dtype=torch.float64)
    for s, o in zip(z_s, z_o, strict=True):
        d_s, d_o = unit(network(method.state, s, zero)), unit(network(method.object, o, zero))
        yield d_s, d_o, network(method.composer, d_s, d_o).tolist()


def test_losses_by_loops():
    method, images = build(Flow, base=BASE, ridge=0.2), batch(4)
    of_base, scale = method.base.losses(images, method.shared()), method.base.paths.scale
    z_c, z_s, z_o = (rows.detach() for rows in method.branches(images.inputs))
    t_c, t_s, t_o = (rows.detach() for rows in method.shared())
    own, m, n = targets(images)
    torch.manual_seed(3)
    move_s, ends_s = flow(method.state, [z_s, z_o, z_c], t_s[m], t_s, scale)
    move_o, ends_o = flow(method.object, [z_o, z_s, z_c], t_o[n], t_o, scale)
    composer, times = 0.0, len(ends_s) // 4
    for i, (d_s, d_o, (a, b)) in enumerate(moves(method, z_s, z_o)):
        g, p, q = dot(d_s, d_o), dot(d_s, t_c[own[i]] - z_c[i]), dot(d_o, t_c[own[i]] - z_c[i])
        best = (q - g / 1.2 * p) / (1.2 - g * g / 1.2)  # the normal equations by Gauss elimination
        composer += ((a - (p - g * best) / 1.2) ** 2 + (b - best) ** 2) / 4
    end = cross_entropy(ends_s, m * times) + cross_entropy(ends_o, n * times)
    torch.manual_seed(3)
    expected = {name: value.item() for name, value in of_base.items()}
    check_losses(method, images, velocity=move_s + move_o, end=end, composer=composer, **expected)


@pytest.mark.parametrize("form", ["probability", "logit"])
def test_scores_by_loops(form):
    method, images = build(Flow, base={**BASE, "score": form}, step=0.4, weight=0.7), batch(3)
    z_c, z_s, z_o = (rows.detach() for rows in method.branches(images.inputs))
    t = method.base.paths.encode(torch.tensor([7, 11, 0]).numpy(), ("semantic",)).compositions
    expected = scores(method.base, [7, 11, 0], images)
    for i, (d_s, d_o, (a, b)) in enumerate(moves(method, z_s, z_o)):
        (logits,) = products([unit(z_c[i] + 0.4 * (a * d_s + b * d_o))], t, method.base.paths.scale)
        expected[i] += 0.7 * torch.tensor(logits if form == "logit" else softmax(logits), dtype=torch.float64)
    close(scores(method, [7, 11, 0], images), expected)


def test_gradients_reach_every_parameter():
    method, images = build(Flow, base=BASE), batch(6)
    own = method.losses(images, method.shared())
    sum(own[name] for name in ("velocity", "end", "composer")).backward()
    reached = {name for name, parameter in method.named_parameters() if parameter.grad is not None}
    assert reached == {name for name, _ in method.named_parameters()}


def test_a_base_may_share_more_than_prototypes():
    method, images = build(Flow, base={"kind": "clear"}), batch(6)
    own = method.losses(images, method.shared())
    assert own["velocity"] > 0 and {"state", "object"} < set(own)


def test_a_base_has_three_paths_and_belongs_to_what_a_run_depends_on():
    for base in ({"kind": "gipcol"}, {"kind": "prompts", **SOFT}):
        with pytest.raises(UsageError, match=f"flow's base .*{base['kind']}.* lacks trained pair"):
            build(Flow, base=base)
    for base, message in (({"width": 3}, "base needs a kind"), ({"kind": "prompts", "widht": 3}, "widht: unknown key")):
        with pytest.raises(OptionError, match=message):
            Flow.Options(base=base)
    entry = MethodEntry(kind="flow", base={"kind": "troika"})
    assert entry.kinds_for("shapes") == ["flow", "troika"] and MethodEntry(kind="troika").kinds_for(None) == ["troika"]
    assert Flow.needs(Flow.Options(base={"kind": "troika"})) == {"cls", "text", "patch"}
