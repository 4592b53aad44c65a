"""The pipeline's stages for one data set or run: prepare (manifest, labels, statistics), extract, and evaluate."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from duplex.artifacts import ArtifactPaths
from duplex.config.params import EncoderParams, Params
from duplex.data.download import BENCHMARKS
from duplex.data.images import ImageTree
from duplex.data.sources import draw_missing_images, load_source
from duplex.data.tables import count_dataset, read_manifest, read_table, write_manifest
from duplex.encoders.base import Encoder, load_encoder, resolve_device
from duplex.errors import UsageError
from duplex.features.extract import ExtractionReport, ExtractionSettings, bad_images
from duplex.features.extract import extract as encode
from duplex.features.file import DATASETS, IMPORTED, open_cache, read_features, require_cache_file
from duplex.features.imported import equal_feature_keys, import_features
from duplex.features.inspect import verify
from duplex.labels import SPLITS
from duplex.methods.base import UnsuitableMethod
from duplex.methods.registry import find_method
from duplex.options import SplitOptions
from duplex.project import stamps
from duplex.project.stream import AdaptableRun, evaluate_stream
from duplex.system.files import sha256, write_json, write_text
from duplex.training.checkpoint import load_checkpoint, read_checkpoint_header
from duplex.training.inputs import InputRequest, LoadInputs, load_inputs
from duplex.training.run import calibration_for, evaluate_world, frequency_accuracies, reproducible, term_metrics


def prepare(params: Params, dataset: str, paths: ArtifactPaths = ArtifactPaths()) -> None:
    """Write a data set's manifest, labels and statistics; prints how many rows of the source were left out, and why."""
    source, stamp = params.dataset(dataset).source, stamps.stamp(params, dataset, "prepare", paths)
    data = load_source(source, equal_feature_keys(params.dataset(dataset).features, source))
    if not data.made_split and source.split != SplitOptions():
        raise UsageError(f"{source.table or source.root} has a split, so none is made; remove `split:` from `source:`")
    for note, count in data.notes.items():
        print(f"{dataset}: {note}: {count:,}", file=sys.stderr)
    draw_missing_images(source, data.manifest)
    write_manifest(data.manifest, paths.manifest(dataset))
    data.labels.save(paths.labels(dataset))
    write_json(paths.statistics(dataset), count_dataset(data.labels, data.manifest).to_dict())
    stamps.write(paths.stamp(dataset, "prepare"), stamp)


def ensure_prepared(params: Params, dataset: str, paths: ArtifactPaths = ArtifactPaths()) -> None:
    """Prepare a data set if its manifest is missing or outdated, with a note on stderr."""
    manifest, found = paths.manifest(dataset), f"{paths.manifest(dataset)} does not exist"
    if manifest.exists():
        stamp = stamps.stamp(params, dataset, "prepare", paths)
        found = stamps.difference(paths.stamp(dataset, "prepare"), stamp)
    if found in ("", stamps.UNSTAMPED):
        return
    source = params.dataset(dataset).source
    if source.kind != "shapes" and not source.root.is_dir():
        require_images(dataset, source.root, [])
    print(f"preparing {dataset} first: {found}", file=sys.stderr)
    prepare(params, dataset, paths)


def require_images(dataset: str, root: Path, images: Sequence[str]) -> None:
    """Raise `UsageError` if none of the images exists below `root`, `DuplexError` for a link that leads out of it."""
    tree = ImageTree(root) if root.is_dir() else None
    present = [] if tree is None else [tree.has(image) for image in images]  # a missing image gets a status
    if not any(present):
        raise UsageError(f"{root} has no images of the data set {dataset!r}; {images_remedy(dataset, root)}")


def images_remedy(dataset: str, root: Path) -> str:
    """What to do if a data set's images are missing from the folder `root`, as the end of an error message."""
    benchmark = next((name for name in (dataset, root.name) if name in BENCHMARKS), None)
    download = "copy them there" if benchmark is None else f"run `duplex data download {benchmark}`"
    return f"{download}, or correct `root` of {dataset} in params.yaml or datasets/{dataset}.yaml"


