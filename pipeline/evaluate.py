"""dvc repro evaluate@shapes-duplex-0  ==  python pipeline/evaluate.py shapes duplex 0"""

from duplex.system.entry import run_script


def work(dataset: str, method: str, seed: str) -> None:
    from duplex.stages import evaluate
    from duplex.stages.planned import load_planned

    evaluate.run(load_planned(dataset, "evaluate", method=method), dataset, method, int(seed))


if __name__ == "__main__":
    run_script("DATASET METHOD SEED", work)
