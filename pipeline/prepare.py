"""dvc repro prepare@shapes  ==  python pipeline/prepare.py shapes"""

import sys

from duplex.cli import guarded
from duplex.params import load_params
from duplex.stages.prepare import prepare

if __name__ == "__main__":
    guarded(lambda: prepare(load_params(), sys.argv[1]))