def extract(
    params: Params,
    dataset: str,
    paths: ArtifactPaths = ArtifactPaths(),
    *,
    out: Path | None = None,
    shard: tuple[int, int] | None = None,
    fresh: bool = False,
) -> ExtractionReport:
    """Encode images, or import features, into `out` or the data set's cache, with the settings of params.yaml."""
    features = params.dataset(dataset).features
    encoder = params.dataset(dataset).encoder
    place = out or paths.features(dataset)
    stamp = stamps.stamp(params, dataset, "extract", paths) if out is None and shard is None else None
    if features is not None:
        if shard is not None:
            raise UsageError(f"{dataset} has imported features, {features}, so nothing is encoded; leave out --shard")
        report = _import_features(params, dataset, paths, features, place)
    else:
        images, settings = extraction_inputs(params, dataset, paths)
        if encoder.name == IMPORTED:
            raise UsageError(
                f"the data set {dataset!r} has no known encoder, so its images cannot be encoded; set `features` in "
                f"params.yaml or datasets/{dataset}.yaml to the file of imported features"
            )
        tower = _load_image_encoder(params, encoder)
        reuse = [paths.features(name) for name in params.datasets] if shard is None else []
        report = encode(images, place, tower, settings, shard=shard, reuse=reuse, fresh=fresh)
    write_extraction_summary(report.path)
    if stamp is not None:
        stamps.write(paths.stamp(dataset, "extract"), stamp)
    return report


def _import_features(params: Params, dataset: str, paths: ArtifactPaths, features: Path, out: Path) -> ExtractionReport:
    stamps.require_data(params, dataset, paths, ("prepare",))
    began = time.monotonic()
    manifest = paths.manifest(dataset)
    images = read_manifest(manifest)["image"].tolist()
    source = params.dataset(dataset).source
    listed = list(dict.fromkeys(read_table(source.table)["image"])) if source.table else None  # the features' rows
    import_features(features, len(images), sha256(manifest), out, images, params.extraction.max_bad, listed)
    statuses = read_features(out).statuses
    return ExtractionReport(out, len(images), 0, time.monotonic() - began, bad_images(statuses, images))


def verify_cache(params: Params, path: Path, dataset: str | None, *, sample: int, seed: int) -> dict[str, Any]:
    """Encode a sample of a cache's images again; returns their number and the lowest cosine with cached features."""
    paths = ArtifactPaths()
    places = {paths.features(name).resolve(): name for name in params.datasets}
    require_cache_file(path)
    dataset = dataset or places.get(path.resolve())
    if dataset is None:
        raise UsageError(f"{path} is not the cache of a data set in params.yaml; give the data set with --dataset")
    images, settings = extraction_inputs(params, dataset, paths)
    encoder = _load_image_encoder(params, params.dataset(dataset).encoder)
    return verify(path, encoder, images, settings.root, settings.manifest_sha256, sample=sample, seed=seed)


def extraction_inputs(params: Params, dataset: str, paths: ArtifactPaths) -> tuple[list[str], ExtractionSettings]:
    """A data set's image paths, and settings for encoding them; missing images of the set `shapes` are drawn first."""
    entry = params.dataset(dataset)
    settings = params.extraction
    manifest_path = paths.manifest(dataset)
    stamps.require_data(params, dataset, paths, ("prepare",))
    manifest = read_manifest(manifest_path)
    draw_missing_images(entry.source, manifest)
    images = manifest["image"].tolist()
    require_images(dataset, entry.source.root, images)
    return images, ExtractionSettings(
        root=entry.source.root,
        manifest_sha256=sha256(manifest_path),
        recorded_root=entry.source.recorded_root,
        batch_size=settings.batch_size,
        num_workers=settings.num_workers,
        tokens=settings.tokens,
        block_inputs=params.block_inputs(dataset),
        pixels=params.pixels(dataset),
        max_bad=settings.max_bad,
    )


