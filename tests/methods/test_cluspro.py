import math
from typing import Any

import torch

from duplex.methods.cluspro import ClusPro, balanced_assignment, covariance_norm, initial_clusters
from tests.methods.field import N, batch, build
from tests.methods.loops import close, dot, unit

ROW: dict[str, Any] = {"width": 5, "clusters": 3, "temperature": 0.4, "contrast": 0.7, "decorrelation": 0.3,
                       "momentum": 0.6}  # fmt: skip


def plan_by_hand(similarity):
    """Three Sinkhorn rounds on a table of plain numbers."""
    plan = [[math.exp(float(v) / 0.05) for v in row] for row in similarity]
    for _ in range(3):
        columns = [sum(row[k] for row in plan) for k in range(len(plan[0]))]
        plan = [[v / columns[k] for k, v in enumerate(row)] for row in plan]
        plan = [[v / sum(row) for v in row] for row in plan]
    return plan


def clusters_by_hand(z, own, rows):
    found = [0] * len(z)
    for group in set(own):
        mine = [i for i, g in enumerate(own) if g == group]
        plan = plan_by_hand([[dot(z[i], p) for p in rows[group]] for i in mine])
        for i, row in zip(mine, plan, strict=True):
            found[i] = max(range(len(row)), key=row.__getitem__)
    return found


def contrast_by_hand(z, mine, every):
    terms = [
        dot(f, every[k]) / 0.4 - math.log(sum(math.exp(dot(f, p) / 0.4) for p in every))
        for f, k in zip(z, mine, strict=True)
    ]
    return -sum(terms) / len(terms)


def dependence_by_hand(x, y):
    a, b = (rows - sum(rows) / len(rows) for rows in (x, y))
    pairs = list(zip(a, b, strict=True))
    covariance = [sum(float(f[p] * g[q]) for f, g in pairs) / (len(x) - 1) for p in range(8) for q in range(8)]
    return sum(v * v for v in covariance)


def test_losses_and_movement_by_loops():
    method, images = build(ClusPro, **ROW), batch(9)
    z_s, z_o = (part.detach() for part in method.paths.factors(method.paths.adapt(images.cls)))
    own = images.compositions.tolist()
    sides = {"states": (z_s, [c // N for c in own]), "objects": (z_o, [c % N for c in own])}
    method.train()
    for module in method.paths.adapter, *method.paths.factors.children():
        module.eval()
    losses = method.losses(images, method.shared())
    every = [row for name in sides for group in getattr(method, name) for row in group]
    expected, given, after, first = 0.0, {}, {}, 0
    for name, (f, group) in sides.items():
        rows = getattr(method, name).clone()
        cluster = clusters_by_hand(f, group, rows)
        mine = [first + g * 3 + k for g, k in zip(group, cluster, strict=True)]
        given[name] = torch.stack([every[k] for k in mine])
        expected += contrast_by_hand(f, mine, every)
        first += 3 * len(rows)
        for g in range(len(rows)):
            for k in range(3):
                mine = [f[i] for i in range(9) if (group[i], cluster[i]) == (g, k)]
                if mine:
                    rows[g, k] = unit(0.6 * rows[g, k] + 0.4 * sum(mine) / len(mine))
        after[name] = rows
    close(losses["contrast"].item(), 0.7 * expected)
    apart = dependence_by_hand(z_s, given["objects"]) + dependence_by_hand(z_o, given["states"])
    close(losses["decorrelation"].item(), 0.3 * apart)
    method.after_batch()
    close(method.states, after["states"])
    close(method.objects, after["objects"])


def test_initial_clusters_are_evenly_chosen_images_of_each_primitive():
    z, own = torch.randn(11, 4, dtype=torch.float64), torch.tensor([2, 0, 2, 2, 0, 2, 2, 0, 2, 2, 3])
    rows = torch.nn.functional.normalize(torch.randn(4, 3, 4, dtype=torch.float64), dim=-1)
    found = initial_clusters(z, own, rows)
    chosen = {0: (1, 4, 7), 2: (0, 3, 6), 3: (10, 10, 10)}  # of 3 images, of 7 and of one
    for group, images in chosen.items():
        close(found[group], torch.stack([unit(z[i]) for i in images]))
    assert torch.equal(found[1], rows[1])


def test_transport_is_separate_for_each_primitive():
    random = torch.Generator().manual_seed(3)
    own = torch.tensor([2, 0, 2, 2, 0, 4])
    similarity = torch.rand(6, 3, generator=random, dtype=torch.float64) * 2 - 1
    similarity[own == 0] = torch.tensor([[1.0, -1.0, 1.0], [-1.0, -1.0, 1.0]]).double()
    plan = balanced_assignment(similarity, own, 5)
    for group in own.unique().tolist():
        close(plan[own == group], plan_by_hand(similarity[own == group]))
    single = balanced_assignment(similarity.float(), own, 5)
    torch.testing.assert_close(single, plan.float(), rtol=1e-4, atol=1e-6)


def test_the_covariance_of_a_single_image_is_zero():
    x, y = batch(2, 1).cls, batch(2, 2).cls
    close(covariance_norm(x, y).item(), dependence_by_hand(x, y))
    assert covariance_norm(x[:1], y[:1]) == 0
