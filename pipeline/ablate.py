"""cd ablations && dvc repro ablate@static  ==  python pipeline/ablate.py row static"""

from duplex.system.entry import run_script


def work(*words: str) -> None:
    from duplex.config.params import load_params
    from duplex.project import ablate

    match words:
        case ["plan"]:
            ablate.plan(load_params())
        case ["inputs", dataset]:
            ablate.write_inputs(load_params(), dataset)
        case ["row", name]:
            ablate.run(load_params(), name)
        case _:
            ablate.tabulate(load_params())


if __name__ == "__main__":
    run_script("plan | inputs DATASET | row NAME | table", work)
