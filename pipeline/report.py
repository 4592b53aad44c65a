"""dvc repro report  ==  python pipeline/report.py"""

from duplex.cli import arguments, guarded
from duplex.params import load_params
from duplex.stages import report

if __name__ == "__main__":
    arguments("")
    guarded(lambda: report.run(load_params()))
