"""dvc repro prepare@shapes  ==  python pipeline/prepare.py shapes"""

from duplex.system.entry import run_script


def work(dataset: str) -> None:
    from duplex.project.plan import planned_data
    from duplex.project.prepare import prepare

    prepare(planned_data(dataset, "prepare"))


if __name__ == "__main__":
    run_script(work)
