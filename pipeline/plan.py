"""dvc repro plan  ==  python pipeline/plan.py"""

from duplex.system.entry import run_script


def work() -> None:
    from duplex.config.params import load_params
    from duplex.project.plan import write_plan

    write_plan(load_params())


if __name__ == "__main__":
    run_script(work)
