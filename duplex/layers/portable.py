"""A trained score as named tensors, and the arithmetic that needs nothing else: what an export holds.

scale                            1 / tau
adapter.{down,up}.{weight,bias}, adapter.scale     where features are adapted
{state,object}.{first,second}.{weight,bias}        the disentanglers, where there are factors
residual                         1 where a disentangler adds its input
visual, semantic [C, d]          prototypes of the columns, those that are asked
states [M, d], objects [N, d]    semantic prototypes of the primitives
state_of, object_of [C]          each column's primitives
context.{c,s,o} [K, width], words.{states,objects}  learned prompts, for words that training did not know
mean.{states,objects,all}        means of the seen pairs' visual prototypes, for the same

Of the closed form (closed_form.py), beside or instead of the above:

likelihood.{whitening [d, d], rows [C, d], offset [C]}    g_c(z) = (z W - mu) . h_c + offset_c
primitives.{states,objects}.{weight,offset}                     p_g(s|x), p_g(o|x), where they are asked
effects.{mean,states,objects}    mu, and with interactions.{states,objects,core} what rows of further words are made of
weights.{visual,semantic,factors,primitives}                    of the terms
tail.*                           what was trained in the image tower's last blocks; the features are those it makes
product                          there, where terms multiply: the score is a sum of logarithms
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize, relu

from duplex.labels import Ints, LabelSpace
from duplex.layers.factors import unit
from duplex.layers.gaussian_prototypes import ClosedForm, Posterior
from duplex.layers.interactions import Interactions
from duplex.layers.paths import Paths

Tensors = Mapping[str, Tensor]
LEAST = 1e-30  # of a probability whose logarithm is taken
FLOOR = math.log(LEAST)
KINDS = ("states", "objects")


def portable_paths(paths: Paths, columns: Ints, names: Collection[str]) -> dict[str, Tensor]:
    """The part of three paths in a score over `columns` with these terms."""
    found, device = paths.encode(columns, names), paths.negatives.device
    tensors = primitives_of(paths.prompts.labels, columns, device)
    tensors["scale"] = torch.tensor(paths.scale, device=device)
    if paths.adapter is not None:
        tensors |= {f"adapter.{name}": value for name, value in paths.adapter.state_dict().items()}
        tensors["adapter.scale"] = torch.tensor(paths.adapter.scale, device=device)
    if "ct" in names:
        tensors["semantic"] = found.compositions
    if "so" in names and paths.factors is not None:
        tensors |= {"states": found.states, "objects": found.objects}
        tensors |= dict(paths.factors.state_dict())
        tensors["residual"] = torch.tensor(float(paths.factors.state.residual), device=device)
    return {name: value.detach() for name, value in (tensors | _prompts(paths)).items()}


def primitives_of(labels: LabelSpace, columns: Ints, device: torch.device) -> dict[str, Tensor]:
    """Each column's primitives."""
    state_of, object_of = labels.state_of(columns), labels.object_of(columns)
    return {
        "state_of": torch.as_tensor(state_of, device=device),
        "object_of": torch.as_tensor(object_of, device=device),
    }


def portable_closed_form(
    model: ClosedForm, columns: Tensor, primitives: tuple[Posterior, Posterior] | None
) -> dict[str, Tensor]:
    """The part of the closed form in a score over `columns`."""
    rows, offset = model.linear(columns)
    found = {"likelihood.whitening": model.whitening, "likelihood.rows": rows, "likelihood.offset": offset}
    effects, mixed = model.additive, model.interactions
    found |= {"effects.mean": effects.mean, "effects.states": effects.state, "effects.objects": effects.object}
    if mixed is not None:
        found |= {f"interactions.{name}": getattr(mixed, name) for name in (*KINDS, "core")}
    for name, posterior in zip(KINDS, primitives or (), strict=False):
        found |= {f"primitives.{name}.{part}": getattr(posterior, part) for part in ("weight", "offset")}
    return found


def composed(t: Tensors, states: Tensor, objects: Tensor) -> Tensor:
    """`h_c` of pairs that training had not [C, d]; an effect that is not known, -1, is none."""
    a, b = (torch.cat([t[f"effects.{name}"], torch.zeros_like(t["effects.mean"])[None]]) for name in KINDS)
    rows = a[states] + b[objects]
    if "interactions.core" in t:
        mixed = Interactions(*(t[f"interactions.{name}"] for name in (*KINDS, "core")))
        both = (states >= 0) & (objects >= 0)
        rows[both] += mixed.at(states[both], objects[both])
    return rows


