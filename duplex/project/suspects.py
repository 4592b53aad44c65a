"""Rank images by how likely their labels are wrong, apply corrections, rank images to label next.

Labels are judged by margins: the score of an image's label minus that of the best other label. A
score is the image's cosine with the mean whitened feature of the label's images in the other folds
(random parts of the data). Near-copies, and images far from all others, are listed as well.

Unlabelled images are ranked in rounds, each with one image of every pair that a trained model
predicts; in a round, the model's least certain answers come first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params
from duplex.data.contents import file_digests, looks_from_texts, near_copies, read_digests
from duplex.data.images import ImageTree, thumbnail
from duplex.data.sources import detect_source, load_source, read_folder
from duplex.data.tables import complete_rows, read_manifest, read_table
from duplex.errors import UsageError
from duplex.evaluation.vectors import most_similar
from duplex.features.file import IMPORTED, ROOT, Features, read_features
from duplex.features.shared import encode_shared, find_cached_features, user_cache
from duplex.features.tokens import read_tokens
from duplex.labels import Ints, LabelSpace
from duplex.methods.gaussian import ClassStatistics, shared_whitening
from duplex.methods.layers import unit
from duplex.project.run import DATA_STAGES, ProjectData
from duplex.recognition.export import FIT, read_fit
from duplex.recognition.fit import SOURCE, fit_cache_folder
from duplex.recognition.recognizer import BATCH, Recognizer
from duplex.report import blocks
from duplex.report.blocks import Caption, Gallery, ReportPart, Strip, Strips, Thumb
from duplex.system.files import named_path, sha256, write_text

Floats = NDArray[np.float64]
FOLDS = 5
ADDED = 1.0  # mean variances added: with 1,280 dimensions the rarest directions are noise
NEAREST = 5  # images that an image's distance is the mean of
OUTLIERS = 24  # on the page
COPIES = "Pairs of images that were saved or scaled again: with two labels first, then in two splits."
UNLIKE = "The images farthest from all others: perhaps of something else, dark or blurred."
OLD = {"state": "old_state", "object": "old_object"}  # columns with a list's original labels


@dataclass(frozen=True)
class LabelledSource:
    """Labelled images: a data set of params.yaml, a folder, a table, or a model's images."""

    name: str
    root: Path  # folder that image paths start from
    table: pd.DataFrame  # image, state, object and, if the source has one, split
    params: Params | None = None  # of the project whose data set it is
    encoder: str = ""  # as options of `duplex fit` or `duplex data add`

    def features(self, files: Sequence[str]) -> Features:
        """Cached features in the table's order; `files`: sha256 of the images."""
        if self.params is not None:
            manifest = ArtifactPaths().manifest(self.name)
            expected = {"manifest": sha256(manifest), ROOT: self.params.dataset(self.name).source.recorded_root}
            return read_features(ArtifactPaths().features(self.name), expect=expected)
        found = find_cached_features(user_cache(), files)
        if found is None:
            raise UsageError(f"the images in {self.root} have not been encoded; run `duplex fit` on them first")
        if found.bad.any():
            example = self.table["image"][found.bad].iloc[0]
            left_out = f"are left out ({found.bad.sum():,}), such as {example}"
            print(f"duplex: new, changed or unreadable images {left_out}", file=sys.stderr)
        return found


def open_labelled(
    name: str,
    images: Path | None = None,
    params: Params | None = None,
    stages: Iterable[str] = DATA_STAGES,
) -> LabelledSource:
    """Open a data set (`stages` must be up to date), folder, table (of `images`) or model."""
    place = Path(name)
    encoder = ""
    if params is not None and (name in params.datasets or not place.exists()):
        entry = params.dataset(name)
        ProjectData(params, name).require(*stages)
        manifest = read_manifest(ArtifactPaths().manifest(name))
        chosen = entry.encoder
        encoder = _options(encoder=chosen.name, weights=chosen.weights, features=entry.features)
        return LabelledSource(name, entry.source.root, manifest, params, encoder)
    if (place / FIT).is_file():
        record = fit_cache_folder(named_path(place)) / SOURCE
        if not record.is_file():
            reason = f"{record}, which says where the images are, does not exist"
            raise UsageError(f"{reason}; give their folder instead of {name!r}")
        made = read_fit(place)["encoder"]
        encoder = _options(encoder=made["name"], weights=made.get("weights"))
        place, images = [each and Path(each) for each in json.loads(record.read_text(encoding="utf-8"))]
    source = detect_source(place.resolve(), None, images and images.resolve())
    if source.kind == "standard":
        table = load_source(source).manifest
    elif source.table is None:
        table = read_folder(source.root)[0]
    else:
        table = read_table(source.table).drop_duplicates()
    if (twice := table["image"].duplicated()).any():
        raise UsageError(f"{place} lists {table['image'][twice].iloc[0]!r} twice; keep one of these rows")
    return LabelledSource(Path(name).resolve().stem, source.root, table.reset_index(drop=True), encoder=encoder)


