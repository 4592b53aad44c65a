"""Write a trained model as a folder that works without this package, and the files that `duplex fit` adds.

model.safetensors         tensors, labels, encoder and calibration: a model file of the kind `export`
README.md                 the model card
recognize.py              scores features with numpy alone, by score_formula.py
trained.onnx, encoder.onnx, see.py    the same in ONNX, if asked for
page/                     a page that answers in the browser without a server, if asked for
fit.json                  by `duplex fit`: the recipes (settings) tried and the one chosen, test metrics, counts of the
                          data, digests of the images
statistics.safetensors    by `duplex fit`: number and sum of the features of all labelled images, by pair, and their
                          second moment; `duplex update` adds to them
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from duplex.artifacts import RunPaths
from duplex.encoders.base import Encoder, first_line, is_random
from duplex.encoders.image_blocks import cached_blocks, capture_block_input
from duplex.errors import DuplexError, UsageError, as_usage_error, install_command
from duplex.evaluation.metrics import METRICS, interval_text, number
from duplex.features.file import PIXELS
from duplex.labels import World
from duplex.methods import portable, score_formula
from duplex.methods.gaussian import ClassStatistics, FitSettings, FittedStatistics
from duplex.methods.layers import unit
from duplex.recognition import numpy_example
from duplex.recognition.trained import MODEL, TrainedModel, encoder_code_changed
from duplex.report.aggregate import stored_numbers
from duplex.system.files import refuse_existing, replace_folder, sha256, sole_writer, write_json, write_text
from duplex.training.checkpoint import read_header, read_tensors, tensor_digest, with_checksum, write_model

SCORE_TERMS = {  # with the tensor that each needs
    "visual": "visual",
    "gaussian": "likelihood.rows",
    "semantic": "semantic",
    "factors": "states",
    "gaussian_factors": "primitives.states.weight",
    "linear": "classifier.states.weight",
    "linear (pairs)": "classifier.pairs.weight",
}
NOTES = "<!-- Text below this line is kept when the model is written again. -->"


@dataclass(frozen=True)
class RunFacts:
    """What a model card tells about a run beyond its checkpoint, such as metrics; unknown facts are empty."""

    name: str
    licence: str = "other"  # as the hub writes it: mit, apache-2.0, cc-by-4.0, ...
    metrics: Mapping[str, Any] = field(default_factory=dict)  # metrics.json of the evaluation
    counts: Mapping[str, Any] = field(default_factory=dict)  # statistics.json of the data set
    repository: str | None = None
    remark: str = ""  # on the evaluation


def read_notes(card: Path) -> str:
    """The user's own text below the generated part of a model card; empty if there is no card."""
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    return text.partition(NOTES)[2]


def model_card(fields: Mapping[str, Any], tensors: Mapping[str, Tensor], facts: RunFacts, notes: str = "") -> str:
    """The Markdown text of a model card, made from an export's header and tensors, and the user's `notes`."""
    labels = fields["labels"]
    world = fields["world"]
    encoder = fields["encoder"]
    names = {re.sub(r"^members\.\d+\.", "", name) for name in tensors}  # without the prefixes of a product's members
    terms = [name for name, key in SCORE_TERMS.items() if key in names]
    place = f"hf-hub:{facts.repository}" if facts.repository else "FOLDER"
    seen = int(tensors["seen"].sum())
    how = "To use images without duplex, run `duplex export MODEL FOLDER --onnx-encoder`."
    alone = f"`python {ONNX_EXAMPLE} image.jpg`, after `pip install numpy onnxruntime pillow safetensors`"
    return f"""---
license: {facts.licence}
library_name: duplex
tags: [compositional-zero-shot-learning, clip]
---

# {facts.name}

Recognises compositions of {len(labels["states"])} states and {len(labels["objects"])} objects, including pairs without
training images. `duplex` trained it as `{fields["kind"]}`; it chooses among
{len(tensors["state_of"])} compositions of the {world} world, of which {seen} label training images.

## Use

```sh
duplex predict image.jpg --model {place}
```

```python
from duplex import Recognizer

answers = Recognizer.load("{place}")("image.jpg", top=3)
```

{f"Without duplex: {alone}." if TOWER in fields["files"] else how}

From a feature vector, with numpy and safetensors alone: `python recognize.py features.npy`.
{_features(encoder, fields["finetune"])}

## Files

`model.safetensors` holds the tensors of the score terms {", ".join(terms)}: prototypes, temperature, adapter and
factors. Its metadata are labels, encoder, and the temperature {fields["confidence"]["temperature"]:.4g} of the
probabilities, fitted on validation images. {100 * fields["confidence"]["new_share"]:.0f} % of images are expected to
show unseen pairs.

## Training data

{_counts(facts.counts)}

## Evaluation

On test images, in the {world} world:

{_metrics(facts.metrics.get(world, {}))}

S and U: accuracy on seen and unseen pairs at the ends of the calibration curve; HM: the best harmonic mean on it; AUC:
the area under it. The numbers hold for images like those of the test split only.
{facts.remark}

{NOTES}
""" + notes.removeprefix("\n")


