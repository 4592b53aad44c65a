"""Compositions outside a model's label space, scored without training: new pairs of known words, and new words.

A semantic prototype is encoded from a prompt with learned vectors for known words and ordinary tokens for new ones. A
visual prototype is composed as in the codebook, from means of the known primitives' prototypes:
`normalise(mean_state + mean_object - mean_all)`, where `mean_all` replaces the mean of a new primitive; in closed form
it is `mu + a_state + b_object`, where 0 replaces the term of a new primitive.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from duplex.data.text_files import read_text
from duplex.encoders.text_tower import TextTower
from duplex.errors import DuplexError, UsageError
from duplex.labels import LabelSpace, prompt_name
from duplex.layers import portable
from duplex.layers.factors import unit
from duplex.methods.base import Inputs, ScoreTerms
from duplex.recognition.answers import KnownFlags
from duplex.recognition.candidates import Candidates, sum_of

Pair = tuple[str, str]
COLUMNS = ("state", "object")


def read_compositions(path: Path) -> list[Pair]:
    """Return the (state, object) pairs in a CSV file with the heading `state,object`."""
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True))
    except (DuplexError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read as a list of compositions ({error})") from error
    if not rows:
        raise UsageError(f"{path} is empty; expected the heading state,object and one line per composition")
    heading = list(map(str, rows[0]))
    if sorted(heading) != sorted(COLUMNS):
        raise UsageError(f"{path} has the columns {', '.join(heading)}; expected state,object and no others")
    pairs = [(str(row["state"] or "").strip(), str(row["object"] or "").strip()) for row in rows]
    for number, pair in enumerate(pairs, 2):
        if not all(pair):
            raise UsageError(f"{path}, line {number}, is {','.join(pair)!r}; expected a state and an object")
    return pairs


def split_composition(text: str, labels: LabelSpace) -> Pair:
    """Return the (state, object) names in `rusty kettle`; longer unknown names need a comma: `very rusty,kettle`."""
    if "," in text:
        state, _, name = (part.strip() for part in text.partition(","))
        if state and name:
            return state, name
    words = text.split()
    for cut in range(1, len(words)):
        state, name = " ".join(words[:cut]), " ".join(words[cut:])
        if len(words) == 2 or _find(state, labels.states) is not None or _find(name, labels.objects) is not None:
            return state, name
    raise UsageError(f"{text!r} cannot be split into a state and an object; write it as 'state,object'")


def with_added_compositions(
    candidates: Candidates, tensors: Mapping[str, Tensor], labels: LabelSpace, tower: TextTower, pairs: Iterable[Pair]
) -> Candidates:
    """Return the candidates extended by `pairs`; all are then scored from the exported `tensors`.

    Names with the same text in prompts are equal; pairs that are candidates already are left out.
    """
    states, objects = list(labels.states), list(labels.objects)
    present = set(zip(candidates.state_of.tolist(), candidates.object_of.tolist(), strict=True))
    added: list[tuple[int, int]] = []
    for state, name in pairs:
        pair = _find_or_append(state, states), _find_or_append(name, objects)
        if pair not in present:
            present.add(pair)
            added.append(pair)
    if not added:
        return candidates
    more = _with_rows(tensors, labels, (states, objects), np.array(added).reshape(-1, 2), tower)
    terms = portable_terms(more)
    first, count = len(candidates), len(added)
    known = {
        place: KnownFlags(m < len(labels.states), n < len(labels.objects)) for place, (m, n) in enumerate(added, first)
    }
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
        known=known,
    )


def portable_terms(tensors: Mapping[str, Tensor]) -> ScoreTerms:
    """Return the function that computes the score terms [B, C] of inputs from exported tensors."""

    @torch.no_grad()
    def terms(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
        yield from portable.score_terms(tensors, inputs["cls"])

    return terms


def _with_rows(
    t: Mapping[str, Tensor],
    labels: LabelSpace,
    names: tuple[list[str], list[str]],
    added: np.ndarray,
    tower: TextTower,
) -> dict[str, Tensor]:
    """Return the exported tensors extended by the pairs `added` [P, 2], indices into `names` (states, objects)."""
    more, (states, objects) = dict(t), names
    device = t["state_of"].device
    new_states, new_objects = states[len(labels.states) :], objects[len(labels.objects) :]
    prompts = NamedPrompts(t, labels, tower)
    for name, column in (("state_of", added[:, 0]), ("object_of", added[:, 1])):
        more[name] = torch.cat([t[name], torch.as_tensor(column, device=device)])
    if "semantic" in t:
        rows = prompts.encode("composition", [(states[m], objects[n]) for m, n in added])
        more["semantic"] = torch.cat([t["semantic"], rows])
    if "states" in t and new_states:
        more["states"] = torch.cat([t["states"], prompts.encode("state", [(name, None) for name in new_states])])
    if "objects" in t and new_objects:
        more["objects"] = torch.cat([t["objects"], prompts.encode("object", [(None, name) for name in new_objects])])
    if "visual" in t:
        every = t["mean.all"][None]
        of_state, of_object = (
            torch.cat([t[key], every.expand(count, -1)])[torch.as_tensor(column, device=device)]
            for key, count, column in (
                ("mean.states", len(new_states), added[:, 0]),
                ("mean.objects", len(new_objects), added[:, 1]),
            )
        )
        more["visual"] = torch.cat([t["visual"], normalize(of_state + of_object - every, dim=-1)])
    if "likelihood.rows" in t:
        more |= _likelihoods(t, labels, added)
        for name, count in (("states", len(new_states)), ("objects", len(new_objects))):
            more |= _primitives(t, name, count)
    return more


def _likelihoods(t: Mapping[str, Tensor], labels: LabelSpace, added: np.ndarray) -> dict[str, Tensor]:
    """Return the closed form's prototypes and score offsets, extended by the added pairs."""
    device = t["state_of"].device
    limits = torch.tensor([len(labels.states), len(labels.objects)], device=device)
    indices = torch.as_tensor(added, device=device)
    rows = portable.composed_prototypes(t, *torch.where(indices < limits, indices, -1).unbind(1))
    offset = -0.5 * (rows * rows).sum(1)
    more = {"likelihood.rows": rows, "likelihood.offset": offset}
    return {name: torch.cat([t[name], values]) for name, values in more.items()}


