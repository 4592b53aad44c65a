"""Names that an earlier version of the package used, so that error messages can state the present ones.

They are kept for one version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

REMOVED = "was removed: see CHANGELOG.md"

KEYS = {  # old key of params.yaml and of checkpoints -> present keys; which one is meant depends on the place
    "of": ("extends",),
    "on": ("per_dataset",),
    "tail": ("finetune",),
    "depth": ("blocks", "block_inputs"),
}
REMOVED_KEYS = {  # removed key -> a key at each place where it stood
    "deep_test": ("bits",),
    "views": ("max_bad", "training"),
    "flip": ("training",),
    **dict.fromkeys(("codebook", "fusion_rank", "nodes", "weighing"), ("refine_over",)),
}
VALUES = {  # of options
    "ct": "semantic",
    "ch": "visual",
    "so": "factors",
    "g": "gaussian",
    "gso": "gaussian_factors",
    "s": "state",
    "o": "object",
    "c": "composition",
    "cso": "three",
    "tail": "bottleneck",
    "trained": "full",
    "ema": "recomputed",
}
METHODS = {"duplex_plus": "dual", "duplex_deep": "dual_finetuned"}  # entries of `methods:`
COMMAND_OPTIONS = {
    "--depth": "--block-inputs",
    "--pictures": "--images",
    "--deep-test": None,
    "--no-deep-test": None,
    "--words": "--compositions",
    "--max-pictures": "--max-images",
}


def renamed_key(key: str, known: Iterable[str]) -> str | None:
    """Return `was renamed: write NEW` or `was removed: ...` for a params.yaml key of an earlier version, else None.

    known: the keys that are allowed in that part of params.yaml.
    """
    names = set(known)
    for present in KEYS.get(key, ()):
        if present in names:
            return f"was renamed: write {present}"
    return REMOVED if names.intersection(REMOVED_KEYS.get(key, ())) else None


def renamed_value(value: object, allowed: Collection[object]) -> str | None:
    """Return the present name of an option's value in an earlier version; None if no allowed value replaces it."""
    name = VALUES.get(value) if isinstance(value, str) else None
    return name if name in allowed else None


def renamed_method_hint(name: str) -> str | None:
    """Return the error message for a method's name in an earlier version; None for all other names."""
    return f"method {name} was renamed: write {METHODS[name]}" if name in METHODS else None


def renamed_option(word: str) -> str | None:
    """Return the error message for a command-line option of an earlier version (such as `--depth`), else None."""
    if word not in COMMAND_OPTIONS:
        return None
    present = COMMAND_OPTIONS[word]
    return f"{word} {f'was renamed: write {present}' if present else REMOVED}"
