"""Small projects of drawn pictures that have run the pipeline's stages, for tests that look at what those leave."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from duplex.config.artifacts import ArtifactPaths
from duplex.config.params import Params, load_params
from duplex.data.shapes import render_pictures, shapes_manifest
from duplex.stages import evaluate, train
from duplex.stages.extract import extract
from duplex.stages.inputs import Loaded
from duplex.stages.prepare import prepare
from duplex.training import loop
from tests.subprocesses import ROOT

SHIPPED = ROOT / "params.yaml"
METHODS = ("clip", "duplex", "duplex_open")


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def draw_project(
    folder: Path,
    methods: Sequence[str] = METHODS,
    seeds: Sequence[int] = (0,),
    *,
    scale: float = 0.06,
    device: str = "cpu",
    changes: Callable[[dict[str, Any]], None] = lambda record: None,
    **training: object,
) -> None:
    """Pictures, their table, and a params.yaml with a data set `own` of them, to be used from anywhere; `changes` may
    say more of params.yaml, `training` of how `own` is trained."""
    manifest = shapes_manifest(scale=scale)
    render_pictures(manifest, folder / "pictures")
    manifest.to_csv(folder / "pictures.csv", index=False)
    record = YAML(typ="safe").load(SHIPPED.read_text())
    record["run"] = {"datasets": ["own"], "methods": list(methods), "seeds": list(seeds)}
    record["device"], record["evaluation"]["bootstrap"] = device, 20
    record["datasets"]["own"] = {
        "source": {"kind": "table", "root": str(folder / "pictures"), "table": str(folder / "pictures.csv")},
        "encoder": {"name": "tiny"},
        "training": {"learning_rate": 0.001, "batch_size": 64, "epochs": 2, **training},
    }
    changes(record)
    with (folder / "params.yaml").open("w") as file:
        YAML().dump(record, file)


def make_project(
    folder: Path, seeds: Sequence[int], methods: Sequence[str] = METHODS, device: str = "cpu", epochs: int = 2
) -> Params:
    """`methods` trained on the data set `own` and evaluated."""

    def beside(record: dict[str, Any]) -> None:
        """Paths of the folder in which the stages run, as users write them."""
        record["datasets"]["own"]["source"] |= {"root": "pictures", "table": "pictures.csv"}

    draw_project(folder, methods, seeds, device=device, epochs=epochs, changes=beside)
    with inside(folder):
        params, paths, load = load_params(), ArtifactPaths(), Loaded()
        prepare(params, "own", paths)
        extract(params, "own", paths, num_workers=0)
        for method in methods:
            for seed in seeds:
                train.run(params, "own", method, seed, paths, load=load)
                evaluate.run(params, "own", method, seed, paths, load=load)
    return params


def interrupt(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Stop training once, as its epoch `number` from now begins. Holds the numbers of those that began."""
    epoch, begun = loop._epoch, list[int]()

    def counted(*given: Any) -> Any:
        begun.append(len(begun) + 1)
        if len(begun) == number:
            raise KeyboardInterrupt
        return epoch(*given)

    monkeypatch.setattr(loop, "_epoch", counted)
    return begun
