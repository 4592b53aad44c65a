"""Parts of the report that need images, a trained run or t-SNE maps; a missing file becomes a note in the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.data.manifest import read_manifest
from duplex.errors import DuplexError
from duplex.report.blocks import Block, Note, ReportPart
from duplex.report.figures import map_figures
from duplex.report.predictions import predicted_parts
from duplex.report.prototype_retrieval import RetrievedTexts, prototype_blocks, retrieve_texts
from duplex.report.results import read_predictions, read_tsne_maps
from duplex.report.swaps import swap_blocks
from duplex.report.thumbnails import missing_images_note, thumbnails_under
from duplex.stages.featured_run import load_featured_run
from duplex.stages.inventory import featured_run


@dataclass(frozen=True)
class ImageParts:
    """The report's parts on one data set that need images or t-SNE maps, and the numbers in them as JSON records."""

    parts: list[ReportPart]
    numbers: dict[str, object]  # file name -> JSON record
    texts: RetrievedTexts = field(default_factory=RetrievedTexts)


def image_parts(params: Params, dataset: str, paths: ArtifactPaths) -> ImageParts:
    """Build a data set's report parts with example answers, errors, nearest images and t-SNE maps, from one run."""
    chosen = featured_run(params, dataset, paths)
    files = paths.run(dataset, *chosen)
    root = params.dataset(dataset).source.root
    manifest = paths.manifest(dataset)
    if not manifest.exists():
        note = Note(f"{manifest} does not exist.", f"dvc repro prepare@{dataset}")
        return ImageParts([ReportPart("Examples", [note])], {})
    missing = missing_images_note(root, read_manifest(manifest)["image"].tolist(), dataset)
    retrieved = _retrieved(params, dataset, chosen, paths, missing)
    predictions = read_predictions(files.predictions)
    parts = [ReportPart("Examples", [Note(f"{files.predictions} does not exist.", "dvc repro")])]
    if predictions is not None:
        notes = [Note(f"Everything below is from {chosen[0]}, seed {chosen[1]}."), *missing]
        source, thumbnails = files.predictions.as_posix(), thumbnails_under(root)
        parts = predicted_parts(predictions, source, thumbnails, notes, retrieved.texts)
    return ImageParts([*parts, *retrieved.parts, _maps(dataset, paths.maps(dataset))], retrieved.numbers)


def _retrieved(
    params: Params, dataset: str, chosen: tuple[str, int], paths: ArtifactPaths, missing: list[Block]
) -> ImageParts:
    """Build the report's parts with images nearest to prototypes; a note if files or the text tower are missing."""
    name = f"retrieval-{dataset}.json"
    try:
        context = load_featured_run(params, dataset, *chosen, paths).retrieval_context()
    except DuplexError as error:
        return ImageParts([ReportPart("Images nearest to prototypes", [Note(f"Not available: {error}")])], {})
    file = (paths.report / name).as_posix()
    prototypes, precisions = prototype_blocks(context, file)
    swaps, swapped = swap_blocks(context, file)
    texts = retrieve_texts(context, file)
    parts = [
        ReportPart("Images nearest to prototypes", [*missing, *prototypes]),
        ReportPart("Swapped states and objects", [*missing, *swaps]),
    ]
    return ImageParts(parts, {name: {**precisions, **swapped, **texts.numbers}}, texts)


def _maps(dataset: str, path: Path) -> ReportPart:
    table = read_tsne_maps(path)
    groups = (("prototypes", "before", "after"), ("semantic", "visual", "combined"))
    figures = [] if table is None else [figure for names in groups for figure in map_figures(table, dataset, names)]
    if table is not None and not figures:
        return ReportPart("Maps", [Note("No method of `run:` has visual prototypes to map.")])
    return ReportPart("Maps", figures or [Note("The maps have not been drawn.", f"dvc repro maps@{dataset}")])
