"""dvc repro ablations/dvc.yaml:ablate@static  ==  python pipeline/ablate.py row static"""

import sys

from duplex.cli import guarded
from duplex.params import load_params
from duplex.stages import ablate

if __name__ == "__main__":
    match sys.argv[1:]:
        case ["inputs", dataset]:
            guarded(lambda: ablate.note_inputs(load_params(), dataset))
        case ["row", name]:
            guarded(lambda: ablate.run(load_params(), name))
        case ["table"]:
            guarded(lambda: ablate.tabulate(load_params()))
        case _:
            sys.exit("usage: ablate.py inputs DATASET | row NAME | table")
