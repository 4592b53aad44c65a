"""dvc repro extract@shapes  ==  python pipeline/extract.py shapes"""

from duplex.cli import arguments, guarded


def work(dataset: str) -> None:
    from duplex.params import load_params
    from duplex.stages.extract import extract

    print("\n".join(extract(load_params(), dataset).lines()))


if __name__ == "__main__":
    (dataset,) = arguments("DATASET")
    guarded(lambda: work(dataset))
