"""dvc repro train@shapes-duplex-0  ==  python pipeline/train.py shapes duplex 0"""

from duplex.cli import arguments, guarded


def work(dataset: str, method: str, seed: str) -> None:
    from duplex.params import load_params
    from duplex.stages import train

    train.run(load_params(), dataset, method, int(seed))


if __name__ == "__main__":
    words = arguments("DATASET METHOD SEED")
    guarded(lambda: work(*words))
