"""dvc repro inventory@shapes  ==  python pipeline/inventory.py shapes"""

from duplex.cli import arguments, guarded
from duplex.params import load_params
from duplex.stages import inventory

if __name__ == "__main__":
    (dataset,) = arguments("DATASET")
    guarded(lambda: inventory.run(load_params(), dataset))
