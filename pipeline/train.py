"""dvc repro train@shapes-duplex-0  ==  python pipeline/train.py shapes duplex 0"""

from duplex.system.entry import run_script


def work(dataset: str, method: str, seed: str) -> None:
    from duplex.project.plan import planned_run
    from duplex.project.train import train_stage

    train_stage(planned_run(dataset, method, seed, "train"))


if __name__ == "__main__":
    run_script(work)
