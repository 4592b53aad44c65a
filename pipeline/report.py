"""dvc repro report  ==  python pipeline/report.py"""

from duplex.cli import guarded
from duplex.params import load_params
from duplex.stages import report

if __name__ == "__main__":
    guarded(lambda: report.run(load_params()))
