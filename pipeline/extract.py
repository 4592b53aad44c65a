"""dvc repro extract@shapes  ==  python pipeline/extract.py shapes"""

import sys

from duplex.cli import guarded
from duplex.params import load_params
from duplex.stages.extract import extract

if __name__ == "__main__":
    guarded(lambda: extract(load_params(), sys.argv[1]))
