"""dvc repro evaluate@shapes-duplex-0  ==  python pipeline/evaluate.py shapes duplex 0"""

from duplex.system.entry import run_script


def work(dataset: str, method: str, seed: str) -> None:
    from duplex.project.evaluate import evaluate_stage
    from duplex.project.plan import planned_run

    evaluate_stage(planned_run(dataset, method, seed, "evaluate"))


if __name__ == "__main__":
    run_script(work)