def _primitives(t: Mapping[str, Tensor], name: str, count: int) -> dict[str, Tensor]:
    """Extend the posterior of states or objects by `count` new ones, each as if with one image, at the mean of all."""
    weight, offset = (f"primitives.{name}.{part}" for part in ("weight", "offset"))
    if weight not in t:
        return {}
    more = t[offset].new_zeros(count)
    return {
        weight: torch.cat([t[weight], more.expand(len(t[weight]), -1)], dim=1),
        offset: torch.cat([t[offset], more]),
    }


class NamedPrompts:
    """Prompts `[context, state, object]` for any names; the context and known names have learned vectors."""

    def __init__(self, t: Mapping[str, Tensor], labels: LabelSpace, tower: TextTower) -> None:
        self._t, self._labels, self._tower = t, labels, tower

    @torch.no_grad()
    def encode(self, path: str, names: Sequence[tuple[str | None, str | None]]) -> Tensor:
        """Return unit text prototypes [P, d] of (state, object) names; a None leaves that word out of the prompt."""
        tower = self._tower
        ends = tower.embedding([tower.start, tower.end])
        prompts = [torch.cat([ends[:1], self._t[f"context.{path}"], *self._words(pair), ends[1:]]) for pair in names]
        lengths = [len(prompt) for prompt in prompts]
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        rows = [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=True)]
        return unit(tower.encode_blocks(rows, torch.cat(prompts)))

    def _words(self, pair: tuple[str | None, str | None]) -> Iterable[Tensor]:
        kinds = (("words.states", self._labels.states), ("words.objects", self._labels.objects))
        for name, (key, known) in zip(pair, kinds, strict=True):
            if name is None:
                continue
            place = _find(name, known)
            if key in self._t and place is not None:
                yield self._t[key][place : place + 1]
            else:
                yield self._tower.embedding(self._tower.tokens(prompt_name(name)))


def _find(name: str, known: Sequence[str]) -> int | None:
    wanted = prompt_name(name)
    return next((place for place, label in enumerate(known) if prompt_name(label) == wanted), None)


def _find_or_append(name: str, names: list[str]) -> int:
    place = _find(name, names)
    if place is None:
        names.append(name)
        return len(names) - 1
    return place
