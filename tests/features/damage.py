"""Kinds of damage to a finished cache of twelve rows and 128 numbers: a change of an open file, and its message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

from duplex.features.checksums import row_checksums
from duplex.features.layout import FIRST_BAD, REASONS, value_names

Change = Callable[[h5py.File], object]


def store(name: str, change: Callable[[Any], Any], **options: Any) -> Change:
    """Replace a data set by a function of its values."""

    def apply(file: h5py.File) -> None:
        values = change(file[name][...])
        del file[name]
        file.create_dataset(name, data=values, **options)

    return apply


def write(name: str, place: Any, value: float) -> Change:
    return lambda file: file[name].__setitem__(place, value)


def attribute(key: str, value: object) -> Change:
    return lambda file: file.attrs.__setitem__(key, value)


def instead(name: str, put: Change) -> Change:
    """Delete a data set, then call `put`."""
    return lambda file: (file.__delitem__(name), put(file))


def view(source: str, *names: str) -> Change:
    """Make data sets a view of those of another file."""
    shapes: dict[str, Any] = {
        "cls": ((12, 128), np.float16),
        "status": ((12,), np.uint8),
        "checksums": ((12, 1), np.uint32),
    }

    def apply(file: h5py.File) -> None:
        for name in names:
            shape, dtype = shapes[name]
            del file[name]
            layout = h5py.VirtualLayout(shape, dtype)
            layout[:] = h5py.VirtualSource(source, name, shape)
            file.create_virtual_dataset(name, layout)

    return apply


def update_checksums(file: h5py.File) -> None:
    """Make the checksums of an open cache those of its present values."""
    names, statuses = value_names(file), file["status"][...]
    sums = [row_checksums(file[name][...], statuses if name == "cls" else None) for name in names]
    file["checksums"][...] = np.stack(sums, axis=1)


def soft_link(file: h5py.File) -> None:
    file.move("cls", "elsewhere")
    file["cls"] = h5py.SoftLink("/elsewhere")


VALUES: dict[str, Change] = {  # the layout is sound
    "NaN": write("cls", (3, 5), np.nan),
    "infinity": write("cls", (3, 5), np.inf),
    "a pending row": write("status", 2, 0),
}
NO_ROWS = "its start, stop or total is not a whole number"
ELSEWHERE = "'cls' lies in other files"
LAYOUT: dict[str, tuple[Change, str]] = {
    "checksums of two data sets": (
        store("checksums", lambda x: x.repeat(2, axis=1)),
        "'checksums' does not fit the other data sets",
    ),
    "an unknown status": (write("status", 2, 200), "the status 200 of a row has no meaning"),
    "the first unknown status": (
        write("status", 2, FIRST_BAD + len(REASONS)),
        f"the status {FIRST_BAD + len(REASONS)} of a row has no meaning",
    ),
    "narrow rows": (store("cls", lambda x: x[:, :7]), "its rows have 7 numbers, its identity says 128"),
    "float32": (
        store("cls", lambda x: x.astype(np.float32)),
        "'cls' is (12, 128) of float32, which does not fit its 12 rows",
    ),
    "few statuses": (store("status", lambda x: x[:5]), "'status' is (5,) of uint8, which does not fit its 12 rows"),
    "three dimensions": (
        store("cls", lambda x: x[:, :, None]),
        "'cls' is (12, 128, 1) of float16, which does not fit its 12 rows",
    ),
    "no statuses": (lambda f: f.pop("status"), "there is no 'status'"),
    "a group": (instead("cls", lambda f: f.create_group("cls")), "'cls' is a group of arrays or empty"),
    "no identity": (lambda f: f.pop("identity"), "there is no group 'identity'"),
    "a number as identity": (lambda f: f["identity"].attrs.__setitem__("dim", 128), "the attribute 'dim' is not text"),
    "no stop": (lambda f: f.attrs.__delitem__("stop"), NO_ROWS),
    "text as total": (attribute("total", "many"), NO_ROWS),
    "start beyond stop": (attribute("start", 99), "its rows are 99 to 12 of 12"),
    "no row": (attribute("start", 12), "its rows are 12 to 12 of 12"),
    "a negative start": (attribute("start", -1), "its rows are -1 to 12 of 12"),
    "a soft link": (soft_link, "it holds 'elsewhere', which is no part of a cache"),
    "an external link": (
        instead("cls", lambda f: f.__setitem__("cls", h5py.ExternalLink("other.h5", "/cls"))),
        "'cls' is a link to another place",
    ),
    "raw bytes of another file": (
        instead("cls", lambda f: f.create_dataset("cls", (12, 128), "f2", external=[("/etc/passwd", 0, 12 * 128 * 2)])),
        ELSEWHERE,
    ),
    "a partial view": (
        view("gone.h5", "cls"),
        "some of the arrays are links to shards and others are not; expected all or none",
    ),
    "a view of itself": (view("features.h5", "cls", "status", "checksums"), ELSEWHERE),
    "a view of another folder": (
        view("../../whole.h5", "cls", "status", "checksums"),
        "'cls' is a view of '../../whole.h5', which is not the name of a shard",
    ),
    "no bytes": (
        instead("cls", lambda f: f.create_dataset("cls", (12, 128), np.float16)),
        "'cls' declares 3,072 bytes, of which 0 were ever written",
    ),
    "chunks": (store("cls", lambda x: x, chunks=(4, 128), compression="gzip"), "'cls' is stored in chunks"),
    "an enormous size": (instead("cls", lambda f: f.create_dataset("cls", (12, 2**40), np.float16)), "'cls' declares"),
    "another data set": (lambda f: f.__setitem__("more", np.arange(3)), "it holds 'more', which is no part of a cache"),
}
DAMAGE: dict[str, Change] = {**VALUES, **{name: change for name, (change, _) in LAYOUT.items()}}
