"""Import the modules of all commands, in the process from which `tests.subprocesses.Forked` forks."""

from duplex.encoders.vision_ops import ensure_torchvision

ensure_torchvision()

import open_clip  # noqa: E402, F401

import duplex.cli  # noqa: E402
import duplex.encoders.clip  # noqa: E402
import duplex.features.extraction  # noqa: E402
import duplex.recognition.recognizer  # noqa: E402
import duplex.report.page  # noqa: E402
import duplex.stages.evaluate  # noqa: E402
import duplex.stages.train  # noqa: E402, F401