def _features(encoder: Mapping[str, Any], options: Mapping[str, Any] | None) -> str:
    weights = f" with the weights `{encoder['tag']}`" if encoder["tag"] else ""
    name = f"`{encoder['name']}`{weights} ({encoder['precision']})"
    if options is None:
        return f"Features are those of {name}, rounded to float16, of width {encoder['dim']}."
    blocks = {1: "last block", "all": "blocks"}.get(options["blocks"], f"last {options['blocks']} blocks")
    return f"""Features are those of {name} with its {blocks} fine-tuned, not rounded, of width {encoder["dim"]}.
No cache holds them: the file `encoder.onnx` computes them. `duplex export MODEL FOLDER --onnx-encoder` writes it, and
`see.py`, which shows how to use it on images."""


def _counts(counts: Mapping[str, Any]) -> str:
    flat: dict[Any, Any] = pd.json_normalize(dict(counts), sep=" ").to_dict("records")[0] if counts else {}
    numbers = {key.replace("_", " "): value for key, value in flat.items() if isinstance(value, (int, float))}
    if not numbers:
        return "Not recorded."
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value:g} |" for key, value in numbers.items())])


def _metrics(metrics: Mapping[str, Any]) -> str:
    rows = [
        f"| {title} | {number(metrics[key])} | {interval_text(metrics, key, '.2f')} |"
        for key, title in METRICS.items()
        if f"{key}_low" in metrics
    ]
    return "\n".join(["| | % | 95 % |", "|---|---|---|", *rows]) if rows else "The run was not evaluated."


FIT, STATISTICS = "fit.json", "statistics.safetensors"
FIT_FORMAT = "duplex-fit-5"
FIELDS = ("pairs", "counts", "sums", "moment")


def remark(record: Mapping[str, Any]) -> str:
    """Text for the card of a fitted model: recipe, accuracy, and what was done later. `record`: content of fit.json."""
    measured, added = record["measured"], sum(update["images"] for update in record.get("updates", []))
    later = f"images were added without training ({added})" if added else "the model was fitted to all labelled images"
    return (
        f"The recipe is {record['chosen']!r}. Its answers were right for {measured['accuracy_seen']:.1f} % of test "
        f"images of seen pairs and {measured['accuracy_unseen']:.1f} % of those of unseen pairs, before {later}."
    )


def model_card_facts(run: Path, *, name: str | None, licence: str, repository: str | None) -> RunFacts:
    """Collect the facts for the model card of the run or exported model in the folder `run`, such as its metrics."""
    folder = run.resolve()
    folder = folder.parent if folder.is_file() else folder
    if (folder / MODEL).is_file():
        facts = RunFacts(**read_header(folder / MODEL, "export").fields.get("facts", {"name": folder.name}))
        licence = facts.licence if licence == "other" else licence
        return replace(facts, name=name or repository or facts.name, licence=licence, repository=repository)
    metrics = stored_numbers(RunPaths(folder).metrics, "dvc repro") or {}
    counts = stored_numbers(folder.parent.parent / "statistics.json", "dvc repro") or {}
    title = name or repository or " ".join(folder.parts[-3:])
    return RunFacts(title, licence, metrics, counts, repository)


def write_fit(folder: Path, record: Mapping[str, Any], model: Mapping[str, Tensor]) -> None:
    """Write `record` as fit.json into a model's folder, with the digest of the model's tensors."""
    write_json(folder / FIT, with_checksum({"format": FIT_FORMAT, **record, "model": tensor_digest(model)}))


