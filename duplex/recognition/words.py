"""Compositions outside a model's label space, scored without training: new pairs of trained words, and new words.

The text feature of a pair is encoded from a prompt with the model's learned vectors for trained words and ordinary
token embeddings for new ones. Its visual prototype (estimated mean image feature) is composed of means of the training
pairs' prototypes, by state, by object and over all: `normalise(mean_state + mean_object - mean_all)`, where `mean_all`
replaces the mean of a new word. In methods of closed form it is `mu + a_state + b_object`, where 0 replaces the term of
a new word.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from duplex.data.images import read_text
from duplex.encoders.base import TextTower
from duplex.errors import DuplexError, UsageError
from duplex.labels import LabelSpace, prompt_name
from duplex.methods import portable, score_formula
from duplex.methods.base import Inputs, ScoreTerms
from duplex.methods.paths import unit
from duplex.recognition.answers import Candidates, TrainedWords, sum_of

Pair = tuple[str, str]
COLUMNS = ("state", "object")


def read_compositions(path: Path) -> list[Pair]:
    """The (state, object) pairs in a CSV file with the heading `state,object`; else raises `UsageError`."""
    try:
        reader = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
        rows = [(reader.line_num, row) for row in reader]
    except (DuplexError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read as a list of compositions ({error})") from error
    heading = list(map(str, reader.fieldnames or ()))
    if heading and sorted(heading) != sorted(COLUMNS):
        raise UsageError(
            f"{path} has the columns {', '.join(heading)}; expected state,object and no others, named in the first line"
        )
    if not rows:
        what = "has no line below its heading" if heading else "is empty"
        raise UsageError(f"{path} {what}; expected the heading state,object and one line per composition")
    pairs = []
    for line, row in rows:
        pair = str(row["state"] or "").strip(), str(row["object"] or "").strip()
        if not all(pair) or None in row:
            text = ",".join([*pair, *row.get(None, ())])
            raise UsageError(f"{path}, line {line}, is {text!r}; expected a state and an object")
        pairs.append(pair)
    return pairs


def as_pairs(compositions: Iterable[object], labels: LabelSpace) -> list[Pair]:
    """Compositions, each one text or a pair of texts, as names; `UsageError` for one pair instead of a list."""
    match compositions:
        case (str(state), str(name)) if all(len(word.replace(",", " ").split()) == 1 for word in (state, name)):
            pair = f"({state!r}, {name!r})"
            raise UsageError(f"{pair} is one pair; give a list of pairs: [{pair}]")
    return [as_pair(composition, labels) for composition in compositions]


def as_pair(composition: object, labels: LabelSpace) -> Pair:
    """A composition, given as one text or as a pair of texts, as (state, object) names."""
    if isinstance(composition, str):
        return split_composition(composition, labels)
    match composition:
        case (str(state), str(name)) if state.strip() and name.strip():
            return state, name
    raise UsageError(f"{composition!r} is no composition; expected 'state object' or ('state', 'object')")


def split_composition(text: str, labels: LabelSpace) -> Pair:
    """Split a composition's text, such as `rusty kettle`, into state and object.

    Names of several words that the model does not know need a comma: `very rusty,kettle`.
    """
    if "," in text:
        before, _, after = text.partition(",")
        if before.strip() and after.strip():
            return before.strip(), after.strip()
    words = text.split()
    for cut in range(1, len(words)):
        state, name = " ".join(words[:cut]), " ".join(words[cut:])
        if len(words) == 2 or _find(state, labels.states) is not None or _find(name, labels.objects) is not None:
            return state, name
    raise UsageError(f"{text!r} cannot be split into a state and an object; write it as 'state,object'")


def trained_words(pair: Pair, labels: LabelSpace) -> TrainedWords:
    """Whether a pair's state and object are labels of the model; case, `.` and `_` in names do not matter."""
    return TrainedWords(_find(pair[0], labels.states) is not None, _find(pair[1], labels.objects) is not None)


