"""dvc repro maps@shapes  ==  python pipeline/maps.py shapes"""

from duplex.system.entry import run_script


def work(dataset: str) -> None:
    from duplex.config.params import load_params
    from duplex.project import report

    report.maps_stage(load_params(), dataset)


if __name__ == "__main__":
    run_script(work)