@as_usage_error()
def read_fit(folder: Path) -> dict[str, Any]:
    """Read fit.json in a model's folder; raises `UsageError` if it is missing, changed, or belongs to another model."""
    path = folder / FIT
    try:
        record = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{folder} has no readable {FIT}; expected a folder that `duplex fit` wrote") from error
    if record.get("format") != FIT_FORMAT:
        raise UsageError(f"{path} was not written by this version of duplex; run `duplex fit` again")
    if record != with_checksum(record):
        raise UsageError(f"{path} is damaged: it does not match its checksum; run `duplex fit` again")
    if record["model"] != read_header(folder / MODEL, "export").digest:
        raise UsageError(f"{path} belongs to a different model from the {MODEL} beside it; restore this model's {FIT}")
    return record


def fitted_digests(record: Mapping[str, Any]) -> dict[str, str]:
    """Images that a model was fitted or updated with, by its fit.json: file sha256 -> digest of pixels."""
    return {file: pixels for part in (record, *record.get("updates", [])) for file, pixels in part["contents"].items()}


def copied_images(contents: Mapping[str, str], others: Mapping[str, str]) -> list[bool]:
    """For each image of `contents`, whether some image of `others` has the same bytes or the same pixels.

    contents, others: for each image, the sha256 of its file -> the digest of its pixels.
    """
    known = {*others, *others.values()}
    return [file in known or pixels in known for file, pixels in contents.items()]


def sole_model_writer(folder: Path, instead: str) -> AbstractContextManager[None]:
    """Context manager that locks a model's folder, so that only one `duplex update` or `fit` at a time writes to it.

    instead: what the user can do instead of waiting, for the message.
    """
    folder = folder.resolve()  # a link and its target have one lock
    return sole_writer(folder.with_name(f"{folder.name}.update"), "update or fit", instead)


def refuse_lost_updates(folder: Path, contents: Mapping[str, str]) -> None:
    """Raise `UsageError` if new `contents` (sha256 -> digest of pixels) lack images added to the model at `folder`."""
    try:
        updates = read_fit(folder).get("updates", [])
    except UsageError:  # not a model, or one that cannot be updated
        return
    if lost := copied_images(fitted_digests({"contents": {}, "updates": updates}), contents).count(False):
        raise UsageError(
            f"replacing {folder} would lose images that updates added to it ({lost:,}); choose another --out, or "
            "move the old model"
        )


def write_statistics(folder: Path, fitted: FittedStatistics, model: Mapping[str, Tensor]) -> None:
    """Write the statistics of the training features into a model's folder."""
    statistics = fitted.statistics
    shape = [statistics.states, statistics.objects]
    fields = {"model": tensor_digest(model), "shape": shape, "settings": asdict(fitted.settings)}
    write_model(folder / STATISTICS, "statistics", fields, {name: getattr(statistics, name) for name in FIELDS})


@as_usage_error()
def read_statistics(folder: Path) -> FittedStatistics:
    """Read the statistics of the training features from a model's folder.

    Raises `UsageError` if they are missing or of another model, or if a plug-in encoder's code has changed since.
    """
    model = read_header(folder / MODEL, "export")
    path = folder / STATISTICS
    encoder = model.fields["encoder"]
    if encoder_code_changed(encoder):
        raise UsageError(
            f"the code of the encoder {encoder['name']!r} has changed since {folder} was fitted, so new features would "
            "not match the stored statistics; run `duplex fit` again with all images"
        )
    if not path.is_file():
        raise UsageError(f"{path}, which an update needs, does not exist; run `duplex fit` with all images instead")
    header = read_header(path, "statistics")
    if header.fields["model"] != model.digest:
        raise UsageError(f"{path} belongs to a different model from the {MODEL} beside it; run `duplex fit` again")
    tensors = read_tensors(header)
    statistics = ClassStatistics(*header.fields["shape"], *(tensors[name] for name in FIELDS))
    return FittedStatistics(statistics, FitSettings(**header.fields["settings"]))


