"""dvc repro inventory@shapes  ==  python pipeline/inventory.py shapes"""

from duplex.system.entry import run_script


def work(dataset: str) -> None:
    from duplex.project.inventory import inventory_stage
    from duplex.project.plan import planned_data

    inventory_stage(planned_data(dataset, "inventory"))


if __name__ == "__main__":
    run_script(work)
