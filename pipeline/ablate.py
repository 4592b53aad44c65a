"""cd ablations && dvc repro ablate@static  ==  python pipeline/ablate.py row static"""

from duplex.cli import arguments, guarded


def work(*words: str) -> None:
    from duplex.params import load_params
    from duplex.stages import ablate

    match words:
        case ["plan"]:
            ablate.plan(load_params())
        case ["inputs", dataset]:
            ablate.note_inputs(load_params(), dataset)
        case ["row", name]:
            ablate.run(load_params(), name)
        case _:
            ablate.tabulate(load_params())


if __name__ == "__main__":
    words = arguments("plan | inputs DATASET | row NAME | table")
    guarded(lambda: work(*words))