def with_added_compositions(
    candidates: Candidates, tensors: Mapping[str, Tensor], labels: LabelSpace, tower: TextTower, pairs: Iterable[Pair]
) -> Candidates:
    """The candidates extended by further pairs, without training; all are then scored from the tensors of an export.

    tensors: the model's tensors for scoring the candidates, from `TrainedModel.tensors`.
    pairs: (state, object) names, labels of the model or not; those that are candidates already are left out.
    """
    states, objects = list(labels.states), list(labels.objects)
    present = set(zip(candidates.state_of.tolist(), candidates.object_of.tolist(), strict=True))
    added: list[tuple[int, int]] = []
    for state, name in pairs:
        pair = find_or_append(state, states), find_or_append(name, objects)
        if pair not in present:
            present.add(pair)
            added.append(pair)
    if not added:
        return candidates
    more = with_rows(tensors, labels, (states, objects), np.array(added).reshape(-1, 2), tower)
    terms = portable_terms(more)
    count = len(added)
    words = (TrainedWords(m < len(labels.states), n < len(labels.objects)) for m, n in added)
    return replace(
        candidates,
        states=tuple(states),
        objects=tuple(objects),
        state_of=more["state_of"].cpu().numpy(),
        object_of=more["object_of"].cpu().numpy(),
        seen=np.r_[candidates.seen, np.zeros(count, dtype=bool)],
        feasible=np.r_[candidates.feasible, np.ones(count, dtype=bool)],
        scorer=sum_of(terms),
        terms=terms,
        trained_words=dict(enumerate(words, len(candidates))),
    )


def portable_terms(tensors: Mapping[str, Tensor]) -> ScoreTerms:
    """A function that yields the named summands of the scores [B, C] of images, from an export's tensors."""

    @torch.no_grad()
    def terms(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
        yield from portable.score_terms(tensors, inputs["cls"])

    return terms


def with_rows(
    t: Mapping[str, Tensor], labels: LabelSpace, names: tuple[list[str], list[str]], added: np.ndarray, tower: TextTower
) -> dict[str, Tensor]:
    """The tensors of an export, extended so that P more pairs are scored.

    names: all states and all objects: those of `labels`, then new ones.
    added: state and object of each further pair [P, 2], as indices into `names`.
    """
    if "members.weights" in t:  # a product: each of its models has rows of its own
        members = [with_rows(member, labels, names, added, tower) for member in score_formula.members(t)]
        return {**t, **portable.joined_members(members, t["members.weights"])}
    states, objects = names
    indices = torch.as_tensor(added, device=t["state_of"].device)
    m, n = indices.unbind(1)
    new_states, new_objects = states[len(labels.states) :], objects[len(labels.objects) :]
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
        prototypes = portable.composed_prototypes(t, *torch.where(indices < limits, indices, -1).unbind(1))
        rows |= {"likelihood.rows": prototypes, "likelihood.offset": -0.5 * (prototypes * prototypes).sum(1)}
    more = {**t, **{name: torch.cat([t[name], values]) for name, values in rows.items()}}
    return more | _primitives(t, "states", len(new_states)) | _primitives(t, "objects", len(new_objects))


def _primitives(t: Mapping[str, Tensor], name: str, count: int) -> dict[str, Tensor]:
    # posteriors extended by new words, each as if it had one training image, at the mean feature of all images
    weight = f"primitives.{name}.weight"
    offset = f"primitives.{name}.offset"
    if weight not in t:
        return {}
    more = t[offset].new_zeros(count)
    return {
        weight: torch.cat([t[weight], more.expand(len(t[weight]), -1)], dim=1),
        offset: torch.cat([t[offset], more]),
    }


@torch.no_grad()
def encode_prompts(
    t: Mapping[str, Tensor],
    labels: LabelSpace,
    tower: TextTower,
    path: str,
    names: Sequence[tuple[str | None, str | None]],
) -> Tensor:
    """The unit text features [P, d] of P prompts `[context, state, object]`.

    The context and the names that the model knows have learned vectors, new names have token embeddings.

    path: kind of the prompts, which have different contexts: "composition", "state" or "object".
    names: (state, object) of each prompt; None leaves a word out.
    """
    ends = tower.embedding([tower.start, tower.end])
    prompts = []
    for pair in names:
        words = []
        for name, kind in zip(pair, ("states", "objects"), strict=True):
            place = None if name is None else _find(name, getattr(labels, kind))
            if place is not None and f"words.{kind}" in t:
                words.append(t[f"words.{kind}"][place : place + 1])
            elif name is not None:
                words.append(tower.embedding(tower.tokens(prompt_name(name))))
        prompts.append(torch.cat([ends[:1], t[f"context.{path}"], *words, ends[1:]]))
    rows = np.split(np.arange(sum(map(len, prompts))), np.cumsum([len(prompt) for prompt in prompts])[:-1])
    return unit(tower.encode_blocks([row.tolist() for row in rows], torch.cat(prompts)))


def _find(name: str, labels: Sequence[str]) -> int | None:
    wanted = prompt_name(name)
    return next((place for place, label in enumerate(labels) if prompt_name(label) == wanted), None)


def find_or_append(name: str, names: list[str]) -> int:
    """The index of a name in `names`, where case, `.` and `_` do not matter; it is appended if absent."""
    place = _find(name, names)
    if place is None:
        names.append(name)
        return len(names) - 1
    return place
