"""Find pairs whose prompt is longer than an encoder's text tower accepts, before anything is encoded."""

from __future__ import annotations

from duplex.encoders import PACKAGED, load_encoder
from duplex.labels import LabelSpace, prompt_name
from duplex.layers.prompt_paths import TEMPLATE

SHORT = 32  # bytes of state and object that every text tower but the packaged one reads: no token is below a byte


def long_prompts(encoder: str, weights: str | None, labels: LabelSpace) -> list[str]:
    """Return the pairs whose prompt `a photo of STATE OBJECT` has more tokens than an encoder's text tower accepts.

    The tower is not loaded if all names are so short that they fit. Without a text tower, the list is empty.
    """
    compositions = labels.candidates("closed", "train")
    names = labels.names(compositions)
    if encoder != PACKAGED and all(len(name.encode()) <= SHORT for name in names):
        return []
    tower = load_encoder(encoder, weights, towers="text").text
    if tower is None:
        return []
    around = 2 + len(tower.tokens(TEMPLATE))  # start, end, context
    states, objects = (
        [len(tower.tokens(prompt_name(word))) for word in words] for words in (labels.states, labels.objects)
    )
    pairs = zip(labels.state_of(compositions).tolist(), labels.object_of(compositions).tolist(), strict=True)
    lengths = (around + states[m] + objects[n] for m, n in pairs)
    return [name for name, length in zip(names, lengths, strict=True) if length > tower.context_length]
