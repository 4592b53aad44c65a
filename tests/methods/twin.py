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


def composed_rows(H, labels, fused):
    """{c: the mean counterfactual with the label c, of unit length} of the rows of `H` that are empty."""
    empty = {c for c in labels if not H[c].any()}
    return {c: unit(mean([z.detach() for z, own in zip(fused, labels, strict=True) if own == c])) for c in empty}


def with_rows(H, rows):
    return torch.stack([rows.get(c, row) for c, row in enumerate(H)])


def factor_nodes(z, p, labels, factors):
    """Factors, posteriors and labels of the nodes: of each image, or means of each label, factors of unit length."""
    if factors == "images":
        return z, p, labels
    images = [np.flatnonzero(np.equal(labels, each)) for each in sorted(set(labels))]
    means = [torch.stack([x[i].mean(0) for i in images]) for x in (z, p)]
    return unit(means[0]), means[1], sorted(set(labels))


def blended(kinds, X, W):
    """The mean over kinds of messages (slices of nodes) of each kind's weighted mean."""
    means = [W[:, kind] @ X[kind] / W[:, kind].sum(1, keepdim=True).clamp(min=1e-30) for kind in kinds]
    reached = [W[:, kind].sum(1) > 0 for kind in kinds]
    return [mean([x[k] for x, some in zip(means, reached, strict=True) if some[k]] or [X[0]]) for k in range(len(W))]


def refine(
    H, z_s, z_o, p_s, p_o, states, objects, target, n_objects, fuse, momentum, messages, initial=None,
    edges="posterior", factors="images", counterfactuals="pairs", diagonal=True, normalise="together", unseen="means",
):  # fmt: skip
    """Return {c: h'} by Algorithm 1: X_local, W over all nodes, D_P^-1 W_P X_local, then the blend.

    fuse: function of two lists of images, the counterfactual of their mean projected factors.
    Without messages, return the prototypes that the batch composes.
    """
    candidates = [
        (m, n) for m in sorted(set(states)) for n in sorted(set(objects)) if m * n_objects + n in target
    ]  # Eq. 12-13
    sources = pairs_of(counterfactuals, states, objects, target, n_objects, candidates, diagonal)
    fused = [fuse(i, j) for i, j in sources]
    composed = {}
    if unseen == "batch":
        composed = composed_rows(H, [states[i[0]] * n_objects + objects[j[0]] for i, j in sources], fused)
        H, initial = (None if x is None else with_rows(x, composed) for x in (H, initial))
    if not messages:
        return composed
    z_s, node_s, own_s = factor_nodes(z_s, p_s, states, factors)
    z_o, node_o, own_o = factor_nodes(z_o, p_o, objects, factors)
    nodes = [*(H[m * n_objects + n] for m, n in candidates), *z_s, *z_o, *fused]  # Eq. 14
    X = torch.stack(nodes)
    P, S, B = len(candidates), len(z_s), len(z_s) + len(z_o)
    rows = []
    for m, n in candidates:  # Eq. 15
        row = [torch.zeros((), dtype=X.dtype)] * len(nodes)
        o_cand = sum(1 for a, _ in candidates if a == m)
        s_cand = sum(1 for _, b in candidates if b == n)
        for i in range(S) if "state" in messages else ():
            row[P + i] = node_s[i, m] / o_cand * (edges == "posterior" or own_s[i] == m)
        for j in range(B - S) if "object" in messages else ():
            row[P + S + j] = node_o[j, n] / s_cand * (edges == "posterior" or own_o[j] == n)
        for k, (i, j) in enumerate(sources) if "counterfactual" in messages else ():
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
