"""dvc repro maps@shapes  ==  python pipeline/maps.py shapes"""

from duplex.cli import arguments, guarded


def work(dataset: str) -> None:
    from duplex.params import load_params
    from duplex.stages import maps

    maps.run(load_params(), dataset)


if __name__ == "__main__":
    (dataset,) = arguments("DATASET")
    guarded(lambda: work(dataset))