README = "README.md"
EXAMPLE, FORMULA = "recognize.py", "score_formula.py"
TRAINED, TOWER = "trained.onnx", "encoder.onnx"
ONNX_EXAMPLE = "see.py"
PAGE = "page"  # a folder
NAMES = {MODEL, README, EXAMPLE, FORMULA, TRAINED, TOWER, ONNX_EXAMPLE, FIT, STATISTICS, "__pycache__", PAGE}


def export(
    trained: TrainedModel,
    world: World,
    out: Path,
    facts: RunFacts,
    add_files: Callable[[Path, dict[str, Tensor]], None] = lambda folder, tensors: None,
    *,
    force: bool = False,
) -> None:
    """Export a trained model to the folder `out`; after an error, `out` is as it was.

    Raises `UsageError` if the model cannot be exported, has an encoder with random weights, or `out` exists.

    world: closed or open, the world whose candidates the exported model scores.
    add_files: function that writes further files; it gets the folder and the model's tensors.
    force: replace a model at `out`.
    """
    refuse_existing_model(out, force=force)
    if is_random(trained.backbone.record.get("tag")):
        raise UsageError(f"{trained.where} has random encoder weights, so it cannot be exported; train with others")
    tensors = exported_tensors(trained, world)
    fields = {
        "kind": trained.kind,
        "world": world,
        "labels": trained.labels.to_dict(),
        "encoder": dict(trained.backbone.record),
        "calibration": trained.calibration_of(world).to_dict(),
        "confidence": trained.confidence.to_dict(),
        "finetune": None if trained.finetuned is None else trained.finetuned.options.to_dict(),
    }
    with replace_folder(out.resolve()) as folder:  # a link to a folder stays
        add_files(folder, tensors)
        write_files(folder, fields, tensors, facts, read_notes(out / README))


def write_files(
    folder: Path, fields: Mapping[str, Any], tensors: Mapping[str, Tensor], facts: RunFacts, notes: str
) -> None:
    """Write an export's files: the model (with checksums of ONNX files in the folder), model card, and numpy script."""
    files = {name: sha256(folder / name) for name in (TRAINED, TOWER) if (folder / name).is_file()}
    fields = {**fields, "files": files, "facts": asdict(facts)}
    write_model(folder / MODEL, "export", fields, tensors)
    write_text(folder / README, model_card(fields, tensors, facts, notes))
    shutil.copyfile(score_formula.__file__, folder / FORMULA)
    example = Path(numpy_example.__file__).read_text(encoding="utf-8")
    write_text(folder / EXAMPLE, example.replace(score_formula.__name__, FORMULA.removesuffix(".py")))


def exported_tensors(trained: TrainedModel, world: World) -> dict[str, Tensor]:
    """The tensors of an export: for scores, for probabilities, and to detect images unlike the training images."""
    tensors = trained.tensors(world)
    if tensors is None and trained.finetuned is not None and trained.finetuned.options.text is not None:
        raise UsageError(f"{trained.where} has text adapters and cannot be exported; use a run without finetune.text")
    if tensors is None:
        kind = "products of these runs" if trained.kind == "product" else f"methods of kind {trained.kind!r}"
        raise UsageError(f"{kind} cannot be exported; choose a run of another kind")
    candidates = trained.candidates(world)
    masks = {"seen": candidates.seen, "feasible": candidates.feasible}
    tensors = {**tensors, **{name: torch.from_numpy(mask.copy()) for name, mask in masks.items()}}
    tensors |= {} if trained.novelty is None else trained.novelty.tensors()
    tensors["log_prior"] = torch.from_numpy(candidates.confidence.log_prior(**masks))
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def refuse_existing_model(out: Path, *, force: bool) -> None:
    """Raise `UsageError` if `out` exists and is not empty; with `force`, only if some files are not a model's."""
    refuse_existing(out, force=force)
    others = sorted({path.name for path in out.iterdir()} - NAMES) if out.is_dir() else []
    if others:
        raise UsageError(f"{out / others[0]} belongs to no model, so {out} is not replaced; choose another folder")


def copy_export(folder: Path, out: Path, *, force: bool) -> bool:
    """Copy an exported model with all its files, such as fit.json; returns False if `folder` is no export."""
    if not all((folder / name).is_file() for name in (MODEL, README)):
        return False
    refuse_existing_model(out, force=force)
    with replace_folder(out.resolve()) as scratch:
        for name in NAMES & {path.name for path in folder.iterdir() if path.is_file()}:
            shutil.copyfile(folder / name, scratch / name)
    return True


