"""dvc repro evaluate@shapes-duplex-0  ==  python pipeline/evaluate.py shapes duplex 0"""

from duplex.cli import arguments, guarded
from duplex.params import load_params
from duplex.stages import evaluate

if __name__ == "__main__":
    dataset, method, seed = arguments("DATASET METHOD SEED")
    guarded(lambda: evaluate.run(load_params(), dataset, method, int(seed)))
