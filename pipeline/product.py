"""dvc repro product@shapes-dual_scen-0  ==  python pipeline/product.py shapes dual_scen 0"""

from duplex.system.entry import run_script


def work(dataset: str, method: str, seed: str) -> None:
    from duplex.project import stages
    from duplex.project.stamps import planned_params
    from duplex.project.train import train_stage

    params = planned_params(dataset, "train", "evaluate", method=method)
    train_stage(params, dataset, method, int(seed))
    stages.evaluate_stage(params, dataset, method, int(seed))


if __name__ == "__main__":
    run_script(work)
