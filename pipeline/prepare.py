"""dvc repro prepare@shapes  ==  python pipeline/prepare.py shapes"""

from duplex.cli import arguments, guarded


def work(dataset: str) -> None:
    from duplex.params import load_params
    from duplex.stages.prepare import prepare

    prepare(load_params(), dataset)


if __name__ == "__main__":
    (dataset,) = arguments("DATASET")
    guarded(lambda: work(dataset))
