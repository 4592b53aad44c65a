"""Write answers of `duplex predict` as a table, JSON lines, CSV or tasks of Label Studio."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from duplex.cli import log
from duplex.errors import UsageError, require
from duplex.system.entry import escape_unprintable
from duplex.system.files import replace_file

if TYPE_CHECKING:
    from duplex.recognition.answers import Answer, UnreadableImage

FORMATS = ("table", "jsonl", "csv", "label-studio")
COLUMNS = (
    "image", "rank", "state", "object", "score", "probability", "seen",
    "in_distribution", "new_share", "new_share_error", "error",
)  # fmt: skip


def with_share_logged(answers: Iterable[Answer | UnreadableImage]) -> Iterator[Answer | UnreadableImage]:
    """Yield the answers; a line on the estimated share of new pairs precedes the first one."""
    logged = False
    for answer in answers:
        share = getattr(answer, "share", None)
        if share is not None and not logged:
            log(str(share))
            logged = True
        yield answer


@contextmanager
def open_output(out: Path | None) -> Iterator[TextIO]:
    """Context manager of a text file that replaces `out` at its end; without `out`, of stdout."""
    if out is None:
        yield sys.stdout
        return
    with replace_file(out) as scratch, scratch.open("w", encoding="utf-8", newline="") as file:
        yield file


def checked_format(form: str | None, out: Path | None) -> str:
    """The format of answers: `form` or, without it, by the suffix of `out`; `UsageError` if they differ."""
    by_suffix = {".csv": "csv", ".jsonl": "jsonl"}.get("" if out is None else out.suffix.lower())
    form = by_suffix or "table" if form is None else require(form, FORMATS, "format")
    if by_suffix not in (None, form):
        problem = f"--format is {form}, but --out {out} ends in .{by_suffix}"
        raise UsageError(f"{problem}; change --out or omit --format")
    return form


def write_answers(rows: Iterable[tuple[str, Answer | UnreadableImage]], target: TextIO, form: str, top: int) -> int:
    """Write images' answers as they come; returns the number of unreadable images."""
    from duplex.data.label_studio import pre_annotated

    unreadable = 0
    lines = csv.writer(target, lineterminator="\n")
    if form == "csv":
        lines.writerow(COLUMNS)
    for number, (image, answer) in enumerate(rows):
        record = answer.to_dict(top)
        unreadable += "error" in record
        if form == "label-studio":
            task = json.dumps(pre_annotated(image, record), ensure_ascii=False)
            target.write((",\n" if number else "[") + task)
        elif form == "jsonl":
            target.write(json.dumps({"image": image, **record}, ensure_ascii=False) + "\n")
        elif form == "table":
            target.write(f"{escape_unprintable(image)}  {_summary(record)}\n")
        elif "error" in record:
            lines.writerow([image, *[""] * 9, record["error"]])
        else:
            for rank, guess in enumerate(record["top"], 1):
                cells = [guess[key] for key in COLUMNS[2:7]]
                of_image = [record[key] for key in COLUMNS[7:10]]
                lines.writerow([image, rank, *cells, *of_image, ""])
        target.flush()
    target.write("]\n" if form == "label-studio" else "")
    return unreadable


def _summary(record: dict[str, Any]) -> str:
    if "error" in record:
        return f"! {record['error']}"
    parts = [] if record["in_distribution"] else ["none of these?"]
    for guess in record["top"]:
        new = [name for name, trained in guess.get("trained_words", {}).items() if not trained]
        note = "" if guess["seen"] else " (new)"
        note = f" (new {' and '.join(new)})" if new else note
        parts.append(f"{guess['state']} {guess['object']} {100 * guess['probability']:.1f} %{note}")
    return "  ".join(parts)
