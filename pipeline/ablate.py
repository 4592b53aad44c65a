"""cd ablations && dvc repro ablate@static  ==  python pipeline/ablate.py row static"""

from duplex.cli import arguments, guarded
from duplex.params import load_params
from duplex.stages import ablate

if __name__ == "__main__":
    match arguments("plan | inputs DATASET | row NAME | table"):
        case ["plan"]:
            guarded(lambda: ablate.plan(load_params()))
        case ["inputs", dataset]:
            guarded(lambda: ablate.note_inputs(load_params(), dataset))
        case ["row", name]:
            guarded(lambda: ablate.run(load_params(), name))
        case _:
            guarded(lambda: ablate.tabulate(load_params()))