def readdress_card(card: Path, repository: str, licence: str) -> None:
    """Write a repository's name into a copied model card: title and commands; and a licence, unless `other`."""
    text, place = card.read_text(encoding="utf-8"), f"hf-hub:{repository}"
    text = text.replace("--model FOLDER", f"--model {place}").replace('("FOLDER")', f'("{place}")')
    text = re.sub(r"^# .*$", f"# {repository}", text, count=1, flags=re.MULTILINE)
    if licence != "other":
        text = re.sub(r"^license: .*$", f"license: {licence}", text, count=1, flags=re.MULTILINE)
    write_text(card, text)


def upload(
    folder: Path, name: str, commit_message: str = "Exported by duplex", branch: str | None = None, **settings: Any
) -> str:
    """Upload a folder to the Hugging Face repository `name`, created with `settings` if missing; returns its URL."""
    from huggingface_hub import HfApi

    api = HfApi(token=settings.pop("token", None))
    try:
        api.create_repo(name, exist_ok=True, **settings)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=commit_message, revision=branch)
    except Exception as error:  # of many kinds: network and hub
        failed = f"{name} could not be uploaded to {api.endpoint}: {first_line(error).partition(' for url')[0]}"
        raise DuplexError(f"{failed}; log in with `hf auth login` or set HF_TOKEN, and try again") from error
    return f"{api.endpoint}/{name}"


class OnnxScores(nn.Module):
    """Module to be exported to ONNX: computes scores [B, C] from features [B, d]."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.tensors = dict(tensors)

    def forward(self, features: Tensor) -> Tensor:
        return torch.stack([term for _, term in portable.score_terms(self.tensors, features)]).sum(0)


class OnnxImageTower(nn.Module):
    """Module to be exported to ONNX: the image tower, from pixels [B, 3, R, R] uint8 to features [B, d]."""

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: Any, preprocess: Mapping[str, Any], model: TrainedModel) -> None:
        super().__init__()
        self.visual = encoder.visual
        self.finetuned = copy(model.finetuned)
        if self.finetuned is not None:
            self.finetuned.precision = "fp32"  # like the tower
        self._encoder = encoder
        record = model.backbone.record
        self._reads_pixels = PIXELS in record
        self._depth = 0 if self.finetuned is None else cached_blocks(encoder, record)
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(preprocess[name]).view(3, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.both(pixels)[1]

    def both(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Features of the frozen tower and of the fine-tuned blocks; without such blocks, the frozen tower's twice."""
        with capture_block_input(self._encoder, self._depth) as block_inputs:
            outputs = self.visual((pixels.float() / 255 - self.mean) / self.std)
        pooled = outputs[0] if isinstance(outputs, tuple) else outputs
        frozen = pooled.float().half().float()
        if self.finetuned is None:
            return frozen, frozen
        return frozen, self.finetuned.features(block_inputs[0] if self._reads_pixels else block_inputs[0].half())


class PixelModel(nn.Module):
    """Module for ONNX: from pixels [B, 3, R, R] uint8 to probabilities [B, C] and distances to the nearest pair."""

    def __init__(self, tower: OnnxImageTower, tensors: Mapping[str, Tensor], model: TrainedModel) -> None:
        super().__init__()
        self.tower = tower
        self.scores = OnnxScores(tensors)
        self._temperature = model.confidence.temperature
        self._near = model.novelty

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        frozen, features = self.tower.both(pixels)
        scores = self.scores(features).double()
        logits = score_formula.answer_logits(self.scores.tensors, scores, self._temperature, torch)
        if self._near is None:
            return logits.softmax(-1).float(), frozen.new_zeros(len(frozen))
        whitened = unit(frozen) @ self._near.whitening  # distances as of `NoveltyDetector`; ONNX has no cdist
        distances = (whitened[:, None] - self._near.means).square().sum(-1).amin(1).sqrt()
        return logits.softmax(-1).float(), distances


