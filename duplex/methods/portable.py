"""The named tensors of an exported model; `score_formula.py` computes scores from them.

scale                                       1 / tau
adapter.{down,up}.{weight,bias}, adapter.scale          the adapter, if there is one
{state,object}.{first,second}.{weight,bias}             networks that split a feature into state and object
visual, semantic [C, d]                     prototypes of the candidates, if the score needs them
states [M, d], objects [N, d]               semantic prototypes of states and objects
state_of, object_of [C]                     the state and the object of each candidate
context.{composition,state,object} [K, width], words.{states,objects}    for words added later
mean.{states,objects,all}                   means of seen pairs' prototypes, for words added later

Tensors of other score terms, such as the closed form (gaussian.py); a model may have only these:

likelihood.{whitening [d, d], rows [C, d], offset [C]}  g_c(z) = (z W - mu) . h_c + offset_c
primitives.{states,objects}.{weight,offset}             p_g(s|x), p_g(o|x), if the score needs them
effects.{mean,states,objects}, interactions.{states,objects,core}        prototypes of further compositions
weights.{semantic,factors,gaussian,gaussian_factors}    weights of the score's summands
classifier.{states,objects}.{weight,offset}             p(s|x), p(o|x) by logistic regressions
classifier.pairs.{weight [d, C],offset [C]}             p(c|x) by logistic regression
product                                     present if the score is a sum of log probabilities
members.K.*, members.weights                tensors of a product's models, and their weights
blocks.*                                    fine-tuned blocks, which compute the features
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from duplex.labels import Ints, LabelSpace
from duplex.methods import score_formula
from duplex.methods.codebook import group_means
from duplex.methods.gaussian import ClosedForm, Interactions, LinearDiscriminant
from duplex.methods.layers import unit
from duplex.methods.paths import Paths

Tensors = Mapping[str, Tensor]
KINDS = ("states", "objects")


def portable_paths(paths: Paths, candidates: Ints, names: Collection[str]) -> dict[str, Tensor]:
    """Tensors of adapter, disentanglers and prompts, for score terms `names` and later words."""
    prototypes = paths.encode(candidates, names)
    device = paths.negatives.device
    tensors = candidate_primitives(paths.prompts.labels, candidates, device)
    tensors["scale"] = torch.tensor(paths.scale, device=device)
    if paths.adapter is not None:
        tensors |= {f"adapter.{name}": value for name, value in paths.adapter.state_dict().items()}
        tensors["adapter.scale"] = torch.tensor(paths.adapter.scale, device=device)
    if "semantic" in names:
        tensors["semantic"] = prototypes.compositions
    if "factors" in names and paths.factors is not None:
        tensors |= {"states": prototypes.states, "objects": prototypes.objects}
        tensors |= dict(paths.factors.state_dict())
    prompts = paths.prompts
    lexicon = paths.prompts.lexicon()
    tensors |= {f"context.{path}": lexicon[rows] for path, rows in prompts.context_rows.items()}
    if prompts.vocabulary == "learned":  # one lexicon row per name
        states = len(prompts.labels.states)
        words = lexicon[torch.as_tensor(prompts.name_rows[:, 0], device=lexicon.device)]
        tensors |= {"words.states": words[:states], "words.objects": words[states:]}
    return {name: value.detach() for name, value in tensors.items()}


def candidate_primitives(labels: LabelSpace, candidates: Ints, device: torch.device) -> dict[str, Tensor]:
    """The tensors `state_of` and `object_of`: indices of each candidate's state and object."""
    numbers = {"state_of": labels.state_of(candidates), "object_of": labels.object_of(candidates)}
    return {name: torch.as_tensor(values, device=device) for name, values in numbers.items()}


def portable_closed_form(
    model: ClosedForm, candidates: Tensor, primitives: tuple[LinearDiscriminant, LinearDiscriminant] | None
) -> dict[str, Tensor]:
    """Tensors of a fitted `ClosedForm`, and of its state and object classifiers if used."""
    rows, offset = model.linear(candidates)
    tensors = {"likelihood.whitening": model.whitening, "likelihood.rows": rows, "likelihood.offset": offset}
    effects = model.additive
    interactions = model.interactions
    tensors["effects.mean"] = effects.mean
    tensors["effects.states"] = effects.state
    tensors["effects.objects"] = effects.object
    if interactions is not None:
        tensors |= {f"interactions.{name}": getattr(interactions, name) for name in (*KINDS, "core")}
    for name, posterior in zip(KINDS, primitives or (), strict=False):
        tensors |= {f"primitives.{name}.{part}": getattr(posterior, part) for part in ("weight", "offset")}
    return tensors


def means_by_word(rows: Tensor, labels: LabelSpace, compositions: Ints) -> dict[str, Tensor]:
    """Means of prototypes `rows` per state, object and overall, for words added later."""
    means = {"mean.all": rows.mean(0)}
    states = torch.as_tensor(labels.state_of(compositions), device=rows.device)
    objects = torch.as_tensor(labels.object_of(compositions), device=rows.device)
    means["mean.states"] = group_means(rows, states, len(labels.states))
    means["mean.objects"] = group_means(rows, objects, len(labels.objects))
    return means


def composed_prototypes(t: Tensors, states: Tensor, objects: Tensor) -> Tensor:
    """Predicted prototypes minus the overall mean [C, d]; a new word has index -1, effect 0."""
    zero = torch.zeros_like(t["effects.mean"])[None]
    rows = torch.cat([t["effects.states"], zero])[states] + torch.cat([t["effects.objects"], zero])[objects]
    if "interactions.core" in t:
        interactions = Interactions(t["interactions.states"], t["interactions.objects"], t["interactions.core"])
        both = (states >= 0) & (objects >= 0)
        rows[both] += interactions.of_pairs(states[both], objects[both])
    return rows


def score_terms(t: Tensors, features: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, values [B, C]) of each summand of the score, from tensors and features."""
    x = unit(features)
    yield from score_formula.score_terms(t, x, torch, x.float())


def joined_members(members: Sequence[Tensors], weights: Tensor) -> dict[str, Tensor]:
    """A product's tensors: `weights`, shared ones, and the rest as `members.0.NAME` etc."""
    shared = ("state_of", "object_of")
    tensors = {name: members[0][name] for name in shared}
    for place, member in enumerate(members):
        own = {name: value for name, value in member.items() if name not in shared}
        tensors |= {f"members.{place}.{name}": value for name, value in own.items()}
    product = torch.ones((), device=weights.device)
    return {**tensors, "members.weights": weights, "product": product}


def probabilities(t: Tensors, scores: Tensor) -> Tensor:
    """Candidates' probabilities [B, C] from scores; `t`: the exported model's tensors."""
    return scores.softmax(-1) if "product" in t else normalise_posterior_sums(scores)


def normalise_posterior_sums(scores: Tensor) -> Tensor:
    """Convert sums of posteriors to probabilities [B, C], dividing each row by its total."""
    weight = scores.clamp(min=0)
    return weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
