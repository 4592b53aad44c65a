"""dvc repro report  ==  python pipeline/report.py"""

from duplex.cli import arguments, guarded


def work() -> None:
    from duplex.params import load_params
    from duplex.stages import report

    report.run(load_params())


if __name__ == "__main__":
    arguments("")
    guarded(work)
