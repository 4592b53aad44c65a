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
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize, relu

from duplex.labels import Ints, LabelSpace
from duplex.parts.factors import unit
from duplex.parts.paths import Paths

Tensors = Mapping[str, Tensor]


def portable_paths(paths: Paths, columns: Ints, names: Collection[str]) -> dict[str, Tensor]:
    """The part of three paths in a score over `columns` with these terms."""
    labels, found = paths.prompts.labels, paths.encode(columns, names)
    device = paths.negatives.device
    tensors = {"scale": torch.tensor(paths.scale, device=device)}
    tensors["state_of"] = torch.as_tensor(labels.state_of(columns), device=device)
    tensors["object_of"] = torch.as_tensor(labels.object_of(columns), device=device)
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
    """The score's parts [B, C] of cached features [B, d]: `p(c^h|x)`, `p(c^t|x)`, `p(s|x) p(o|x)` (Eq. 21)."""
    z = adapted(t, features)
    for name in ("visual", "semantic"):
        if name in t:
            yield name, _posterior(t, z, t[name])
    if "states" in t:
        p_s = _posterior(t, disentangled(t, "state", z), t["states"])
        p_o = _posterior(t, disentangled(t, "object", z), t["objects"])
        yield "factors", p_s[:, t["state_of"]] * p_o[:, t["object_of"]]


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


def shares(scores: Tensor) -> Tensor:
    """A mixture of posteriors, so that it sums to 1 over columns that a posterior was not made for too."""
    weight = scores.clamp(min=0)
    return weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
