"""Start and end commands and the scripts of pipeline/: print errors as one line, set exit codes.

Exit codes: 0 success, 1 failure, 2 bad usage, 130 stopped by Ctrl-C, 143 by SIGTERM, 141 closed pipe.
With `DUPLEX_DEBUG=1`, the traceback is printed too.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from duplex.errors import DuplexError
from duplex.system.threads import keep_freed_memory

DEBUG = "DUPLEX_DEBUG"
STOPPED = "stopped; the same command resumes the work"
LARGEST_SEED = 2**63 - 1  # the largest that every random generator accepts


class Terminated(KeyboardInterrupt):
    """Raised when SIGTERM is received, so that scratch files are removed as after Ctrl-C."""


def run_script(work: Callable[..., object]) -> None:
    """Call `work` with a script's command-line arguments."""
    run_command(lambda: work(*sys.argv[1:]))


def run_command(work: Callable[[], object]) -> None:
    """Call `work()`; errors that users can fix are printed as one line and set the exit code."""
    keep_freed_memory()
    # torch, imported later, reads it: on busy cores, threads that wait by spinning make a fit fifty times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    atexit.register(gc.freeze)  # or the interpreter's last collection visits torch's objects: 0.4 s
    signal.signal(signal.SIGTERM, _raise_terminated)
    with report_errors():
        work()


@contextmanager
def report_errors() -> Iterator[None]:
    try:
        yield
        print(end="", flush=True)
    except DuplexError as error:
        _exit(str(error), error.exit_code)
    except Terminated:
        _exit(STOPPED, 128 + signal.SIGTERM)
    except KeyboardInterrupt:
        _exit(STOPPED, 128 + signal.SIGINT)
    except BrokenPipeError:  # Python would try to flush stdout at exit, and report an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        _exit(str(error), 1)


def escape_unprintable(text: str) -> str:
    r"""`text` with control characters and undecodable bytes replaced by escapes such as `\x1b`."""
    return "".join(repr(c)[1:-1] if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)


def _exit(message: str, code: int) -> None:
    if os.environ.get(DEBUG):
        traceback.print_exc()
    print(f"duplex: {escape_unprintable(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(code)


def _raise_terminated(_number: int, _frame: FrameType | None) -> None:
    raise Terminated
