"""dvc repro evaluate@shapes-duplex-0  ==  python pipeline/evaluate.py shapes duplex 0"""

import sys

from duplex.cli import guarded
from duplex.params import load_params
from duplex.stages import evaluate

if __name__ == "__main__":
    guarded(lambda: evaluate.run(load_params(), sys.argv[1], sys.argv[2], int(sys.argv[3])))
