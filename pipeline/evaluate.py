"""dvc repro evaluate@shapes-duplex-0  ==  python pipeline/evaluate.py shapes duplex 0"""

from duplex.system.entry import run_script


def work(dataset: str, method: str, seed: str) -> None:
    from duplex.project import stages
    from duplex.project.stamps import planned_params

    stages.evaluate_stage(planned_params(dataset, "evaluate", method=method), dataset, method, int(seed))


if __name__ == "__main__":
    run_script(work)