def _options(**values: Any) -> str:
    return "".join(f" --{key} {value}" for key, value in values.items() if value and value != IMPORTED)


@dataclass(frozen=True)
class LabelMargins:
    """For each image, its label's score minus that of the best other label, and this label."""

    margin: Floats  # [n]
    better: Ints  # [n] the best other class


def margins(features: NDArray[Any], labels: Ints, *, folds: int = FOLDS, seed: int = 0) -> LabelMargins:
    """Cross-validated margins: cosine with the label's mean minus the largest with another's."""
    if len(features) < 2 * folds:
        raise UsageError(f"{len(features)} images are too few to check labels; expected at least {2 * folds}")
    classes, label = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise UsageError("all images have the same label; expected at least two labels")
    scores = np.full((len(features), len(classes)), -np.inf)
    fold = np.random.default_rng(seed).permutation(len(features)) % folds
    for number in range(folds):
        out = np.flatnonzero(fold == number)
        rest = np.flatnonzero(fold != number)
        means = np.zeros((len(classes), features.shape[1]))
        np.add.at(means, label[rest], features[rest])
        means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
        scores[out] = np.where(np.isin(range(len(classes)), label[rest]), features[out] @ means.T, -np.inf)
    rows = np.arange(len(features))
    own = scores[rows, label]
    scores[rows, label] = -np.inf
    best = scores.argmax(1)
    other = scores[rows, best]
    undecided = ~np.isfinite(own) | ~np.isfinite(other)  # the other folds lack this or any other class
    margin = np.where(undecided, 0.0, own) - np.where(undecided, 0.0, other)
    return LabelMargins(margin, classes[best])


def rank_suspects(source: LabelledSource) -> pd.DataFrame:
    """Table of the images, most suspicious labels first, with near-copies and distances."""
    files, pixels = read_digests(source.root, source.table["image"].tolist(), {})
    cache = source.features(files)
    complete = source.table.index.isin(complete_rows(source.table).index)
    rows = np.flatnonzero(~cache.bad & complete)
    table = source.table.iloc[rows].reset_index(drop=True)
    pairs = list(dict.fromkeys(zip(table["state"], table["object"], strict=True)))
    labels = LabelSpace.from_pairs({"train": pairs})
    compositions = labels.index(table["state"].tolist(), table["object"].tolist())
    plain = unit(torch.from_numpy(cache.cls[rows]))
    margins_by_kind = label_margins(whitened(plain, compositions, labels).numpy(), compositions, labels)
    near = most_similar(plain.numpy(), plain.numpy(), NEAREST + 1)[1][:, 1:]  # first is the image itself
    pairs_of_copies = near_copies(looks_from_texts(pixels[files[row]] for row in rows)).tolist()
    cells = table[[name for name in ("state", "object", "split") if name in table]].to_numpy()
    copies = [""] * len(table)
    pairs_of_copies.sort(key=lambda pair: (cells[pair[1]] != cells[pair[0]]).tolist())
    for one, other in pairs_of_copies:
        copies[one] = table["image"][other]
        copies[other] = table["image"][one]
    table = table.assign(copy_of=copies, distance=(1 - near.mean(axis=1)).round(6))
    return rank_by_margins(table, labels, margins_by_kind)


def label_margins(
    features: NDArray[Any], compositions: Ints, labels: LabelSpace, seed: int = 0
) -> dict[str, LabelMargins]:
    """Margins of images with unit features [n, d], for `composition`, `state` and `object`."""
    kinds = {"composition": compositions, "state": labels.state_of(compositions)}
    kinds["object"] = labels.object_of(compositions)
    return {name: margins(features, kind, seed=seed) for name, kind in kinds.items()}


def whitened(plain: Tensor, compositions: Ints, labels: LabelSpace) -> Tensor:
    """Centre features [n, d], whiten by covariance within pairs plus a ridge, scale to unit."""
    label = torch.from_numpy(compositions)
    groups = ClassStatistics.of(plain, label, len(labels.states), len(labels.objects)).by_pair()
    return unit((plain - plain.mean(0)) @ shared_whitening(groups, ADDED).to(plain))


