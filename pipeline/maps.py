"""dvc repro maps@shapes  ==  python pipeline/maps.py shapes"""

import sys

from duplex.cli import guarded
from duplex.params import load_params
from duplex.stages import maps

if __name__ == "__main__":
    guarded(lambda: maps.run(load_params(), sys.argv[1]))
