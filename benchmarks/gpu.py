"""Check results and measure speed on a GPU in under ten minutes, and write a part of docs/speed.md.

    make gpu                                                    # python -m benchmarks.gpu
    python -m benchmarks.gpu --device cpu --quick --out PAGE    # a quick trial without a GPU

The page's last part says what is checked (`ABOUT`) and measured. Without a GPU this prints a message and exits with 0;
it exits with 1 if a check fails. Parts that would start after LIMIT seconds are skipped and listed.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import io
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_holds import holds
from benchmarks.gpu_times import TIMES, Look
from benchmarks.measure import say
from docs.builder.blocks import with_blocks
from duplex.system.files import write_text
from duplex.training.run import reproducible

PAGE = Path(__file__).resolve().parents[1] / "docs" / "speed.md"
HEAD = "## On a GPU"
ABOUT = """\
`make gpu` checks results and measures speed on a machine with one GPU in ten minutes, with random weights and as many
pairs as the benchmarks have; it exits with 1 if a check fails. `--device cpu --quick --out page.md` is a trial without
a GPU. Features must be near those from a CPU, test AUC within three points. A seed trained twice, or killed and
resumed, must give byte-identical checkpoints."""
LIMIT = 480  # seconds after which no further part begins
PARTS: dict[str, Callable[[Look, Path], Any]] = {"holds": holds, **TIMES}


@reproducible()  # as the stages run, so that times are theirs
def measure(look: Look, limit: float = LIMIT) -> dict[str, Any]:
    """Run all parts within the time limit; a part that fails is recorded and does not stop the others."""
    began = time.perf_counter()
    record: dict[str, Any] = {"device": device_name(look.device), "torch": torch.__version__, "quick": look.quick}
    record |= {"left_out": [], "broken": {}}
    for name, part in PARTS.items():
        if time.perf_counter() - began > limit:
            record["left_out"].append(name)
            continue
        say(f"{name} ...")
        try:
            with tempfile.TemporaryDirectory(prefix="duplex-gpu-") as folder:
                record[name] = part(look, Path(folder))
        except Exception as error:  # the other parts still run
            record["broken"][name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            say(f"{name}: {traceback.format_exc()}")
    record["seconds"] = time.perf_counter() - began
    return record


def device_name(device: str) -> str:
    if device == "cpu":
        return f"CPU, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def failures(record: dict[str, Any]) -> list[str]:
    """The checks that failed."""
    found = [f"{name} broke off: {reason}" for name, reason in record["broken"].items()]
    return found + [f"{name} failed" for name, good in record.get("holds", {}).get("held", {}).items() if not good]


def write(out: Path, record: dict[str, Any]) -> None:
    """Write the page's last part, and the numbers of each table beside the page, as `results/gpu_PART.csv`."""
    before = out.read_text(encoding="utf-8").partition(HEAD)[0] if out.is_file() else ""
    for name in set(PARTS) & set(record):
        rows = record[name] if name != "holds" else checks(record[name])
        write_text(out.parent / f"results/gpu_{name}.csv", csv_of(rows))
    write_text(out, with_blocks(before + page(record), out.parent))


def checks(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    passed = {what: {"result": "passed" if good else "**failed**"} for what, good in found["held"].items()}
    return passed | {what: {"result": value} for what, value in found["read"].items()}


def page(record: dict[str, Any]) -> str:
    """The part of the page as Markdown, which shows the tables."""
    trial = " A quick trial in small sizes: its times mean nothing." if record["quick"] else ""
    head = f"Measured on {record['device']}, torch {record['torch']}, {record['seconds']:.0f} s in all.{trial}"
    parts = [HEAD, f"{ABOUT}\n\n{head}"]
    wrong = failures(record)
    parts.append("**All checks passed.**" if not wrong else "**Not all checks passed:** " + "; ".join(wrong) + ".")
    if record["left_out"]:
        parts.append(f"Left out, for lack of time: {', '.join(record['left_out'])}.")
    for name in PARTS:
        if name in record:
            about = inspect.getdoc(TIMES[name]) if name in TIMES else "what was checked."
            parts += [f"**{name.capitalize()}**: {about}", f"<!-- table: results/gpu_{name}.csv -->\n<!-- end -->"]
    return "\n\n".join(parts) + "\n"


def csv_of(rows: dict[str, dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["", *columns])
    lines.writerows([name, *(shown(row.get(column)) for column in columns)] for name, row in rows.items())
    return text.getvalue()


def shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int | float):
        return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a quick trial, with --quick")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round each")
    parser.add_argument("--out", type=Path, help=f"page to write; default: {PAGE.relative_to(PAGE.parents[1])}")
    wanted = parser.parse_args()
    if wanted.device == "cpu" and (not wanted.quick or wanted.out is None):
        parser.error("--device cpu is for trials: add --quick and --out")
    if wanted.device == "cuda" and not torch.cuda.is_available():
        say("torch finds no GPU; nothing was run, and docs/speed.md is unchanged")
        return 0
    record = measure(Look(wanted.device, wanted.quick))
    out = wanted.out or PAGE
    write(out, record)
    say(f"{out}: {'; '.join(failures(record)) or 'all checks passed'}")
    return 1 if failures(record) else 0


if __name__ == "__main__":
    sys.exit(main())