def rank_by_margins(table: pd.DataFrame, labels: LabelSpace, by_kind: dict[str, LabelMargins]) -> pd.DataFrame:
    """Sort by the sum of standardised margins; `old_state` and `old_object` keep the labels."""
    out = table.copy()
    for name, kind in by_kind.items():
        out[f"{name}_margin"] = kind.margin.round(6)
    for name, words in (("state", labels.states), ("object", labels.objects)):
        kind = by_kind[name]
        out[f"better_{name}"] = np.where(kind.margin < 0, np.array(words)[kind.better], out[name])
    out = out.assign(**{old: out[name] for name, old in OLD.items()})
    total = sum(kind.margin / max(float(kind.margin.std()), 1e-12) for kind in by_kind.values())
    out = out.iloc[np.argsort(total, kind="stable")].reset_index(drop=True)
    out.insert(0, "rank", np.arange(1, len(out) + 1))
    return out


def write_suspects_page(path: Path, title: str, ranked: pd.DataFrame, root: Path, images: int) -> None:
    """Write an HTML page with the first `images` suspects, near-copies and outliers."""
    rows = {row["image"]: row for row in ranked.to_dict("records")}

    def thumb(image: str, *lines: str) -> Thumb:
        row = rows[image]
        label = f"{row['state']} {row['object']}"
        texts = [*(Caption(text, False) for text in lines), Caption(image)]
        title = f"{row['rank']}. {label}"
        return Thumb(thumbnail(root / image), title, f"image labelled {label}", lines=texts)

    better = ranked[:images][["image", "better_state", "better_object"]].to_numpy()
    first = [thumb(image, f"perhaps {state} {thing}") for image, state, thing in better]
    pairs = [thumb(image) for pair in copied_pairs(ranked)[:images] for image in pair]
    far = [thumb(image) for image in ranked.nlargest(OUTLIERS, "distance")["image"]]
    parts = []
    for name, thumbs, text in (
        ("Most suspicious first", first, "Each image's rank and label, the label that fits better, and its file."),
        ("Near-copies", pairs, COPIES),
        ("Unlike all others", far, UNLIKE),
    ):
        if thumbs:
            parts.append(ReportPart(name, [Gallery([Strips("", [Strip("", thumbs)])], text)]))
    lead = "Correct the columns state and object of suspects.csv, which lists these images."
    section = blocks.ReportSection("suspects", "Suspicious labels", parts)
    write_text(path, blocks.render_page(blocks.Report(title, lead, [section])))


def copied_pairs(ranked: pd.DataFrame) -> list[tuple[str, ...]]:
    """Names of near-copies, two by two: first those with different labels, then in two splits."""
    rows = ranked.set_index("image")
    pairs = {tuple(sorted(pair)) for pair in rows["copy_of"][rows["copy_of"] != ""].items()}
    names = [name for name in (*OLD.values(), "split") if name in rows]
    alike = {pair: (rows.loc[pair[0], names] == rows.loc[pair[1], names]).tolist() for pair in pairs}
    return sorted(pairs, key=lambda pair: (alike[pair], pair))


@dataclass(frozen=True)
class RelabelledTable:
    """A table with corrected labels, and what the corrections changed, added and left out."""

    manifest: pd.DataFrame
    changed: int  # number of images whose label changed
    new: list[str]  # states and objects that the manifest did not have before
    outdated: list[str]  # images left out, since their labels have changed since the list was made


