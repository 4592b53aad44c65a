"""Compute an exported model's scores from tensors and features. Each export has a copy of this.

`t` maps the names that `duplex/methods/portable.py` lists to arrays; `xp` is the module `numpy` or
`torch`.
"""

from collections.abc import Iterator, Mapping
from math import inf, log
from typing import Any

LEAST = 1e-30  # smallest probability whose logarithm enters a product
FLOOR = log(LEAST)


def unit(x: Any, xp: Any) -> Any:
    return x / xp.clip(xp.sqrt((x * x).sum(-1)), 1e-12, None)[..., None]


def log_softmax(x: Any, xp: Any) -> Any:
    x = x - xp.amax(x, -1)[..., None]
    return x - xp.log(xp.exp(x).sum(-1))[..., None]


def two_layer_network(t: Mapping[str, Any], first: str, second: str, x: Any, xp: Any) -> Any:
    hidden = xp.clip(x @ t[f"{first}.weight"].T + t[f"{first}.bias"], 0, None)
    return hidden @ t[f"{second}.weight"].T + t[f"{second}.bias"]


def named_log_probabilities(t: Mapping[str, Any], x: Any, xp: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, log probabilities [B, C]) of `visual`, `semantic`, `factors`, if present."""
    z = x
    floor = FLOOR if "product" in t else -inf
    if "adapter.scale" in t:
        z = unit(z + t["adapter.scale"] * two_layer_network(t, "adapter.down", "adapter.up", z, xp), xp)
    for name in ("visual", "semantic"):
        if name in t:
            yield name, xp.clip(log_softmax(t["scale"] * (z @ t[name].T), xp), floor, None)
    if "states" in t:
        logs = []
        for factor, prototypes in (("state", "states"), ("object", "objects")):
            z_factor = two_layer_network(t, f"{factor}.first", f"{factor}.second", z, xp)
            logs.append(log_softmax(t["scale"] * (unit(z_factor, xp) @ t[prototypes].T), xp))
        yield "factors", xp.clip(logs[0][:, t["state_of"]] + logs[1][:, t["object_of"]], floor, None)


def gaussian_terms(t: Mapping[str, Any], x: Any, xp: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, log probabilities [B, C]) of closed-form or logistic-regression terms."""
    if "likelihood.rows" in t:
        whitened = x @ t["likelihood.whitening"] - t["effects.mean"]
        yield "gaussian", log_softmax(whitened @ t["likelihood.rows"].T + t["likelihood.offset"], xp)
    for name, group in (("gaussian_factors", "primitives"), ("linear", "classifier")):
        if f"{group}.states.weight" in t:
            of_states = linear_log_posterior(t, f"{group}.states", x, xp)
            of_objects = linear_log_posterior(t, f"{group}.objects", x, xp)
            yield name, of_states[:, t["state_of"]] + of_objects[:, t["object_of"]]
    if "classifier.pairs.weight" in t:
        yield "linear", linear_log_posterior(t, "classifier.pairs", x, xp)


def linear_log_posterior(t: Mapping[str, Any], name: str, x: Any, xp: Any) -> Any:
    return xp.clip(log_softmax(x @ t[f"{name}.weight"] + t[f"{name}.offset"], xp), FLOOR, None)


def answer_logits(t: Mapping[str, Any], scores: Any, temperature: float, xp: Any) -> Any:
    """Log probabilities of candidates [B, C], up to a constant per image, from float64 scores."""
    log_p = log_softmax(scores, xp) if "product" in t else xp.log(xp.clip(scores, LEAST, None))
    return log_p / temperature + t["log_prior"]


def weighted_term(t: Mapping[str, Any], name: str, log_p: Any, xp: Any) -> Any:
    """The term's summand [B, C]: its weight times `exp(log_p)` or, in products, `log_p`."""
    term = log_p if "product" in t else xp.exp(log_p)
    return t[f"weights.{name}"] * term if f"weights.{name}" in t else term


def product_member_tensors(t: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A product's tensors as a dict per member, with that model's names; [] for others."""
    count = len(t["members.weights"]) if "members.weights" in t else 0
    shared = {name: t[name] for name in ("state_of", "object_of") if name in t}
    members = []
    for place in range(count):
        prefix = f"members.{place}."
        own = {k.removeprefix(prefix): v for k, v in t.items() if k.startswith(prefix)}
        members.append({**shared, **own})
    return members


def product_member_terms(t: Mapping[str, Any], x: Any, xp: Any, single: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, weighted log probabilities [B, C]) of each member; `single`: float32."""
    for place, member in enumerate(product_member_tensors(t)):
        scores = sum(term for _, term in score_terms(member, x, xp, single))
        if "product" in member:
            log_p = log_softmax(scores, xp)
        else:
            mass = xp.clip(scores, 0, None)
            log_p = xp.log(xp.clip(mass / xp.clip(mass.sum(-1), LEAST, None)[..., None], LEAST, None))
        yield f"members.{place}", t["members.weights"][place] * xp.clip(log_p, FLOOR, None)


def score_terms(t: Mapping[str, Any], x: Any, xp: Any, single: Any = None) -> Iterator[tuple[str, Any]]:
    """Yield (name, summand of the scores [B, C]), for unit features `x`; `single`: in float32."""
    single = x if single is None else single
    yield from product_member_terms(t, x, xp, single)
    for terms, features in ((named_log_probabilities, x), (gaussian_terms, single)):
        for name, log_p in terms(t, features, xp):
            yield name, weighted_term(t, name, log_p, xp)