def _prompts(paths: Paths) -> dict[str, Tensor]:
    """What prompts of further words are made of."""
    prompts, lexicon = paths.prompts, paths.prompts.lexicon()
    found = {f"context.{path}": lexicon[rows] for path, rows in prompts.context_rows.items()}
    if prompts.vocabulary == "learned":  # one row a name
        states = len(prompts.labels.states)
        words = lexicon[torch.as_tensor(prompts.name_rows[:, 0], device=lexicon.device)]
        found |= {"words.states": words[:states], "words.objects": words[states:]}
    return found


def means_of(rows: Tensor, labels: LabelSpace, compositions: Ints) -> dict[str, Tensor]:
    """Means of the visual prototypes of some compositions, by state, by object, and of all; a primitive that none of
    them has gets the mean of all."""
    found = {"mean.all": rows.mean(0)}
    for name, groups, count in (
        ("states", labels.state_of(compositions), len(labels.states)),
        ("objects", labels.object_of(compositions), len(labels.objects)),
    ):
        index = torch.as_tensor(groups, device=rows.device)
        sums = rows.new_zeros(count, rows.shape[1]).index_add_(0, index, rows)
        sizes = index.bincount(minlength=count)[:, None]
        found[f"mean.{name}"] = torch.where(sizes > 0, sums / sizes.clamp(min=1), found["mean.all"])
    return found


def terms(t: Tensors, features: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The score's parts [B, C] of cached features [B, d]: probabilities, or their logarithms, weighed."""
    product = "product" in t
    for name, p in _of_paths(t, adapted(t, features)):
        yield name, _weighed(t, name, p.clamp(min=LEAST).log() if product else p)
    for name, log_p in _of_closed_form(t, unit(features).float()):
        yield name, _weighed(t, name, log_p if product else log_p.exp())


def _weighed(t: Tensors, name: str, part: Tensor) -> Tensor:
    return t[f"weights.{name}"] * part if f"weights.{name}" in t else part


def _of_paths(t: Tensors, z: Tensor) -> Iterator[tuple[str, Tensor]]:
    """`p(c^h|x)`, `p(c^t|x)`, `p(s|x) p(o|x)` (Eq. 21), those that are there."""
    for name in ("visual", "semantic"):
        if name in t:
            yield name, _posterior(t, z, t[name])
    if "states" in t:
        p_s = _posterior(t, disentangled(t, "state", z), t["states"])
        p_o = _posterior(t, disentangled(t, "object", z), t["objects"])
        yield "factors", p_s[:, t["state_of"]] * p_o[:, t["object_of"]]


def _of_closed_form(t: Tensors, raw: Tensor) -> Iterator[tuple[str, Tensor]]:
    """`log p_g(c|x)` and `log p_g(s|x) p_g(o|x)`."""
    if "likelihood.rows" in t:
        x = raw @ t["likelihood.whitening"] - t["effects.mean"]
        yield "visual", (x @ t["likelihood.rows"].T + t["likelihood.offset"]).log_softmax(-1)
    if "primitives.states.weight" in t:
        log_s, log_o = (
            (raw @ t[f"primitives.{name}.weight"] + t[f"primitives.{name}.offset"]).log_softmax(-1).clamp(min=FLOOR)
            for name in KINDS
        )
        yield "primitives", log_s[:, t["state_of"]] + log_o[:, t["object_of"]]


def adapted(t: Tensors, features: Tensor) -> Tensor:
    """`z^c` [B, d], of unit length."""
    z = unit(features)
    if "adapter.scale" not in t:
        return z
    hidden = relu(linear(z, t["adapter.down.weight"], t["adapter.down.bias"]))
    return unit(z + t["adapter.scale"] * linear(hidden, t["adapter.up.weight"], t["adapter.up.bias"]))


def disentangled(t: Tensors, name: str, z: Tensor) -> Tensor:
    """`z^s` or `z^o` [B, d]."""
    hidden = relu(linear(z, t[f"{name}.first.weight"], t[f"{name}.first.bias"]))
    out = linear(hidden, t[f"{name}.second.weight"], t[f"{name}.second.bias"])
    return normalize(out + t["residual"] * z, dim=-1)


def _posterior(t: Tensors, z: Tensor, prototypes: Tensor) -> Tensor:
    return (t["scale"] * (z @ prototypes.T)).softmax(-1)


def probabilities(t: Tensors, scores: Tensor) -> Tensor:
    """`p(c|x)` among some columns: of a product of probabilities, or of a mixture of them."""
    return scores.softmax(-1) if "product" in t else shares(scores)


def shares(scores: Tensor) -> Tensor:
    """A mixture of posteriors, so that it sums to 1 over columns that a posterior was not made for too."""
    weight = scores.clamp(min=0)
    return weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
