"""dvc repro views@shapes  ==  python pipeline/views.py shapes"""

from duplex.cli import arguments, guarded


def work(dataset: str) -> None:
    from duplex.params import load_params
    from duplex.stages.extract import extract_views

    report = extract_views(load_params(), dataset)
    print("no views are asked for" if report is None else "\n".join(report.lines()))


if __name__ == "__main__":
    (dataset,) = arguments("DATASET")
    guarded(lambda: work(dataset))
