"""dvc repro extract@shapes  ==  python pipeline/extract.py shapes"""

from duplex.system.entry import run_script


def work(dataset: str) -> None:
    from duplex.project.stages import extract
    from duplex.project.stamps import load_planned

    print("\n".join(extract(load_planned(dataset, "extract"), dataset).lines()))


if __name__ == "__main__":
    run_script(work)
