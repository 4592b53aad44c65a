"""What a person sees when work cannot be done: one line on stderr and an exit code.

`DUPLEX_DEBUG=1` adds the traceback. Codes: 0 done, 1 it could not be done, 2 it was asked for wrongly, 130 and 143
stopped by Ctrl-C and by SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from duplex.errors import DuplexError
from duplex.system.allocator import keep_freed_memory
from duplex.system.files import reason

DEBUG = "DUPLEX_DEBUG"
GONE_READER = 128 + signal.SIGPIPE  # what a shell reports of a program that wrote to a closed pipe


class Terminated(KeyboardInterrupt):
    """SIGTERM: the same way out as Ctrl-C, so that scratch files are removed."""


def guarded(work: Callable[[], object]) -> None:
    """Do some work; whatever stops it that is no fault of this program is one sentence."""
    keep_freed_memory()
    with sentences():
        work()


@contextmanager
def sentences() -> Iterator[None]:
    """Around work: leaves with an exit code where it fails. What is unforeseen passes through, with its traceback."""
    _catch_termination()
    try:
        yield
        sys.stdout.flush()
    except DuplexError as error:
        _leave(str(error), error.exit_code)
    except Terminated:
        _leave("stopped; the same command takes it up again", 128 + signal.SIGTERM)
    except KeyboardInterrupt:
        _leave("stopped; the same command takes it up again", 128 + signal.SIGINT)
    except BrokenPipeError:  # whoever read has gone: nothing to say, and nothing to flush at the end
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(GONE_READER)
    except MemoryError:
        _leave("not enough memory; close other programs, or ask for less at once (a smaller batch_size)", 1)
    except RecursionError:
        _leave("the input is nested too deeply to be read", 1)
    except OSError as error:
        place = f"{error.filename}: " if error.filename is not None else ""
        _leave(f"{place}{reason(error)}; mend that and run the same command again", 1)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which need not be imported to be told
            raise
        _leave("the GPU's memory is full; ask for less at once (a smaller batch_size) or set device to cpu", 1)


def _leave(message: str, code: int) -> None:
    if os.environ.get(DEBUG):
        traceback.print_exc()
    with suppress(OSError):
        print(f"duplex: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _catch_termination() -> None:
    """Where nobody else listens to SIGTERM; only the main thread may."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def _terminated(_number: int, _frame: FrameType | None) -> None:
    raise Terminated
