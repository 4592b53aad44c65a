"""dvc repro plan  ==  python pipeline/plan.py"""

from duplex.cli import arguments, guarded


def work() -> None:
    from duplex.params import load_params
    from duplex.stages import plan

    plan.run(load_params())


if __name__ == "__main__":
    arguments("")
    guarded(work)
