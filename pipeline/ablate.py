"""dvc repro ablations/dvc.yaml:ablate@static  ==  python pipeline/ablate.py static; without a name: the table."""

import sys

from duplex.cli import guarded
from duplex.params import load_params
from duplex.stages import ablate

if __name__ == "__main__":
    if len(sys.argv) > 1:
        guarded(lambda: ablate.run(load_params(), sys.argv[1]))
    else:
        guarded(lambda: ablate.tabulate(load_params()))
