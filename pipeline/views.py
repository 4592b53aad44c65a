"""dvc repro views@shapes  ==  python pipeline/views.py shapes"""

from duplex.system.script import run_script


def work(dataset: str) -> None:
    from duplex.config.params import load_params
    from duplex.stages.extract import extract_views

    report = extract_views(load_params(), dataset)
    print("params.yaml sets no views" if report is None else "\n".join(report.lines()))


if __name__ == "__main__":
    run_script("DATASET", work)
