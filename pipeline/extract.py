"""dvc repro extract@shapes  ==  python pipeline/extract.py shapes"""

from duplex.system.entry import run_script


def work(dataset: str) -> None:
    from duplex.project.stages import extract
    from duplex.project.stamps import planned_params

    print("\n".join(extract(planned_params(dataset, "extract"), dataset).lines()))


if __name__ == "__main__":
    run_script(work)
