"""The method by the paper's formulas: loops over nodes and edges and a dense adjacency matrix."""

import itertools

import numpy as np
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
    return lambda i, j: unit((torch.relu if rectified else lambda x: x)(M_s @ mean(z_s[i]) + M_o @ mean(z_o[j])))


def additive_fusion(z):
    return lambda i, j: unit(mean(z[i]) + mean(z[j]) - mean(z))


def mean(values):
    return sum(values[1:], values[0]) / len(values)


def pairs_of(counterfactuals, states, objects, target, n_objects, candidates, diagonal):
    """The images (i, j) of each counterfactual, as two lists: one of each, or all of a state and all of an object."""
    if counterfactuals == "pairs":
        pairs = itertools.product(range(len(states)), range(len(objects)))
        kept = [(i, j) for i, j in pairs if states[i] * n_objects + objects[j] in target]
        return [([i], [j]) for i, j in kept if diagonal or i != j]
    return [(np.flatnonzero(np.equal(states, m)), np.flatnonzero(np.equal(objects, n))) for m, n in candidates]


def blended(kinds, X, W):
    """The mean over kinds of messages (slices of nodes) of each kind's weighted mean."""
    means = [W[:, kind] @ X[kind] / W[:, kind].sum(1, keepdim=True).clamp(min=1e-30) for kind in kinds]
    reached = [W[:, kind].sum(1) > 0 for kind in kinds]
    return [mean([x[k] for x, some in zip(means, reached, strict=True) if some[k]] or [X[0]]) for k in range(len(W))]


def refine(
    H, z_s, z_o, p_s, p_o, states, objects, target, n_objects, fuse, momentum, messages, initial=None,
    edges="posterior", counterfactuals="pairs", diagonal=True, normalise="together",
):  # fmt: skip
    """Return {c: h'} by Algorithm 1: X_local, W over all nodes, D_P^-1 W_P X_local, then the blend.

    fuse: function of two lists of images, the counterfactual of their mean projected factors.
    """
    candidates = [
        (m, n) for m in sorted(set(states)) for n in sorted(set(objects)) if m * n_objects + n in target
    ]  # Eq. 12-13
    sources = pairs_of(counterfactuals, states, objects, target, n_objects, candidates, diagonal)
    fused = [fuse(i, j) for i, j in sources]
    nodes = [*(H[m * n_objects + n] for m, n in candidates), *z_s, *z_o, *fused]  # Eq. 14
    X = torch.stack(nodes)
    P, S, B = len(candidates), len(states), len(states) + len(objects)
    rows = []
    for m, n in candidates:  # Eq. 15
        row = [torch.zeros((), dtype=X.dtype)] * len(nodes)
        o_cand = sum(1 for a, _ in candidates if a == m)
        s_cand = sum(1 for _, b in candidates if b == n)
        if "state" in messages:
            for i in range(len(states)):
                row[P + i] = p_s[i, m] / o_cand * (edges == "posterior" or states[i] == m)
        if "object" in messages:
            for j in range(len(objects)):
                row[P + S + j] = p_o[j, n] / s_cand * (edges == "posterior" or objects[j] == n)
        if "counterfactual" in messages:
            for k, (i, j) in enumerate(sources):
                if (states[i[0]], objects[j[0]]) == (m, n):
                    row[P + B + k] = mean([p_s[x, m] for x in i]) * mean([p_o[x, n] for x in j])
        rows.append(torch.stack(row))
    W = torch.stack(rows)
    if normalise == "by_kind":
        H_hat = blended([slice(P, P + S), slice(P + S, P + B), slice(P + B, None)], X, W)
    else:
        H_hat = W @ X / W.sum(1, keepdim=True).clamp(min=1e-30)  # Eq. 16
    refined = {}
    for k, (m, n) in enumerate(candidates):  # Eq. 17-18
        c = m * n_objects + n
        h = unit(momentum * (H if initial is None else initial)[c] + (1 - momentum) * H_hat[k])
        refined[c] = h if W[k].sum() > 0 else H[c]  # a candidate without messages stays
    return refined