def write_scores(folder: Path, tensors: Mapping[str, Tensor], dim: int) -> None:
    """Write trained.onnx from an export's tensors; it computes scores [B, C] from features [B, dim]."""
    _write_onnx(OnnxScores(tensors), torch.zeros(2, dim), folder / TRAINED, "features", ["scores"])


def write_tower(folder: Path, model: TrainedModel) -> None:
    """Write encoder.onnx, the image tower in float32 with its fine-tuned blocks, and see.py, a script that uses it."""
    tower, blank = _portable_tower(model)
    _write_onnx(tower, blank, folder / TOWER, "pixels", ["features"])
    example = Path(__file__).with_name("onnx_example.py").read_text(encoding="utf-8")  # importing it needs onnxruntime
    for module, name in ((score_formula, "score_formula"), (numpy_example, "recognize")):
        example = example.replace(module.__name__, name)
    (folder / ONNX_EXAMPLE).write_text(example, encoding="utf-8")


def _portable_tower(model: TrainedModel) -> tuple[OnnxImageTower, Tensor]:
    """The image tower in float32, and blank pixels to trace it with; `UsageError` if ONNX cannot have it."""
    encoder: Encoder = model.backbone.tower("image")
    record = model.backbone.record
    preprocess = json.loads(record["preprocessing"])
    visual = getattr(encoder, "visual", None)
    if visual is None or preprocess.get("resize_mode") != "shortest":
        raise UsageError(
            f"the image tower of {record['name']!r} cannot be written as ONNX; omit --onnx-encoder and --page"
        )
    visual.float().cpu()
    blank = torch.zeros(2, 3, preprocess["size"], preprocess["size"], dtype=torch.uint8)
    return OnnxImageTower(encoder, preprocess, model), blank


RUNTIME = ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")  # of onnxruntime-web
LARGEST_PAGE = 40  # MB of the model


def write_page(folder: Path, tensors: Mapping[str, Tensor], model: TrainedModel, runtime: Path) -> None:
    """Write a folder `page` whose index.html answers in the browser; `runtime` is the folder of onnxruntime-web."""
    if missing := [name for name in RUNTIME if not (runtime / name).is_file()]:
        raise UsageError(
            f"{runtime} holds no {missing[0]}; run `npm install onnxruntime-web` and give --page "
            "node_modules/onnxruntime-web/dist"
        )
    page = folder / PAGE
    page.mkdir()
    tower, blank = _portable_tower(model)
    _write_onnx(PixelModel(tower, tensors, model), blank, page / "model.onnx", "pixels", ["probabilities", "distance"])
    if (size := (page / "model.onnx").stat().st_size / 1e6) > LARGEST_PAGE:
        raise UsageError(
            f"the page's model is {size:.0f} MB, more than the {LARGEST_PAGE} MB that a page may load; choose a run "
            "with a smaller encoder"
        )
    preprocess = json.loads(model.backbone.record["preprocessing"])
    facts = {
        "states": model.labels.states,
        "objects": model.labels.objects,
        **{name: tensors[name].tolist() for name in ("state_of", "object_of", "seen")},
        **{name: preprocess[name] for name in ("size", "interpolation")},
        "threshold": None if model.novelty is None else float(model.novelty.threshold),
    }
    write_json(page / "model.json", facts)
    here = Path(__file__).parent
    scripts = "".join(f'<script src="{name}"></script>\n' for name in (RUNTIME[0], "browser.js"))
    html = (here / "page.html").read_text(encoding="utf-8")
    write_text(page / "index.html", html.replace("</html>", f"{scripts}</html>"))
    for file in (here / "browser.js", *(runtime / name for name in RUNTIME)):
        shutil.copyfile(file, page / file.name)


def _write_onnx(module: nn.Module, example: Tensor, path: Path, input_name: str, output_names: list[str]) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsageError(f"ONNX files need the packages onnx and onnxscript; run {install_command('onnx')}") from error
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module.eval(),
                (example,),
                str(path),
                input_names=[input_name],
                output_names=output_names,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except (RuntimeError, ValueError, TypeError) as error:
        flag = {TRAINED: "--onnx and --onnx-encoder", TOWER: "--onnx-encoder"}.get(path.name, "--page")
        raise DuplexError(f"{path.name} cannot be written for this model ({first_line(error)}); omit {flag}") from error
    finally:
        logging.disable(before)
