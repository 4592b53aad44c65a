"""dvc repro maps@shapes  ==  python pipeline/maps.py shapes"""

from duplex.cli import arguments, guarded
from duplex.params import load_params
from duplex.stages import maps

if __name__ == "__main__":
    (dataset,) = arguments("DATASET")
    guarded(lambda: maps.run(load_params(), dataset))