def relabelled(source: LabelledSource, edited: Path) -> RelabelledTable:
    """Replace labels with those in `edited`, a list of `duplex suspects` that the user corrected.

    Rows whose columns `old_state` and `old_object` differ from the source are left out, as they
    may undo a correction. Raises UsageError if no label changes, a column is misspelt, or a text
    cannot be a label.
    """
    manifest = source.table
    dataset = source.name
    table = read_table(edited, tuple(OLD.values()))
    if unknown := sorted(set(table["image"]) - set(manifest["image"])):
        stranger = f"{unknown[0]!r}, which is not an image of {dataset!r}"
        raise UsageError(f"{edited} lists {stranger}; remove that row")
    if (twice := table["image"].duplicated()).any():
        image = table["image"][twice].iloc[0]
        raise UsageError(f"{edited} lists {image!r} twice; keep one row")
    corrected = table.set_index("image")
    present = manifest.set_index("image").loc[corrected.index]
    if "split" in corrected and "split" in manifest:
        moved = corrected["split"] != present["split"]
        if moved.any():
            raise UsageError(
                f"{edited} and {dataset!r} give {corrected.index[moved][0]!r} different splits; "
                "restore the value in the column 'split', since `duplex relabel` changes only labels"
            )
    stale = pd.Series(False, corrected.index)
    for name, old in OLD.items():
        if old in corrected:
            stale |= (corrected[old] != "") & (corrected[old] != present[name])
    wanted = (corrected[list(OLD)] != present[list(OLD)]).any(axis=1)
    outdated = corrected.index[stale & wanted].tolist()
    corrected = corrected.drop(index=outdated)
    out = manifest.copy()
    for name in ("state", "object"):
        out[name] = out["image"].map(corrected[name]).fillna(out[name])
    changed = int((out[["state", "object"]] != manifest[["state", "object"]]).any(axis=1).sum())
    if not changed and outdated:
        raise UsageError(
            f"the labels of {dataset} have changed since {edited} was made, for example that of "
            f"{outdated[0]!r}; `duplex suspects {dataset}` makes a new list"
        )
    if not changed:
        remedy = "enter correct labels in 'state' and 'object'"
        raise UsageError(f"{edited} changes no label of {dataset!r}; {remedy}")
    new = []
    for name in ("state", "object"):
        new += sorted(set(out[name]) - set(manifest[name]))
    return RelabelledTable(out, changed, new, outdated)


def rank_unlabelled(recognizer: Recognizer, folder: Path, excluded: Container[str] = ()) -> pd.DataFrame:
    """Table of unlabelled images in the order to label them, with the model's answers.

    Its columns state and object are empty, for the labels. Copies are listed once; images whose
    features are not in the user's cache are encoded.

    excluded: sha256 of image files to leave out, such as those that the model was fitted to.
    """
    images = list(ImageTree(folder).images(refuse_links=False))
    listed = dict(zip(file_digests(folder, images), images, strict=True))
    files = {file: image for file, image in listed.items() if file not in excluded}
    if not files:
        found = "only images that the model already has" if listed else "no images"
        raise UsageError(f"{folder} holds {found}; give a folder of unlabelled images")
    needed = recognizer.trained.outputs
    if needed.pixels:
        problem = f"{recognizer.trained.where} was fine-tuned on pixels"
        raise UsageError(f"{problem}; `duplex next` needs one that was not")
    names = list(files.values())
    stored: dict[str, Any] = {"block_inputs": needed.block_inputs, "max_bad": 1.0}
    stored["tokens"] = "patch" if needed.patches else "none"
    features, bad = encode_shared(user_cache(), recognizer.encoder, folder, names, list(files), **stored)
    if bad:
        example = f"such as {bad[0].image} ({bad[0].reason})"
        problem = f"{len(bad):,} of {len(files):,} files cannot be used, {example}"
        if len(bad) == len(files):
            raise UsageError(f"{problem}; give a folder of readable images")
        print(f"duplex: {problem}", file=sys.stderr)
    path, places = features.require()
    good = np.delete(np.arange(len(files)), [each.row for each in bad])
    inputs: dict[str, Any] = {"cls": read_features(path).cls[places[good]]}
    for name, wanted in (("patch", needed.patches), ("block_inputs", needed.block_inputs)):
        if wanted:
            inputs[name] = read_tokens(path, name, rows=places[good])
    device = recognizer.device
    records = []
    for start in range(0, len(good), BATCH):
        part = slice(start, start + BATCH)
        batch = {name: torch.as_tensor(values[part]).to(device) for name, values in inputs.items()}
        for row, answer in zip(good[part], recognizer.candidates().answers(batch, 2), strict=True):
            best, *second = [guess.probability for guess in answer.top]
            record = {"image": names[row], "state": "", "object": "", "answer": answer.best.name}
            record |= {"probability": best, "margin": best - sum(second)}
            records.append({**record, "in_distribution": answer.in_distribution})
    return in_labelling_order(pd.DataFrame(records))


def in_labelling_order(answers: pd.DataFrame) -> pd.DataFrame:
    """Rank images in rounds of one per predicted pair: first those unlike all pairs."""
    ahead = answers["margin"].where(answers["in_distribution"], 0.0)
    ordered = answers.iloc[np.argsort(ahead, kind="stable")]
    turn = ordered.groupby("answer").cumcount()
    ordered = ordered.iloc[np.argsort(turn, kind="stable")].round(6).reset_index(drop=True)
    ordered.insert(0, "rank", np.arange(1, len(ordered) + 1))
    return ordered
