"""dvc repro prepare@shapes  ==  python pipeline/prepare.py shapes"""

from duplex.cli import arguments, guarded
from duplex.params import load_params
from duplex.stages.prepare import prepare

if __name__ == "__main__":
    (dataset,) = arguments("DATASET")
    guarded(lambda: prepare(load_params(), dataset))
