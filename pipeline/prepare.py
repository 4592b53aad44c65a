"""dvc repro prepare@shapes  ==  python pipeline/prepare.py shapes"""

from duplex.system.entry import run_script


def work(dataset: str) -> None:
    from duplex.project.stages import prepare
    from duplex.project.stamps import planned_params

    prepare(planned_params(dataset, "prepare"), dataset)


if __name__ == "__main__":
    run_script(work)
