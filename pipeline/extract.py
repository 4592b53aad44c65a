"""dvc repro extract@shapes  ==  python pipeline/extract.py shapes"""

from duplex.system.entry import run_script


def work(dataset: str) -> None:
    from duplex.project.extract import extract
    from duplex.project.plan import planned_data

    print("\n".join(extract(planned_data(dataset, "extract")).lines()))


if __name__ == "__main__":
    run_script(work)
