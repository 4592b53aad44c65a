"""dvc repro maps@shapes  ==  python pipeline/maps.py shapes"""

from duplex.system.entry import run_script


def work(dataset: str) -> None:
    from duplex.project.maps import maps_stage
    from duplex.project.plan import planned_data

    maps_stage(planned_data(dataset, "maps"))


if __name__ == "__main__":
    run_script(work)