def write_extraction_summary(cache: Path) -> None:
    """Write extraction.json (size, unreadable images) beside a data set's own cache, and delete its outdated stamp."""
    paths, dataset = ArtifactPaths(cache.parent.parent), cache.parent.name
    if cache != paths.features(dataset) or not paths.manifest(dataset).exists():
        return
    paths.stamp(dataset, "extract").unlink(missing_ok=True)
    with open_cache(cache) as file:
        statuses, size = file["status"][...], sum(file[name].nbytes for name in DATASETS if name in file)
    bad = bad_images(statuses, read_manifest(paths.manifest(dataset))["image"].tolist())
    record = {"rows": len(statuses), "bytes": size, "bad": len(bad), "bad_images": [asdict(image) for image in bad]}
    write_text(paths.extraction(dataset), json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def _load_image_encoder(params: Params, entry: EncoderParams) -> Encoder:
    return load_encoder(entry.name, entry.weights, towers="image", device=params.device, precision=entry.precision)


def evaluate_stage(
    params: Params,
    dataset: str,
    method: str,
    seed: int,
    paths: ArtifactPaths = ArtifactPaths(),
    load: LoadInputs = load_inputs,
) -> dict[str, Any]:
    """Evaluate a trained run on the test split in each world that params.yaml lists; writes and returns metrics."""
    out = paths.run(dataset, method, seed)
    training, settings = params.training(dataset, method), params.evaluation
    checkpoint = read_checkpoint_header(out.checkpoint)
    record = checkpoint.record
    stamps.require_data(params, dataset, paths)
    stamps.require_current_run(params, dataset, method, seed, paths)
    stamp = stamps.stamp(params, dataset, "evaluate", paths, method, seed)
    device = torch.device(resolve_device(params.device))
    needs = find_method(record.kind).needs(record.options)
    with reproducible(training.threads):
        inputs = load(params, dataset, paths, InputRequest(needs, training.precision, record.finetune, training.memory))
        for split in ["test"] if settings.stream is None else SPLITS:
            inputs.examples[split] = inputs.examples[split].to(device)
        model = load_checkpoint(checkpoint, inputs.context(), inputs.encoder).to(device)
        start = time.perf_counter()
        results = {
            world: evaluate_world(model, inputs, settings, world, calibration_for(record, world, out.checkpoint))
            for world in params.worlds(method)
        }
        timing = {"test_seconds": time.perf_counter() - start, "images": len(inputs.examples["test"])}
        metrics: dict[str, Any] = {world: result.metrics for world, result in results.items()}
        if "closed" in results:
            metrics["groups"] = frequency_accuracies(results["closed"], inputs)
            metrics |= {"terms": settings.terms, **(term_metrics(model, inputs) if settings.terms else {})}
        predictions = [result.predictions for result in results.values()]
        if settings.stream is not None:
            stream = AdaptableRun(model, inputs, settings, settings.stream)
            try:
                metrics["stream"], streamed = evaluate_stream(stream, results, record.calibration or {})
                predictions += streamed
            except UnsuitableMethod as error:
                print(f"duplex: {dataset} {method} seed {seed} is not adapted to the stream: {error}", file=sys.stderr)
    metrics["bootstrap"] = settings.bootstrap
    if record.val_auc_all is not None:
        metrics["val_auc_all"] = 100 * record.val_auc_all
    metrics |= {f"recipe_{place}": dict(recipe) for place, recipe in enumerate(record.recipes)}
    metrics |= {"val_auc": 100 * record.val_auc, "epoch": record.epoch, "bad_images": inputs.bad}
    write_json(out.metrics, metrics)
    write_json(out.evaluation_timing, timing)
    _write(pd.concat([result.curve for result in results.values()]), out.curve)
    _write(pd.concat(predictions), out.predictions)
    stamps.write(out.stamp("evaluate"), stamp, [out.metrics, out.curve, out.predictions])
    return metrics


def _write(table: pd.DataFrame, path: Path) -> None:
    write_text(path, table.to_csv(index=False, lineterminator="\n", float_format="%.9g"))
