"""dvc repro extract@shapes  ==  python pipeline/extract.py shapes"""

from duplex.system.script import run_script


def work(dataset: str) -> None:
    from duplex.config.params import load_params
    from duplex.stages.extract import extract

    print("\n".join(extract(load_params(), dataset).lines()))


if __name__ == "__main__":
    run_script("DATASET", work)
