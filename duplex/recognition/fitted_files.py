"""Files that `duplex fit` adds to an exported model: how the model was trained, and statistics for `duplex update`.

fit.json                  the training recipes (settings) tried and the chosen one, metrics measured before the final
                          training on all images, counts of the data, digests of the images and the model's tensors
statistics.safetensors    number and sum of the features of all labelled images, by pair; their second moment
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from duplex.errors import UsageError
from duplex.layers.class_statistics import ClassStatistics
from duplex.layers.gaussian_prototypes import FitSettings, FittedStatistics
from duplex.recognition.sources import CONFIG, read_config
from duplex.recognition.trained import code_changed
from duplex.system.files import save_tensors, sole_writer
from duplex.training.checkpoint import digest, with_checksum

FIT, STATISTICS = "fit.json", "statistics.safetensors"
FIT_FORMAT, FORMAT = "duplex-fit-4", "duplex-statistics-1"
FIELDS = ("pairs", "counts", "sums", "moment")


def write_fit(folder: Path, record: Mapping[str, Any], model: Mapping[str, Tensor]) -> None:
    """Write fit.json into the folder of a model; equal records give equal bytes.

    record: how the model was fitted: recipes (settings tried), metrics, counts and digests of the images.
    model: the model's tensors, of which a digest is stored.
    """
    fields = {"format": FIT_FORMAT, **record, "model": digest(model)}
    text = json.dumps(with_checksum(fields), ensure_ascii=False, indent=1) + "\n"
    (folder / FIT).write_text(text, encoding="utf-8")


def read_fit(folder: Path, model: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """Return the content of fit.json in a model's folder, the record of how the model was fitted.

    Raise `UsageError` if the folder was not made by `duplex fit`, or fit.json was changed.

    model: the model's tensors; `UsageError` is raised if fit.json belongs to other tensors. None: this is not checked.
    """
    path = folder / FIT
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{folder} has no readable {FIT}; expected a folder that `duplex fit` wrote") from error
    if not isinstance(record, dict) or record.get("format") != FIT_FORMAT:
        raise UsageError(f"{path} is not of this version ({FIT_FORMAT}); run `duplex fit` again")
    if record.get("checksum") != with_checksum(record)["checksum"]:
        raise UsageError(f"{path} is damaged: its numbers or contents were changed; run `duplex fit` again")
    if model is not None and record.get("model") != digest(model):
        raise UsageError(f"{path} belongs to other tensors than {folder} holds; put back the {FIT} of this model")
    return record


def contents_of(record: Mapping[str, Any]) -> dict[str, str]:
    """Return a dict, sha256 of the file -> digest of the pixels, of all images that a model was fitted or updated with.

    record: content of the model's fit.json.
    """
    return {file: pixels for part in (record, *record.get("updates", [])) for file, pixels in part["contents"].items()}


def shared_contents(contents: Mapping[str, str], others: Mapping[str, str]) -> list[bool]:
    """Return, for each image of `contents`, whether an image of `others` has the same bytes or the same pixels.

    contents, others: dictionaries from the sha256 of an image file to the digest of its pixels.
    """
    known = {*others, *others.values()}
    return [file in known or pixels in known for file, pixels in contents.items()]


def sole_model_writer(folder: Path, instead: str) -> AbstractContextManager[None]:
    """Return a lock on a model's folder, a context manager that only one process can hold.

    `duplex update` and the end of `duplex fit` hold it, so that neither overwrites what the other writes.

    folder: folder of the model.
    instead: what the user can do instead of waiting, for the error message.
    """
    folder = folder.resolve()  # a link and its target have one lock
    return sole_writer(folder.with_name(f"{folder.name}.update"), "update or fit", instead)


def refuse_lost_updates(folder: Path, contents: Mapping[str, str]) -> None:
    """Raise `UsageError` if a folder's model was updated with images that a new model in its place would lack.

    contents: the new model's images: sha256 of the file -> digest of its pixels.
    """
    try:
        updates = read_fit(folder).get("updates", [])
    except UsageError:  # not a model, or one that cannot be updated
        return
    if lost := shared_contents(contents_of({"contents": {}, "updates": updates}), contents).count(False):
        raise UsageError(
            f"{folder} was updated with {lost:,} images that its replacement would lack; choose another --out, or move "
            "the folder"
        )


def write_statistics(folder: Path, fitted: FittedStatistics, model: Mapping[str, Tensor]) -> None:
    """Write counts, sums and second moment of training features into a model's folder, for `duplex update` to extend.

    model: the model's tensors, of which a digest is stored.
    """
    tensors = {name: getattr(fitted.statistics, name).cpu().contiguous() for name in FIELDS}
    record = {
        "format": FORMAT,
        "model": digest(model),
        "tensors": digest(tensors),
        "shape": [fitted.statistics.states, fitted.statistics.objects],
        "settings": asdict(fitted.settings),
    }
    save_tensors(folder / STATISTICS, tensors, {"duplex": json.dumps(record, sort_keys=True)})
    (folder / STATISTICS).chmod(0o644)


def read_statistics(folder: Path, model: Mapping[str, Tensor]) -> FittedStatistics:
    """Return counts, sums and second moment of training features from a model's folder; `duplex update` extends them.

    Raise `UsageError` if there are none, or if they belong to other tensors than the model's, or to features of a
    plug-in encoder whose code has changed since.

    model: the model's tensors.
    """
    path, encoder = folder / STATISTICS, read_config(folder / CONFIG)["encoder"]
    if code_changed(encoder):
        raise UsageError(
            f"the code of {encoder['name']!r} has changed since {folder} was fitted, so new features do not add to its "
            "statistics; run `duplex fit` again with all images"
        )
    try:
        with safe_open(path, "pt") as file:
            record = json.loads(file.metadata()["duplex"])
            tensors = {name: file.get_tensor(name) for name in FIELDS}
        if record["format"] != FORMAT:
            raise UsageError(f"{path} has the format {record['format']}, expected {FORMAT}; run `duplex fit` again")
        if record["tensors"] != digest(tensors) or record["model"] != digest(model):
            raise UsageError(f"{path} is damaged or of another model; run `duplex fit` again")
        statistics = ClassStatistics(*record["shape"], *(tensors[name] for name in FIELDS))
        return FittedStatistics(statistics, FitSettings(**record["settings"]))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read; only models of `duplex fit` can be updated without training"
        ) from error
