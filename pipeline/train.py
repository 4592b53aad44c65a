"""dvc repro train@shapes-duplex-0  ==  python pipeline/train.py shapes duplex 0"""

from duplex.system.entry import run_script


def work(dataset: str, method: str, seed: str) -> None:
    from duplex.project.stamps import planned_params
    from duplex.project.train import train_stage

    train_stage(planned_params(dataset, "train", method=method), dataset, method, int(seed))


if __name__ == "__main__":
    run_script(work)
