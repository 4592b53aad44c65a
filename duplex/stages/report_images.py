"""The report's parts that need pictures, a network or maps; each says what is missing instead of failing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from duplex.config.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.data.manifest import read_manifest
from duplex.errors import DuplexError
from duplex.report.blocks import Block, Note, Part
from duplex.report.prototypes import embed
from duplex.report.qualitative import absence, look_under, predicted_parts
from duplex.report.results import read_maps, read_predictions
from duplex.report.retrieved import prototype_blocks
from duplex.report.scatter import map_figures
from duplex.report.swaps import swap_blocks
from duplex.report.texts import Texts, texts_of
from duplex.stages.featured_run import load_shown
from duplex.stages.inventory import shown_run


@dataclass(frozen=True)
class Pictured:
    parts: list[Part]
    numbers: dict[str, object]  # file name -> what it holds, for the page's tables to cite
    texts: Texts = field(default_factory=Texts)


def pictured(params: Params, dataset: str, paths: ArtifactPaths) -> Pictured:
    """Examples, errors, retrieval, swapping and maps of the shown run (`inventory.shown_run`)."""
    chosen = shown_run(params, dataset, paths)
    files = paths.run(dataset, *chosen)
    root = params.dataset(dataset).source.root
    manifest = paths.manifest(dataset)
    if not manifest.exists():
        return Pictured([Part("Examples", [Note(f"{manifest} does not exist.", f"dvc repro prepare@{dataset}")])], {})
    missing = absence(root, read_manifest(manifest)["image"].tolist(), dataset)
    retrieved = _retrieved(params, dataset, chosen, paths, missing)
    predictions = read_predictions(files.predictions)
    parts = []
    if predictions is not None:
        said = Note(f"All of this is {chosen[0]}, seed {chosen[1]}.")
        source, look = files.predictions.as_posix(), look_under(root)
        parts = predicted_parts(predictions, source, look, [said, *missing], retrieved.texts)
    else:
        parts = [Part("Examples", [Note(f"{files.predictions} does not exist.", "dvc repro")])]
    return Pictured([*parts, *retrieved.parts, _maps(dataset, paths.maps(dataset))], retrieved.numbers)


def _retrieved(
    params: Params, dataset: str, chosen: tuple[str, int], paths: ArtifactPaths, missing: list[Block]
) -> Pictured:
    """Needs the checkpoint, the features and the encoder's text tower."""
    name = f"retrieval-{dataset}.json"
    try:
        viewing = load_shown(params, dataset, *chosen, paths).viewing()
    except DuplexError as error:
        return Pictured([Part("What the prototypes hold", [Note(f"Not shown: {error}")])], {})
    embedded, file = embed(viewing.method, viewing.test), (paths.report / name).as_posix()
    prototypes, precisions = prototype_blocks(viewing, embedded, file)
    swaps, swapped = swap_blocks(viewing, embedded, file)
    texts = texts_of(viewing, embedded, file)
    parts = [
        Part("What the prototypes hold", [*missing, *prototypes]),
        Part("Swapped states and objects", [*missing, *swaps]),
    ]
    return Pictured(parts, {name: {**precisions, **swapped, **texts.numbers}}, texts)


def _maps(dataset: str, path: Path) -> Part:
    table = read_maps(path)
    groups = (("prototypes", "before", "after"), ("semantic", "visual", "combined"))
    figures = [] if table is None else [figure for which in groups for figure in map_figures(table, dataset, which)]
    if table is not None and not figures:
        return Part("Maps", [Note("No method of this run has prototypes to map.")])
    return Part("Maps", figures or [Note("The maps have not been made.", f"dvc repro maps@{dataset}")])
