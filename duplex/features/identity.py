"""Identity of a feature cache: the settings (encoder, manifest, options) with which it was made, and comparisons."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from duplex.errors import DuplexError

Identity = dict[str, str]
LIBRARIES = ("torch", "open_clip_torch", "pillow")  # recorded; they affect the last bits, not the meaning
SHARD = re.compile(r"(?P<stem>.+)\.shard-(?P<k>\d+)-of-(?P<n>\d+)(?P<suffix>\.\w+)?")  # a shard's file name
ROOT = "root"  # the folder of the images, as params.yaml gives it; absent in older caches
IMPORTED = "imported"  # the encoder's name in a cache of imported features
DISPLAY_NAMES = {  # in messages, compared in this order: what others follow from comes before them
    "encoder": "encoder",
    "architecture": "encoder architecture",
    "weights": "weights file",
    "code": "code of its encoder family",
    "preprocessing": "preprocessing",
    "precision": "precision",
    "manifest": "manifest",
    ROOT: "folder of images",
    "dim": "feature width",
    "tokens": "token choice",
    "block_inputs": "number of block inputs",
    "bits": "number of bits",
}


def check_identity(stored: Mapping[str, str], expect: Mapping[str, str | None], path: Path) -> None:
    """Raise `DuplexError` unless the cache at `path` was made with the expected settings, such as the encoder.

    The message names the first difference and the command that makes the cache again. Versions of libraries may differ.
    Of imported features only the manifest and the width are compared: the rest is unknown. A cache that records no
    folder of images fits any folder. A setting whose expected value is None must be absent.
    """
    imported = stored.get("encoder") == IMPORTED
    others = sorted(set(expect) - set(DISPLAY_NAMES) - set(LIBRARIES))
    for key in ("manifest", "dim") if imported else (*DISPLAY_NAMES, *others):
        if key in expect and _differs(key, stored, expect):
            shorten = str if key == ROOT else _shorten
            values = f"{shorten(stored.get(key))}, not {shorten(expect[key])}"
            name = DISPLAY_NAMES.get(key, key)
            raise DuplexError(f"{path} was made with another {name} ({values}); {repair_hint(path, imported=imported)}")
    if "limit" in stored and "limit" not in expect:
        raise DuplexError(f"{path} holds only the first {stored['limit']} rows; {repair_hint(path)}")


def cache_identity(
    encoder: Identity,
    manifest_sha256: str,
    tokens: str = "none",
    limit: int | None = None,
    block_inputs: int = 0,
    bits: int = 16,
    root: str | None = None,
) -> Identity:
    """All settings that a cache's bytes depend on, and `root`, the folder of the images as params.yaml gives it.

    Options at their default are left out.
    """
    options = {
        ROOT: root,
        "tokens": tokens if tokens != "none" else None,
        "limit": limit,
        "block_inputs": block_inputs or None,
        "bits": bits if block_inputs and bits != 16 else None,
    }
    return {**encoder, "manifest": manifest_sha256, **{k: str(v) for k, v in options.items() if v is not None}}


def first_difference(stored: Mapping[str, str], expect: Mapping[str, str]) -> str | None:
    """The first setting in which two identities differ, by its name in messages; None if they are equal.

    Versions of libraries such as torch count as settings. Folders of images are named by both paths, and compared only
    if both caches record one.
    """
    for key in [*DISPLAY_NAMES, *sorted({*stored, *expect} - set(DISPLAY_NAMES))]:
        if _differs(key, stored, expect):
            if key == ROOT:
                return f"{DISPLAY_NAMES[ROOT]} ({stored[ROOT]} → {expect[ROOT]})"
            return DISPLAY_NAMES.get(key, f"{key} version" if key in LIBRARIES else key)
    return None


def repair_hint(path: Path, *, imported: bool = False) -> str:
    """End of an error message: the command that writes the cache or shard at `path`, encoded or `imported`, again."""
    if imported:
        return f"`duplex cache import FILE --dataset {_dataset(path) or 'NAME'}` makes it again"
    command = extract_command(path)
    if shard := SHARD.fullmatch(path.name):
        whole = path.with_name(shard["stem"] + (shard["suffix"] or ""))
        command = extract_command(whole, f"{shard['k']}/{shard['n']}")
    return f"`{command}` makes it again"


def fresh_hint(path: Path) -> str:
    """End of an error message: the command that encodes all images of the cache at `path` again."""
    return f"`{extract_command(path)} --fresh` encodes all images again"


def extract_command(path: Path, shard: str | None = None) -> str:
    """The `duplex extract` command that writes the cache at `path`, or its shard `k/n`."""
    target = _dataset(path) or f"NAME --out {path}"
    return f"duplex extract --dataset {target}{'' if shard is None else f' --shard {shard}'}"


def _dataset(path: Path) -> str:
    # a project's caches are artifacts/NAME/features.h5; the name of others is unknown
    return path.parent.name if path.name == "features.h5" else ""


def _differs(key: str, stored: Mapping[str, str | None], expect: Mapping[str, str | None]) -> bool:
    a, b = stored.get(key), expect.get(key)
    return a != b and not (key == ROOT and (a is None or b is None))


def _shorten(value: str | None) -> str:
    if value is None:
        return "none"
    return value if len(value) <= 40 else f"{value[:12]}…"
