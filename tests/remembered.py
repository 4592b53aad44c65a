"""What each command of a real process works out once, and tests many times: remembered for the whole test process."""

import functools
import importlib.metadata
import sys
from typing import Any

from duplex.encoders.libraries import open_clip
from duplex.system import entry, plugins
from duplex.training import logs


@functools.cache
def _entry_points(path: tuple[str, ...], chosen: tuple[tuple[str, str], ...]) -> Any:
    return importlib.metadata.entry_points(**dict(chosen))


def entry_points(**chosen: str) -> Any:
    """Those of the packages on the path, whose files are read once; each command would read them many times."""
    return _entry_points(tuple(sys.path), tuple(chosen.items()))


for module in (entry, logs, plugins):
    module.entry_points = entry_points  # type: ignore[attr-defined]
open_clip.SimpleTokenizer = functools.cache(open_clip.SimpleTokenizer)  # type: ignore[misc]
