"""The method by the paper's formulas: loops over nodes and edges and a dense adjacency matrix."""

from __future__ import annotations

import torch
from torch import Tensor


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12)  # zero vectors stay zero


def posteriors(z: Tensor, t: Tensor, scale: float) -> Tensor:
    """Eq. 8-9: row i is the softmax of z_i . t / tau."""
    return (scale * z @ t.T).softmax(-1)


def cross_entropy(z: Tensor, t: Tensor, own: list[int], scale: float) -> Tensor:
    return -posteriors(z, t, scale)[range(len(own)), own].log().mean()


def learned_fusion(z_s, z_o, M_s, M_o, rectified=True):
    """Eq. 11, or without its relu."""
    return lambda i, j: unit((torch.relu if rectified else lambda x: x)(M_s @ z_s[i] + M_o @ z_o[j]))


def additive_fusion(z):
    return lambda i, j: unit(z[i] + z[j] - sum(z[1:], z[0]) / len(z))


def refine(
    H, z_s, z_o, p_s, p_o, states, objects, target, n_objects, fuse, momentum, renormalise, messages, initial=None
):  # fmt: skip
    """Return {c: h'} by Algorithm 1: X_local, W over all nodes, D_P^-1 W_P X_local, then the blend."""
    candidates = [
        (m, n) for m in sorted(set(states)) for n in sorted(set(objects)) if m * n_objects + n in target
    ]  # Eq. 12-13
    counterfactuals, labels = [], []
    for i in range(len(states)):
        for j in range(len(objects)):
            if states[i] * n_objects + objects[j] in target:
                counterfactuals.append(fuse(i, j))
                labels.append((i, j))
    nodes = [*(H[m * n_objects + n] for m, n in candidates), *z_s, *z_o, *counterfactuals]  # Eq. 14
    X = torch.stack(nodes)
    P, S, B = len(candidates), len(states), len(states) + len(objects)
    rows = []
    for m, n in candidates:  # Eq. 15
        row = [torch.zeros((), dtype=X.dtype)] * len(nodes)
        o_cand = sum(1 for a, _ in candidates if a == m)
        s_cand = sum(1 for _, b in candidates if b == n)
        if "state" in messages:
            for i in range(len(states)):
                row[P + i] = p_s[i, m] / o_cand
        if "object" in messages:
            for j in range(len(objects)):
                row[P + S + j] = p_o[j, n] / s_cand
        if "counterfactual" in messages:
            for k, (i, j) in enumerate(labels):
                if (states[i], objects[j]) == (m, n):
                    row[P + B + k] = p_s[i, states[i]] * p_o[j, objects[j]]
        rows.append(torch.stack(row))
    W = torch.stack(rows)
    H_hat = W @ X / W.sum(1, keepdim=True)  # Eq. 16
    refined = {}
    for k, (m, n) in enumerate(candidates):  # Eq. 17-18
        h = momentum * (H if initial is None else initial)[m * n_objects + n] + (1 - momentum) * H_hat[k]
        refined[m * n_objects + n] = unit(h) if renormalise else h
    return refined
