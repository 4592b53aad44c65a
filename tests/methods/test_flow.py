import math
from typing import Any

import pytest
import torch

from duplex.config.params import MethodEntry
from duplex.errors import UsageError
from duplex.methods.flow import Flow
from duplex.options import OptionError
from tests.methods.field import batch, build, check_losses, scores, targets
from tests.methods.loops import close, cross_entropy, dot, linear, normed, products, softmax, unit

BASE: dict[str, Any] = {"kind": "cluspro", "width": 5}


def network(layers, x):
    first, norm, gelu, last = layers
    return linear(last, gelu(normed(norm, linear(first, x))))


def flow(layers, starts, goals, words, scale):
    """The velocities' loss and the logits of the ends, one start after the other, with seeded times."""
    times = torch.rand(len(starts) * len(goals), 1, dtype=torch.float64).tolist()
    error, logits = 0.0, []
    for k, start in enumerate(x for rows in starts for x in rows):
        goal, (r,) = goals[k % len(goals)], times[k]
        x = (1 - r) * start + r * goal
        v = network(layers, torch.cat([x, torch.tensor([r])]))
        error += sum((float(a) - float(b)) ** 2 for a, b in zip(v, goal - start, strict=True))
        logits.append([scale * dot(unit(x + (1 - r) * v), word) for word in words])
    return error / len(times), logits


def moves(method, z_s, z_o):
    """The directions d_s and d_o and the coefficients (a, b) of each image."""
    zero, found = torch.zeros(1, dtype=torch.float64), []
    for s, o in zip(z_s, z_o, strict=True):
        d_s, d_o = unit(network(method.state, torch.cat([s, zero]))), unit(network(method.object, torch.cat([o, zero])))
        found.append((d_s, d_o, network(method.composer, torch.cat([d_s, d_o]))))
    return found


def least_squares(d_s, d_o, move, ridge):
    """(a, b) by Gauss elimination of the normal equations."""
    g, p, q = dot(d_s, d_o), dot(d_s, move), dot(d_o, move)
    b = (q - g / (1 + ridge) * p) / (1 + ridge - g * g / (1 + ridge))
    return (p - g * b) / (1 + ridge), b


@pytest.mark.parametrize("leaked", [True, False])
def test_losses_by_loops(leaked):
    method, images = build(Flow, base=BASE, leaked=leaked, ridge=0.2), batch(4)
    t, scale = method.shared(), method.paths.scale
    z_c, z_s, z_o = (rows.detach() for rows in method.branches(images.inputs))
    t_c, t_s, t_o = (rows.detach() for rows in t)
    own, m, n = targets(images)
    torch.manual_seed(3)
    move_s, ends_s = flow(method.state, [z_s, z_o, z_c] if leaked else [z_s], t_s[m], t_s, scale)
    move_o, ends_o = flow(method.object, [z_o, z_s, z_c] if leaked else [z_o], t_o[n], t_o, scale)
    composer = 0.0
    for i, (d_s, d_o, found) in enumerate(moves(method, z_s, z_o)):
        a, b = least_squares(d_s, d_o, t_c[own[i]] - z_c[i], 0.2)
        composer += (float(found[0]) - a) ** 2 / 4 + (float(found[1]) - b) ** 2 / 4
    times = len(ends_s) // 4
    end = cross_entropy(ends_s, m * times) + cross_entropy(ends_o, n * times)
    torch.manual_seed(3)
    check_losses(method, images, velocity=move_s + move_o, end=end, composer=composer)
    of_base = method.base.losses(images, t)
    check_losses(method, images, **{name: value.item() for name, value in of_base.items()})


@pytest.mark.parametrize("form", ["probability", "logit"])
def test_scores_by_loops(form):
    method, images = build(Flow, base={**BASE, "score": form}, step=0.4, weight=0.7), batch(3)
    z_c, z_s, z_o = (rows.detach() for rows in method.branches(images.inputs))
    candidates = [7, 11, 0]
    t = method.paths.encode(torch.tensor(candidates).numpy(), ("semantic",)).compositions
    expected = scores(method.base, candidates, images)
    for i, (d_s, d_o, (a, b)) in enumerate(moves(method, z_s, z_o)):
        logits = products([unit(z_c[i] + 0.4 * (float(a) * d_s + float(b) * d_o))], t, method.paths.scale)[0]
        expected[i] += 0.7 * torch.tensor(logits if form == "logit" else softmax(logits), dtype=torch.float64)
    close(scores(method, candidates, images), expected)
    close(
        scores(build(Flow, base=BASE, weight=0.0), candidates, images),
        scores(build(Flow, base=BASE).base, candidates, images),
    )


@pytest.mark.parametrize("joint", [True, False])
def test_gradients_reach_every_parameter(joint):
    method, images = build(Flow, base=BASE, joint=joint), batch(6)
    own, plain = method.losses(images, method.shared()), method.base.losses(images, method.base.shared())
    sum(value for name, value in own.items() if name not in plain).backward()
    reached = {name for name, parameter in method.named_parameters() if parameter.grad is not None}
    networks = {name for name, _ in method.named_parameters() if not name.startswith("base.")}
    assert networks <= reached and (reached == {name for name, _ in method.named_parameters()}) == joint
    assert joint or reached == networks
    assert all(math.isfinite(float(p.grad.norm())) for p in method.parameters() if p.grad is not None)


def test_a_base_without_three_paths_is_refused():
    for base in (
        {"kind": "gipcol"},
        {"kind": "prompts", "paths": "composition", "losses": ["semantic"], "inference": ["semantic"]},
    ):
        with pytest.raises(UsageError, match="needs a base with three trained paths"):
            build(Flow, base=base)
    with pytest.raises(OptionError, match="base needs a kind"):
        Flow.Options(base={"width": 3})
    with pytest.raises(OptionError, match="widht: unknown key"):
        Flow.Options(base={"kind": "prompts", "widht": 3})


def test_the_base_belongs_to_what_a_run_depends_on():
    entry = MethodEntry(kind="flow", base={"kind": "troika"})
    assert entry.kinds_for("shapes") == ["flow", "troika"] and MethodEntry(kind="troika").kinds_for(None) == ["troika"]
    assert Flow.needs(Flow.Options(base={"kind": "troika"})) == {"cls", "text", "patch"}
