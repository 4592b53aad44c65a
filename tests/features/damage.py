"""What a finished cache of twelve rows may hold that no cache should: each changes an open file."""

from __future__ import annotations

import h5py
import numpy as np

from duplex.features.layout import FIRST_BAD, REASONS


def nan(file: h5py.File) -> None:
    file["cls"][3, 5] = np.nan


def infinite(file: h5py.File) -> None:
    file["cls"][3, 5] = np.inf


def unknown_mark(file: h5py.File) -> None:
    file["mark"][2] = 200


def pending(file: h5py.File) -> None:
    file["mark"][2] = 0


def narrow(file: h5py.File) -> None:
    values = file["cls"][:, :7]
    del file["cls"]
    file["cls"] = values


def wide_type(file: h5py.File) -> None:
    values = file["cls"][...].astype(np.float32)
    del file["cls"]
    file["cls"] = values


def short(file: h5py.File) -> None:
    values = file["mark"][:5]
    del file["mark"]
    file["mark"] = values


def no_marks(file: h5py.File) -> None:
    del file["mark"]


def group_for_features(file: h5py.File) -> None:
    del file["cls"]
    file.create_group("cls")


def no_identity(file: h5py.File) -> None:
    del file["identity"]


def numeric_identity(file: h5py.File) -> None:
    file["identity"].attrs["dim"] = 128


def no_rows(file: h5py.File) -> None:
    del file.attrs["stop"]


def backward(file: h5py.File) -> None:
    file.attrs["start"] = 99


def text_rows(file: h5py.File) -> None:
    file.attrs["total"] = "many"


def soft_link(file: h5py.File) -> None:
    file["elsewhere"] = file["cls"]
    del file["cls"]
    file["cls"] = h5py.SoftLink("/elsewhere")


def external_link(file: h5py.File) -> None:
    del file["cls"]
    file["cls"] = h5py.ExternalLink("other.h5", "/cls")


def raw_storage(file: h5py.File) -> None:
    del file["cls"]
    file.create_dataset("cls", (12, 128), np.float16, external=[("/etc/passwd", 0, 12 * 128 * 2)])


def view_of_nothing(file: h5py.File) -> None:
    del file["cls"]
    layout = h5py.VirtualLayout((12, 128), np.float16)
    layout[:] = h5py.VirtualSource("gone.h5", "cls", (12, 128))
    file.create_virtual_dataset("cls", layout)


def view_of_itself(file: h5py.File) -> None:
    _view(file, "features.h5")


def view_from_outside(file: h5py.File) -> None:
    _view(file, "../../whole.h5")


def _view(file: h5py.File, source: str) -> None:
    """Rows and marks become those of another file."""
    for name, shape, kind in (("cls", (12, 128), np.float16), ("mark", (12,), np.uint8)):
        del file[name]
        layout = h5py.VirtualLayout(shape, kind)
        layout[:] = h5py.VirtualSource(source, name, shape)
        file.create_virtual_dataset(name, layout)


def unwritten(file: h5py.File) -> None:
    del file["cls"]
    file.create_dataset("cls", (12, 128), np.float16)


def in_pieces(file: h5py.File) -> None:
    values = file["cls"][...]
    del file["cls"]
    file.create_dataset("cls", data=values, chunks=(4, 128), compression="gzip")


def enormous(file: h5py.File) -> None:
    del file["cls"]
    file.create_dataset("cls", (12, 2**40), np.float16)


def extra(file: h5py.File) -> None:
    file["more"] = np.arange(3)


def deep_rows(file: h5py.File) -> None:
    values = file["cls"][...]
    del file["cls"]
    file["cls"] = values[:, :, None]


def first_unknown_mark(file: h5py.File) -> None:
    file["mark"][2] = FIRST_BAD + len(REASONS)


def no_row_at_all(file: h5py.File) -> None:
    file.attrs["start"] = file.attrs["stop"]


def below_nothing(file: h5py.File) -> None:
    file.attrs["start"] = -1


DAMAGE = [
    *(nan, infinite, unknown_mark, pending, narrow, wide_type, short, no_marks, group_for_features, no_identity),
    *(numeric_identity, no_rows, backward, text_rows, soft_link, external_link, raw_storage, view_of_nothing),
    *(view_of_itself, view_from_outside, unwritten, in_pieces, enormous, extra),
    *(deep_rows, first_unknown_mark, no_row_at_all, below_nothing),
]
