"""Compositions that users add, with trained or new words, which are scored without training.

Their text features are encoded from prompts; their visual prototypes are composed of means of the
training pairs' prototypes or, in the closed form, of its terms:

    normalise(mean_state + mean_object - mean_all)    mean_all replaces the mean of a new word
    mu + a_state + b_object                           0 replaces the term of a new word
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from duplex.data.tables import read_table
from duplex.encoders.base import TextTower
from duplex.errors import UsageError, as_usage_error
from duplex.labels import LabelSpace, prompt_name
from duplex.methods import portable, score_formula
from duplex.methods.layers import unit
from duplex.methods.prompts import frame_embeddings, name_tokens
from duplex.recognition.answers import Candidates, Pair, WordsSeen, portable_term_function, sum_scorer

COLUMNS = ("state", "object")


@as_usage_error()
def read_compositions(path: Path) -> list[Pair]:
    """Read (state, object) pairs from a table with the columns state and object."""
    frame = read_table(path, needed=COLUMNS)
    return list(zip(frame["state"], frame["object"], strict=True))


def as_pair(composition: object, labels: LabelSpace) -> Pair:
    """The (state, object) names of a composition, given as one text or as two texts."""
    if isinstance(composition, str):
        return split_composition(composition, labels)
    match composition:
        case (str(state), str(name)) if state.strip() and name.strip():
            return state, name
    expected = "expected 'state object' or ('state', 'object')"
    raise UsageError(f"{composition!r} is not a composition; {expected}")


def split_composition(text: str, labels: LabelSpace) -> Pair:
    """Split `rusty kettle` into state and object; unknown names of several words need a comma."""
    if "," in text:
        before, _, after = text.partition(",")
        if before.strip() and after.strip():
            return before.strip(), after.strip()
    words = text.split()
    cuts = [(" ".join(words[:cut]), " ".join(words[cut:])) for cut in range(1, len(words))]
    labelled = [(_find(m, labels.states) is not None) + (_find(n, labels.objects) is not None) for m, n in cuts]
    if cuts and (len(cuts) == 1 or max(labelled)):
        return cuts[labelled.index(max(labelled))]
    problem = f"{text!r} cannot be split into a state and an object"
    raise UsageError(f"{problem}; write it as 'state,object'")


def are_words_trained(pair: Pair, labels: LabelSpace) -> WordsSeen:
    """Whether training images have a pair's state, and its object; case, `.` and `_` do not matter."""
    m = _find(pair[0], labels.states)
    n = _find(pair[1], labels.objects)
    states, objects = labels.trained_words
    return WordsSeen(m is not None and bool(states[m]), n is not None and bool(objects[n]))


def with_added_compositions(
    candidates: Candidates, tensors: Mapping[str, Tensor], labels: LabelSpace, tower: TextTower, pairs: Iterable[Pair]
) -> Candidates:
    """Add pairs to the candidates without training; all are scored from `tensors` of the model."""
    states, objects = list(labels.states), list(labels.objects)
    found = [(find_or_append(state, states), find_or_append(name, objects)) for state, name in pairs]
    asked = dict.fromkeys(found)
    present = list(zip(candidates.state_of.tolist(), candidates.object_of.tolist(), strict=True))
    candidate_pairs = set(present)
    added = [pair for pair in asked if pair not in candidate_pairs]
    feasible = candidates.feasible | np.array([pair in asked for pair in present])
    candidates = replace(candidates, feasible=feasible)
    if not added:
        return candidates
    new_words = len(states) > len(labels.states) or len(objects) > len(labels.objects)
    if tower is None and new_words:
        problem = "the encoder has no text tower to describe new words"
        raise UsageError(f"{problem}; add pairs of the model's words only")
    more = with_rows(tensors, labels, (states, objects), np.array(added).reshape(-1, 2), tower)
    terms = portable_term_function(more)
    count = len(added)
    words = (are_words_trained((states[m], objects[n]), labels) for m, n in added)
    return replace(
        candidates,
        states=tuple(states),
        objects=tuple(objects),
        state_of=more["state_of"].cpu().numpy(),
        object_of=more["object_of"].cpu().numpy(),
        seen=np.r_[candidates.seen, np.zeros(count, dtype=bool)],
        feasible=np.r_[candidates.feasible, np.ones(count, dtype=bool)],
        scorer=sum_scorer(terms),
        terms=terms,
        trained_words=dict(enumerate(words, len(candidates))),
    )


