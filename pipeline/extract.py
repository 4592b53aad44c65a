"""dvc repro extract@shapes  ==  python pipeline/extract.py shapes"""

from duplex.cli import arguments, guarded


def work(dataset: str) -> None:
    from duplex.params import load_params
    from duplex.stages.extract import extract, extract_views

    params = load_params()
    for report in (extract(params, dataset), extract_views(params, dataset)):
        if report is not None:
            print("\n".join(report.lines()))


if __name__ == "__main__":
    (dataset,) = arguments("DATASET")
    guarded(lambda: work(dataset))
