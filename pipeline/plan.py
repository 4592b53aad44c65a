"""dvc repro plan  ==  python pipeline/plan.py"""

from duplex.cli import arguments, guarded
from duplex.params import load_params
from duplex.stages import plan

if __name__ == "__main__":
    arguments("")
    guarded(lambda: plan.run(load_params()))
