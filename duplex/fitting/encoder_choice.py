"""Choose the frozen encoder for `duplex fit` by device, number of images, and weights on disk or downloadable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from duplex.config.params import EncoderParams
from duplex.encoders import PACKAGED, encoder_identity, missing_weights, unknown_words
from duplex.encoders.hub import is_reachable
from duplex.encoders.random_weights import is_random
from duplex.errors import DuplexError, UsageError
from duplex.labels import LabelSpace, prompt_name

LONGEST = 1800.0  # seconds that encoding may take on a CPU


@dataclass(frozen=True)
class Offer:
    """An encoder with published weights that `choose_encoder` considers, and its speed on a CPU."""

    name: str
    weights: str
    seconds: float  # per image on one core of a CPU


OFFERS = (  # the most accurate first
    Offer("ViT-L-14-quickgelu", "openai", 1.4),
    Offer("ViT-B-16-quickgelu", "openai", 0.3),
    Offer("ViT-B-32-quickgelu", "openai", 0.08),
)


@dataclass(frozen=True)
class EncoderChoice:
    """An encoder and the reason why it was chosen."""

    entry: EncoderParams
    reason: str


def choose_encoder(labels: LabelSpace, images: int, *, gpu: bool, cores: int) -> EncoderChoice:
    """Choose the most accurate encoder that encodes the images in half an hour at most, or on a GPU in any time.

    If none is fast enough, the fastest is taken. Weights on disk come first; without any, the small encoder that ships
    with the package is chosen if its vocabulary has all words of the labels, else the best whose weights can be
    downloaded. Raises `UsageError` if there is none.

    images: number of images.
    gpu: whether a GPU encodes them.
    cores: number of CPU cores.
    """
    in_time = [offer for offer in OFFERS if gpu or offer.seconds * images / cores <= LONGEST] or [OFFERS[-1]]
    why = f"{'a GPU' if gpu else f'{cores} cores and no GPU'}, {images:,} images"
    absent = {}
    for offer in in_time:
        missing = missing_weights(offer.name, offer.weights)
        if missing is None:
            return EncoderChoice(EncoderParams(name=offer.name, weights=offer.weights), f"{why}, weights on disk")
        absent[offer] = missing
    if not unknown_words(PACKAGED, words(labels)):
        return EncoderChoice(EncoderParams(name=PACKAGED), "the packaged encoder knows all words")
    for offer, missing in absent.items():
        if is_reachable(missing.address):
            size = f"{(missing.size or 0) / 1e9:.1f} GB to download"
            return EncoderChoice(EncoderParams(name=offer.name, weights=offer.weights), f"{why}, {size}")
    raise UsageError(
        f"no encoder's weights are on disk, and none can be downloaded; download the weights {in_time[-1].weights} of "
        f"{in_time[-1].name} where there is a network, or name a folder that holds an open_clip model: "
        "--encoder local-dir:FOLDER"
    )


def named_encoder(name: str, weights: str | None, labels: LabelSpace) -> EncoderChoice:
    """Return an encoder that the user named; raise `UsageError` if it does not exist or lacks words of the labels."""
    if weights is None and name.startswith("ViT-"):
        weights = "openai"
    try:
        encoder_identity(name, weights)
    except DuplexError as error:
        raise UsageError(f"--encoder {name}: {error}") from None
    if is_random(weights):
        raise UsageError(f"the weights {weights} are random, for trials of a project; name pretrained ones")
    check_words(name, words(labels))
    return EncoderChoice(EncoderParams(name=name, weights=weights), "named")


def check_words(name: str, texts: Sequence[str], advice: str = "choose another --encoder") -> None:
    """Raise `UsageError` if an encoder of a fixed vocabulary lacks a word of `texts`; `advice` ends the message."""
    if unknown := unknown_words(name, texts):
        raise UsageError(f"{name} does not know the words {', '.join(unknown[:5])}; {advice}")


def words(labels: LabelSpace) -> Sequence[str]:
    """Return the names of all states and objects as they are written in prompts."""
    return [prompt_name(name) for name in (*labels.states, *labels.objects)]
