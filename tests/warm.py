"""Import the modules of all commands, in the process from which `tests.subprocesses.Forked` forks."""

from duplex.encoders.vision_ops import ensure_torchvision

ensure_torchvision()

import open_clip  # noqa: E402, F401
