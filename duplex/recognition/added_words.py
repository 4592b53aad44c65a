"""Compositions outside of a model's label space: new pairs of known words, and new words, without training.

The semantic prototype is the prompt's, with the learned vectors of the words that training knew and the name's own
tokens of those that it did not. The visual prototype is composed as the codebook's are, from the means of the known
primitives' prototypes: `normalise(mean_state + mean_object - mean_all)`, where an unknown one adds nothing; in closed
form it is `mu + a_state + b_object`, likewise.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from duplex.data.text import read_text
from duplex.encoders.text import TextTower
from duplex.errors import DuplexError, UsageError
from duplex.labels import LabelSpace, prompt_name
from duplex.layers import portable
from duplex.layers.factors import unit
from duplex.methods.base import Inputs, summed
from duplex.recognition.answers import Known
from duplex.recognition.candidates import Panel

Pair = tuple[str, str]
COLUMNS = ("state", "object")


def read_words(path: Path) -> list[Pair]:
    """`state,object` lines under that heading."""
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True))
        heading = list(rows[0]) if rows else []
    except (DuplexError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read as a word list ({error})") from error
    if not rows:
        raise UsageError(f"{path} lists no words; it needs the heading state,object and a line for each composition")
    if sorted(map(str, heading)) != sorted(COLUMNS):
        raise UsageError(f"{path} has the columns {', '.join(map(str, heading))}; it needs state,object and no others")
    pairs = [(str(row["state"] or "").strip(), str(row["object"] or "").strip()) for row in rows]
    for number, pair in enumerate(pairs, 2):
        if not all(pair):
            raise UsageError(f"{path}, line {number}: a state and an object are needed, not {','.join(pair)!r}")
    return pairs


def split_words(text: str, labels: LabelSpace) -> Pair:
    """`rusty kettle`, or `very rusty,kettle` where the names have more words than two and are unknown."""
    if "," in text:
        state, _, name = (part.strip() for part in text.partition(","))
        if state and name:
            return state, name
    words = text.split()
    for cut in range(1, len(words)):
        state, name = " ".join(words[:cut]), " ".join(words[cut:])
        if len(words) == 2 or _find(state, labels.states) is not None or _find(name, labels.objects) is not None:
            return state, name
    raise UsageError(f"{text!r} does not say what is the state and what the object; write it as 'state,object'")


def extended(
    panel: Panel, tensors: Mapping[str, Tensor], labels: LabelSpace, tower: TextTower, pairs: Iterable[Pair]
) -> Panel:
    """The panel with further columns. Words are the same when a prompt writes them alike."""
    states, objects = list(labels.states), list(labels.objects)
    there = set(zip(panel.state_of.tolist(), panel.object_of.tolist(), strict=True))
    added: list[tuple[int, int]] = []
    for state, name in pairs:
        pair = _place(state, states), _place(name, objects)
        if pair not in there:
            there.add(pair)
            added.append(pair)
    if not added:
        return panel
    more = _with_columns(tensors, labels, (states, objects), np.array(added).reshape(-1, 2), tower)

    @torch.no_grad()
    def parts(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
        yield from portable.terms(more, inputs["cls"])

    first, count = len(panel), len(added)
    known = {
        first + place: Known(m < len(labels.states), n < len(labels.objects)) for place, (m, n) in enumerate(added)
    }
    return replace(
        panel,
        states=tuple(states),
        objects=tuple(objects),
        state_of=more["state_of"].cpu().numpy(),
        object_of=more["object_of"].cpu().numpy(),
        seen=np.r_[panel.seen, np.zeros(count, dtype=bool)],
        live=np.r_[panel.live, np.ones(count, dtype=bool)],
        scorer=summed(parts, first + count, more["state_of"].device),
        terms=parts,
        known=known,
    )


def _with_columns(
    t: Mapping[str, Tensor],
    labels: LabelSpace,
    names: tuple[list[str], list[str]],
    added: np.ndarray,
    tower: TextTower,
) -> dict[str, Tensor]:
    more, (states, objects) = dict(t), names
    device = t["state_of"].device
    new_states, new_objects = states[len(labels.states) :], objects[len(labels.objects) :]
    prompts = NamedPrompts(t, labels, tower)
    for name, column in (("state_of", added[:, 0]), ("object_of", added[:, 1])):
        more[name] = torch.cat([t[name], torch.as_tensor(column, device=device)])
    if "semantic" in t:
        rows = prompts.encode("c", [(states[m], objects[n]) for m, n in added])
        more["semantic"] = torch.cat([t["semantic"], rows])
    if "states" in t and new_states:
        more["states"] = torch.cat([t["states"], prompts.encode("s", [(name, None) for name in new_states])])
    if "objects" in t and new_objects:
        more["objects"] = torch.cat([t["objects"], prompts.encode("o", [(None, name) for name in new_objects])])
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
    """Rows and offsets of the closed form with those of added pairs."""
    device = t["state_of"].device
    limits = torch.tensor([len(labels.states), len(labels.objects)], device=device)
    places = torch.as_tensor(added, device=device)
    rows = portable.composed(t, *torch.where(places < limits, places, -1).unbind(1))
    offset = -0.5 * (rows * rows).sum(1)
    more = {"likelihood.rows": rows, "likelihood.offset": offset}
    return {name: torch.cat([t[name], values]) for name, values in more.items()}


def _primitives(t: Mapping[str, Tensor], name: str, count: int) -> dict[str, Tensor]:
    """Posteriors of states or objects among `count` further ones, each of one image at the mean of all."""
    weight, offset = (f"primitives.{name}.{part}" for part in ("weight", "offset"))
    if weight not in t:
        return {}
    more = t[offset].new_zeros(count)
    return {
        weight: torch.cat([t[weight], more.expand(len(t[weight]), -1)], dim=1),
        offset: torch.cat([t[offset], more]),
    }


class NamedPrompts:
    """Prompts of any names: `[context, state, object]` with what was learned of the context and of the names."""

    def __init__(self, t: Mapping[str, Tensor], labels: LabelSpace, tower: TextTower) -> None:
        self._t, self._labels, self._tower = t, labels, tower

    @torch.no_grad()
    def encode(self, path: str, names: Sequence[tuple[str | None, str | None]]) -> Tensor:
        """Unit prototypes [P, d]; None leaves a word out."""
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


def _place(name: str, names: list[str]) -> int:
    """Where a name stands; one that is not there is put at the end."""
    found = _find(name, names)
    if found is None:
        names.append(name)
        found = len(names) - 1
    return found


def read_pairs(files: Path | None, texts: Iterable[str], labels: LabelSpace) -> list[Pair]:
    """All that is asked for, from a file and from the command line."""
    return list(chain(read_words(files) if files is not None else (), (split_words(text, labels) for text in texts)))
