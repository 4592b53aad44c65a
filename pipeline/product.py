"""dvc repro product@shapes-dual_scen-0  ==  python pipeline/product.py shapes dual_scen 0"""

from duplex.system.entry import run_script


def work(dataset: str, method: str, seed: str) -> None:
    from duplex.project.evaluate import evaluate_stage
    from duplex.project.plan import planned_run
    from duplex.project.train import train_stage

    run = planned_run(dataset, method, seed, "train", "evaluate")
    train_stage(run)
    evaluate_stage(run)


if __name__ == "__main__":
    run_script(work)
