"""The closed form in NumPy float64, with loops over images and pairs and dense matrices."""

import numpy as np


def pair_means(z, own):
    return {c: z[own == c].mean(0) for c in sorted(set(own.tolist()))}, {
        c: int((own == c).sum()) for c in set(own.tolist())
    }


def covariance(z, own):
    """Covariance about the pair's mean, shrunk by OAS."""
    means, _ = pair_means(z, own)
    d = z.shape[1]
    free = len(z) - len(means)
    if free < 1:
        means, free = dict.fromkeys(means, z.mean(0)), max(len(z) - 1, 1)
    s = np.zeros((d, d))
    for row, c in zip(z, own.tolist(), strict=True):
        s += np.outer(row - means[c], row - means[c])
    s /= free
    squares, trace = np.trace(s @ s), np.trace(s)
    rho = min(1.0, ((1 - 2 / d) * squares + trace**2) / ((free + 1 - 2 / d) * (squares - trace**2 / d)))
    return (1 - rho) * s + rho * trace / d * np.eye(d)


def effects(z, own, m, n, v, ridge):
    """mu, a, b by the normal equations of the dense design matrix."""
    means, counts = pair_means(z, own)
    design = np.zeros((len(means), 1 + m + n))
    weight = np.zeros(len(means))
    for row, c in enumerate(means):
        design[row, [0, 1 + c // n, 1 + m + c % n]] = 1
        weight[row] = 1 / (v + 1 / counts[c])
    penalty = np.diag([0.0] + [ridge] * (m + n))
    left = design.T @ np.diag(weight) @ design + penalty
    return np.linalg.inv(left) @ design.T @ np.diag(weight) @ np.stack(list(means.values()))


def log_likelihood(x, own_pairs, counts, m, n, v, ridge):
    """Log-likelihood of the pairs' means [P, d] under N(mu, ZZ'/ridge + v I + diag(1/n_c)) with flat mu, up to a
    constant."""
    p, d = x.shape
    z = np.zeros((p, m + n))
    for row, c in enumerate(own_pairs):
        z[row, [c // n, m + c % n]] = 1
    cov = z @ z.T / ridge + v * np.eye(p) + np.diag(1 / counts)
    inverse, one = np.linalg.inv(cov), np.ones((p, 1))
    flat = (one.T @ inverse @ one).item()
    centred = inverse - inverse @ one @ one.T @ inverse / flat
    return -0.5 * np.trace(x.T @ centred @ x) - 0.5 * d * (np.linalg.slogdet(cov)[1] + np.log(flat))


def scores(z, own, new, m, n, v, ridge):
    """log N(z; h_c, Sigma) + log n_c, up to a constant, for all M N compositions."""
    sigma = covariance(z, own)
    inverse = np.linalg.inv(sigma)
    means, counts = pair_means(z, own)
    beta = effects(z, own, m, n, v, ridge)
    k = 1 / v
    out = np.zeros((len(new), m * n))
    for c in range(m * n):
        at = np.zeros(1 + m + n)
        at[[0, 1 + c // n, 1 + m + c % n]] = 1
        h, prior = at @ beta, 0.0
        if c in means:
            size = counts[c]
            h = (size * means[c] + k * h) / (size + k)
            prior = np.log(size)
        for i, row in enumerate(new):
            out[i, c] = row @ inverse @ h - 0.5 * h @ inverse @ h + prior
    return out
