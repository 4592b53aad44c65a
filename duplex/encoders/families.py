"""Encoder families (CLIP, timm, …) by name: entry points of the group `duplex.encoders`, built-in and third-party.

An encoder's name is `FAMILY:REST` (`timm:resnet18`) or a family's own name (`tiny`); every other name belongs to the
family `clip`. A distribution adds a family with a subclass of `EncoderFamily` and one line of its metadata:

    [project.entry-points."duplex.encoders"]
    my_family = "my_package.my_module:MyFamily"
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

from duplex.errors import DuplexError, require_type
from duplex.system.code_hash import plugin_hash
from duplex.system.plugins import installed_plugins, load_plugin, module_of

if TYPE_CHECKING:
    from duplex.encoders import Encoder
    from duplex.encoders.encoder_source import EncoderSource

GROUP = "duplex.encoders"
DEFAULT = "clip"  # the family of names that no other family claims


@dataclass(frozen=True)
class MissingWeights:
    """Published weights that are not on disk: the URL to download them from, and their size."""

    address: str  # URL of the download
    size: int | None  # bytes, estimated; None where unknown


@dataclass(frozen=True)
class CatalogEntry:
    """An encoder as `duplex encoders list` shows it: name, width of features, published weights."""

    name: str
    dim: int  # width of the features
    tags: tuple[str, ...]  # published weights
    on_disk: tuple[str, ...]  # those of the tags that need no download

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class EncoderFamily(ABC):
    """Base class of encoder families; a subclass finds, loads and lists the encoders of one family."""

    usage = ""  # forms of names that `catalog` does not list, for `duplex encoders list`

    @abstractmethod
    def find(self, name: str, weights: str | None) -> EncoderSource:
        """The architecture, preprocessing and weights file of an encoder; weights are downloaded if necessary.

        Raises UsageError for a name or weights that do not exist.

        weights: tag of published weights, or a file.
        """

    @abstractmethod
    def load(self, source: EncoderSource, *, towers: str, device: str, precision: str) -> Encoder:
        """Build the frozen encoder that `source` describes.

        towers: "both", "image" or "text".
        """

    def missing_weights(self, name: str, weights: str | None) -> MissingWeights | None:
        """Weights that loading an encoder would download; None if they are on disk or unknown."""
        return None

    def unknown_words(self, texts: Iterable[str]) -> list[str]:
        """The distinct words in `texts` that the family's text towers have no embedding for."""
        return []

    def catalog(self) -> list[CatalogEntry]:
        """The encoders that `duplex encoders list` shows."""
        return []


def family_module(encoder: str) -> str:
    """Name of the module that defines an encoder's family, which is not imported."""
    return module_of(_entry_point(encoder))


def family_code(encoder: str) -> str | None:
    """Hash of the code of an encoder's family from a plug-in; None for a family of this package."""
    return plugin_hash(family_module(encoder))


def find_family(encoder: str) -> EncoderFamily:
    """The family that an encoder belongs to."""
    require_type(encoder, str, "encoder")
    return _load(_entry_point(encoder))


def _entry_point(encoder: str) -> EntryPoint:
    families = installed_plugins(GROUP)
    if DEFAULT not in families:
        raise DuplexError(f"the entry points of the group {GROUP!r} are missing; install the package duplex again")
    return families.get(encoder.partition(":")[0], families[DEFAULT])


def all_families() -> list[EncoderFamily]:
    """All installed encoder families, sorted by name."""
    return [_load(point) for point in installed_plugins(GROUP).values()]


def _load(point: EntryPoint) -> EncoderFamily:
    family: EncoderFamily = load_plugin(point, "encoder family", EncoderFamily)()
    return family
