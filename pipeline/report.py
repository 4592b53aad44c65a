"""dvc repro report  ==  python pipeline/report.py"""

from duplex.system.entry import run_script


def work() -> None:
    from duplex.config.params import load_params
    from duplex.project.report import report_stage

    report_stage(load_params())


if __name__ == "__main__":
    run_script(work)