def with_rows(
    t: Mapping[str, Tensor], labels: LabelSpace, names: tuple[list[str], list[str]], added: np.ndarray, tower: TextTower
) -> dict[str, Tensor]:
    """An export's tensors `t`, extended to score P more pairs.

    added: state and object of each further pair [P, 2], as indices into all `names`, old and new.
    """
    if "members.weights" in t:  # a product: each of its models has rows of its own
        parts = score_formula.product_member_tensors(t)
        members = [with_rows(part, labels, names, added, tower) for part in parts]
        return {**t, **portable.joined_members(members, t["members.weights"])}
    states, objects = names
    is_new = len(states) > len(labels.states) or len(objects) > len(labels.objects)
    only_heads = "likelihood.rows" not in t and "classifier.states.weight" in t
    if "classifier.pairs.weight" in t or (is_new and only_heads):
        problem = "a linear classifier cannot score pairs that it was not trained on"
        raise UsageError(f"{problem}; leave out the added pairs")
    indices = torch.as_tensor(added, device=t["state_of"].device)
    m, n = indices.unbind(1)
    new_states = states[len(labels.states) :]
    new_objects = objects[len(labels.objects) :]
    encode = partial(encode_prompts, t, labels, tower)
    rows = {"state_of": m, "object_of": n}  # to append to the tensors of these names
    if "semantic" in t:
        rows["semantic"] = encode("composition", [(states[i], objects[j]) for i, j in added])
    if "states" in t and new_states:
        rows["states"] = encode("state", [(name, None) for name in new_states])
    if "objects" in t and new_objects:
        rows["objects"] = encode("object", [(None, name) for name in new_objects])
    if "visual" in t:
        every = t["mean.all"][None]
        of_state = torch.cat([t["mean.states"], every.expand(len(new_states), -1)])[m]
        of_object = torch.cat([t["mean.objects"], every.expand(len(new_objects), -1)])[n]
        rows["visual"] = normalize(of_state + of_object - every, dim=-1)
    if "likelihood.rows" in t:
        limits = torch.tensor([len(labels.states), len(labels.objects)], device=indices.device)
        of_state, of_object = torch.where(indices < limits, indices, -1).unbind(1)
        prototypes = portable.composed_prototypes(t, of_state, of_object)
        rows["likelihood.rows"] = prototypes
        rows["likelihood.offset"] = -0.5 * (prototypes * prototypes).sum(1)
    more = {**t, **{name: torch.cat([t[name], values]) for name, values in rows.items()}}
    return more | _columns(t, "states", len(new_states)) | _columns(t, "objects", len(new_objects))


def _columns(t: Mapping[str, Tensor], name: str, count: int) -> dict[str, Tensor]:
    # posteriors extended by new words: in closed form, each as if it had one training image, at the
    # mean feature of all images; by linear heads, each with the mean of the trained words' logits
    more = {}
    for group in ("primitives", "classifier"):
        for key in (f"{group}.{name}.weight", f"{group}.{name}.offset"):
            if key in t:
                column = t[key].mean(-1, keepdim=True) * (group == "classifier")
                more[key] = torch.cat([t[key], column.expand(*column.shape[:-1], count)], dim=-1)
    return more


@torch.no_grad()
def encode_prompts(
    t: Mapping[str, Tensor],
    labels: LabelSpace,
    tower: TextTower,
    path: str,
    names: Sequence[tuple[str | None, str | None]],
) -> Tensor:
    """Unit text features [P, d] of the prompts of a `path` ("composition", "state" or "object").

    names: (state, object) of each prompt; None leaves a word out. Labels of the model have learned
        vectors, if there are any; other names have token embeddings.
    """
    opening, closing = frame_embeddings(tower)
    prompts = []
    for pair in names:
        words = []
        for name, kind in zip(pair, ("states", "objects"), strict=True):
            place = None if name is None else _find(name, getattr(labels, kind))
            learned = t.get(f"words.{kind}", opening[:0])  # an update adds words to the labels, but not here
            if place is not None and place < len(learned):
                words.append(learned[place : place + 1])
            elif name is not None:
                words.append(tower.embedding(name_tokens(tower, name)))
        prompts.append(torch.cat([opening, t[f"context.{path}"], *words, closing]))
    lengths = [len(prompt) for prompt in prompts]
    rows = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    return unit(tower.encode_blocks([row.tolist() for row in rows], torch.cat(prompts)))


def _find(name: str, labels: Sequence[str]) -> int | None:
    wanted = prompt_name(name)
    return next((place for place, label in enumerate(labels) if prompt_name(label) == wanted), None)


def find_or_append(name: str, names: list[str]) -> int:
    """Index of a name in `names`, ignoring case, `.` and `_`; a missing name is appended to it."""
    place = _find(name, names)
    if place is None:
        names.append(name)
        return len(names) - 1
    return place
