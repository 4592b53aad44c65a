"""dvc repro inventory@shapes  ==  python pipeline/inventory.py shapes"""

import sys

from duplex.cli import guarded
from duplex.params import load_params
from duplex.stages import inventory

if __name__ == "__main__":
    guarded(lambda: inventory.run(load_params(), sys.argv[1]))
