"""How tests start Python: with the package under test, wherever they are run from."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
