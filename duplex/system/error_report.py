"""Report errors of commands and scripts as one line on stderr and an exit code.

`DUPLEX_DEBUG=1` adds the traceback. Exit codes: 0 success, 1 failure, 2 bad usage, 130 stopped by Ctrl-C, 143 stopped
by SIGTERM, 129 by SIGHUP (a closed terminal), 141 closed pipe.
"""

from __future__ import annotations

import atexit
import errno
import gc
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
from duplex.system.files import describe_os_error
from duplex.system.streams import open_closed_streams
from duplex.system.terminal import escape_unprintable

DEBUG = "DUPLEX_DEBUG"
BROKEN_PIPE_EXIT = 128 + signal.SIGPIPE  # as shells report it
NO_MEMORY = "not enough memory; close other programs, or use a smaller batch_size"
# Messages of torch on a CPU, and of the dynamic linker for a library that does not fit into the address space
OUT_OF_MEMORY = ("can't allocate memory", "failed to map segment", "cannot allocate memory")
STOPPED = "stopped; the same command resumes the work"


class Terminated(KeyboardInterrupt):
    """Raised when SIGTERM or SIGHUP is received; handled like Ctrl-C, so that scratch files are removed."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.number = number  # of the signal


def run_command(work: Callable[[], object]) -> None:
    """Call `work()`; for an error that a user can fix, print one line and exit with the error's exit code."""
    open_closed_streams()
    keep_freed_memory()
    atexit.register(gc.freeze)  # or the interpreter's last collection visits every object of torch: 0.4 s per command
    with report_errors():
        work()


@contextmanager
def report_errors() -> Iterator[None]:
    """For an error in the `with` block that a user can fix, print one line and exit; let other exceptions through."""
    _catch_signals()
    try:
        yield
        sys.stdout.flush()
    except DuplexError as error:
        _exit(str(error), error.exit_code)
    except Terminated as error:
        _exit(STOPPED, 128 + error.number)
    except KeyboardInterrupt:
        _exit(STOPPED, 128 + signal.SIGINT)
    except BrokenPipeError:  # the reader is gone: there is nothing to report, nor to flush at exit
        _discard_output()
        sys.exit(BROKEN_PIPE_EXIT)
    except MemoryError:
        _exit(NO_MEMORY, 1)
    except RecursionError:
        _exit("the input is nested too deeply to be read", 1)
    except OSError as error:
        _exit(_describe(error), 1)
    except (RuntimeError, ImportError) as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's: recognised without importing it
            _exit("the GPU's memory is full; use a smaller batch_size or set device to cpu", 1)
        if any(reason in str(error).lower() for reason in OUT_OF_MEMORY):
            _exit(NO_MEMORY, 1)
        if str(error).startswith("Symlink loop from "):  # pathlib's before Python 3.13
            _exit(f"{str(error).removeprefix('Symlink loop from ')} is a link to itself; remove it", 1)
        raise


def _describe(error: OSError) -> str:
    if error.errno == errno.EBADF and error.filename is None:
        _discard_output()
        return "stdout is closed, so the output is lost; run the command again with stdout open"
    return f"{describe_os_error(error)}; fix that and run the same command again"


def _discard_output() -> None:
    """Send the rest of stdout's buffer to /dev/null; Python would try to write it at exit, and report an error."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit(message: str, code: int) -> None:
    if os.environ.get(DEBUG):
        traceback.print_exc()
    with suppress(OSError):
        print(f"duplex: {escape_unprintable(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(code)


def _catch_signals() -> None:
    """Make SIGTERM and SIGHUP raise `Terminated`, unless the process handles them or, under `nohup`, ignores them."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _raise_terminated)


def _raise_terminated(number: int, _frame: FrameType | None) -> None:
    raise Terminated(number)
