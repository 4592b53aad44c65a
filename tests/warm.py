"""Import the modules of all commands, in the process from which `tests.subprocesses.Forked` forks."""

import duplex.encoders.open_clip  # noqa: F401
