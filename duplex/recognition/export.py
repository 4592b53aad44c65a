"""Write a trained model as a folder that works without this package, and the files of `duplex fit`.

model.safetensors         tensors, labels, encoder and calibration: a model file of the kind `export`
README.md                 the model card
recognize.py              scores features with numpy alone, by score_formula.py and new_share.py
trained.onnx, encoder.onnx, see.py    the same in ONNX, if asked for (`onnx_files`)
page/                     a page that answers in the browser without a server, if asked for
fit.json                  by `duplex fit`: recipes tried and chosen, test metrics, counts and digests
                          of the images
statistics.safetensors    by `duplex fit`: number and sum of all labelled images' features by pair, and
                          their second moment; `duplex update` adds to them
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from duplex.artifacts import RunPaths
from duplex.data.negatives import KINDS
from duplex.encoders.base import first_line, has_random_weights
from duplex.errors import DuplexError, UsageError, as_usage_error
from duplex.evaluation import new_share
from duplex.evaluation.metrics import METRICS, interval_text, number
from duplex.labels import World
from duplex.methods import score_formula
from duplex.methods.gaussian import ClassStatistics, FitSettings, FittedStatistics
from duplex.recognition import numpy_example
from duplex.recognition.trained import MODEL, TrainedModel, encoder_code_changed
from duplex.report.aggregate import stored_numbers
from duplex.system.files import refuse_existing, replace_folder, sha256, sole_writer, write_json, write_text
from duplex.training.checkpoint import read_header, read_tensors, tensor_digest, write_model
from duplex.training.novelty import PASSING, PREFIX

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
    """What a model card tells about a run beyond its checkpoint; unknown facts are empty."""

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
    """The model card in Markdown, from an export's header and tensors, and `notes`."""
    labels = fields["labels"]
    world = fields["world"]
    encoder = fields["encoder"]
    names = {re.sub(r"^members\.\d+\.", "", name) for name in tensors}  # of the members of a product, too
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
show unseen pairs; of 50 images or more, this share is estimated.

## Training data

{_counts(facts.counts)}

## Evaluation

On test images, in the {world} world:

{_metrics(facts.metrics.get(world, {}))}

S and U: accuracy on seen and unseen pairs at the ends of the calibration curve; HM: the best harmonic mean on it; AUC:
the area under it. The numbers hold for images like those of the test split only.
{_unknown_images(tensors)}{facts.remark}

{NOTES}
""" + notes.removeprefix("\n")


def _unknown_images(tensors: Mapping[str, Tensor]) -> str:
    refused = tensors.get(f"{PREFIX}refused")
    if refused is None or not len(refused):
        return ""
    rates = [f"{kind} {100 * share:.0f} %" for kind, share in zip(KINDS, refused.tolist(), strict=True)]
    return f"""
Images of none of the pairs are marked as such: {", ".join(rates)} of drawn images of each kind, if those of the other
two kinds alone are known to the detector. Up to {100 * (1 - PASSING):.0f} % of validation images are marked, too.
"""


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
    flat: dict[Any, Any] = {}
    if counts:
        flat = pd.json_normalize(dict(counts), sep=" ").to_dict("records")[0]
    numbers = {key: value for key, value in flat.items() if isinstance(value, (int, float))}
    if not numbers:
        return "Not recorded."
    rows = [f"| {key.replace('_', ' ')} | {value:g} |" for key, value in numbers.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _metrics(metrics: Mapping[str, Any]) -> str:
    rows = [
        f"| {title} | {number(metrics[key])} | {interval_text(metrics, key, '.2f')} |"
        for key, title in METRICS.items()
        if f"{key}_low" in metrics
    ]
    if not rows:
        return "The run was not evaluated."
    return "\n".join(["| | % | 95 % |", "|---|---|---|", *rows])


FIT = "fit.json"
STATISTICS = "statistics.safetensors"
FIT_FORMAT = "duplex-fit-6"
FIELDS = ("pairs", "counts", "sums", "moment")


def remark(record: Mapping[str, Any]) -> str:
    """Text for a fitted model's card, from its fit.json: recipe, accuracy, later updates."""
    measured = record["measured"]
    added = sum(update["images"] for update in record.get("updates", []))
    later = "the model was fitted to all labelled images"
    if added:
        later = f"images were added without training ({added})"
    rows = ["| right answers, % | share of unseen pairs | seen pairs | unseen pairs |", "|---|---|---|---|"]
    for name, numbers in (("this recipe", measured), ("two logistic regressions", measured["regressions"])):
        for origin, at in (numbers or {"at_shares": {}})["at_shares"].items():
            share = f"{100 * at['new_share']:.1f} % ({origin})"
            rows.append(f"| {name} | {share} | {at['accuracy_seen']:.1f} | {at['accuracy_unseen']:.1f} |")
    table = "\n".join(rows)
    return f"""The recipe is {record["chosen"]!r}. Its answers to test images, before {later}, by the expected share of
images of unseen pairs: stored, estimated from the images, and their true one.

{table}"""


def model_card_facts(run: Path, *, name: str | None, licence: str, repository: str | None) -> RunFacts:
    """The facts for the model card of the run or exported model in the folder `run`."""
    folder = run.resolve()
    folder = folder.parent if folder.is_file() else folder
    if (folder / MODEL).is_file():
        fields = read_header(folder / MODEL, "export").fields
        facts = RunFacts(**fields.get("facts", {"name": folder.name}))
        title = name or repository or facts.name
        licence = facts.licence if licence == "other" else licence
        return replace(facts, name=title, licence=licence, repository=repository)
    metrics = stored_numbers(RunPaths(folder).metrics, "dvc repro") or {}
    counts = stored_numbers(folder.parent.parent / "statistics.json", "dvc repro") or {}
    title = name or repository or " ".join(folder.parts[-3:])
    return RunFacts(title, licence, metrics, counts, repository)


def write_fit(folder: Path, record: Mapping[str, Any], model: Mapping[str, Tensor]) -> None:
    """Write `record` as fit.json into a model's folder, with the digest of the model's tensors."""
    record = {"format": FIT_FORMAT, **record, "model": tensor_digest(model)}
    write_json(folder / FIT, record)


@as_usage_error()
def read_fit(folder: Path) -> dict[str, Any]:
    """Read a model's fit.json; `UsageError` if it is missing, changed, or another model's."""
    path = folder / FIT
    try:
        record = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        problem = f"{folder} has no readable {FIT}"
        raise UsageError(f"{problem}; expected a folder that `duplex fit` wrote") from error
    if record.get("format") != FIT_FORMAT:
        raise UsageError(f"{path} was not written by this version of duplex; run `duplex fit` again")
    if record["model"] != read_header(folder / MODEL, "export").digest:
        problem = f"{path} belongs to a different model from the {MODEL} beside it"
        raise UsageError(f"{problem}; restore this model's {FIT}")
    return record


def fitted_digests(record: Mapping[str, Any]) -> dict[str, str]:
    """A model's images, by its fit.json: file sha256 -> digest of pixels."""
    digests: dict[str, str] = {}
    for part in (record, *record.get("updates", [])):
        digests |= part["contents"]
    return digests


def copied_images(contents: Mapping[str, str], others: Mapping[str, str]) -> list[bool]:
    """For each image of `contents`, whether one of `others` has the same bytes or pixels."""
    taken = {*others, *others.values()}
    return [file in taken or pixels in taken for file, pixels in contents.items()]


def sole_model_writer(folder: Path, instead: str) -> AbstractContextManager[None]:
    """Lock a model's folder in this context: only one `duplex update` or `fit` writes to it."""
    folder = folder.resolve()  # a link and its target have one lock
    return sole_writer(folder.with_name(f"{folder.name}.update"), "update or fit", instead)


def refuse_lost_updates(folder: Path, contents: Mapping[str, str]) -> None:
    """Raise `UsageError` if `contents` (sha256 -> digest of pixels) lack images added to `folder`."""
    try:
        updates = read_fit(folder).get("updates", [])
    except UsageError:  # not a model, or one that cannot be updated
        return
    added = fitted_digests({"contents": {}, "updates": updates})
    lost = copied_images(added, contents).count(False)
    if lost:
        problem = f"replacing {folder} would lose images that updates added to it ({lost:,})"
        raise UsageError(f"{problem}; choose another --out, or move the old model")


def write_statistics(folder: Path, fitted: FittedStatistics, model: Mapping[str, Tensor]) -> None:
    """Write the statistics of the training features into a model's folder."""
    statistics = fitted.statistics
    shape = [statistics.states, statistics.objects]
    fields = {"model": tensor_digest(model), "shape": shape, "settings": asdict(fitted.settings)}
    tensors = {name: getattr(statistics, name) for name in FIELDS}
    write_model(folder / STATISTICS, "statistics", fields, tensors)


@as_usage_error()
def read_statistics(folder: Path) -> FittedStatistics:
    """Read the statistics of the training features from a model's folder."""
    model = read_header(folder / MODEL, "export")
    path = folder / STATISTICS
    encoder = model.fields["encoder"]
    if encoder_code_changed(encoder):
        raise UsageError(
            f"the code of the encoder {encoder['name']!r} has changed since {folder} was fitted, so new features would "
            "not match the stored statistics; run `duplex fit` again with all images"
        )
    if not path.is_file():
        problem = f"{path}, which an update needs, does not exist"
        raise UsageError(f"{problem}; run `duplex fit` with all images instead")
    header = read_header(path, "statistics")
    if header.fields["model"] != model.digest:
        problem = f"{path} belongs to a different model from the {MODEL} beside it"
        raise UsageError(f"{problem}; run `duplex fit` again")
    tensors = read_tensors(header)
    statistics = ClassStatistics(*header.fields["shape"], *(tensors[name] for name in FIELDS))
    settings = header.fields["settings"]
    return FittedStatistics(statistics, FitSettings(**{**settings, "parts": tuple(settings.get("parts", ()))}))


README = "README.md"
EXAMPLE = "recognize.py"
FORMULA = "score_formula.py"
SHARE = "new_share.py"
TRAINED, TOWER = "trained.onnx", "encoder.onnx"
ONNX_EXAMPLE = "see.py"
PAGE = "page"  # a folder
NAMES = {MODEL, README, EXAMPLE, FORMULA, SHARE, TRAINED, TOWER, ONNX_EXAMPLE, FIT, STATISTICS, "__pycache__", PAGE}


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

    add_files: function that writes further files; it gets the folder and the model's tensors.
    """
    refuse_existing_model(out, force=force)
    record = trained.backbone.record
    if has_random_weights(record["name"], record["tag"] or None):
        problem = f"{trained.where} has random encoder weights, so it cannot be exported"
        raise UsageError(f"{problem}; train with others")
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
    """Write an export's model (with checksums of its ONNX files), card and numpy script."""
    files = {name: sha256(folder / name) for name in (TRAINED, TOWER) if (folder / name).is_file()}
    fields = {**fields, "files": files, "facts": asdict(facts)}
    write_model(folder / MODEL, "export", fields, tensors)
    write_text(folder / README, model_card(fields, tensors, facts, notes))
    example = Path(numpy_example.__file__).read_text(encoding="utf-8")
    for module, name in ((score_formula, FORMULA), (new_share, SHARE)):
        shutil.copyfile(str(module.__file__), folder / name)
        example = example.replace(module.__name__, name.removesuffix(".py"))
    write_text(folder / EXAMPLE, example)


def exported_tensors(trained: TrainedModel, world: World) -> dict[str, Tensor]:
    """The tensors of an export: for scores, for probabilities, and to detect unfamiliar images."""
    tensors = trained.tensors(world)
    finetuned = trained.finetuned
    if tensors is None and finetuned is not None and finetuned.options.text is not None:
        problem = f"{trained.where} has text adapters and cannot be exported"
        raise UsageError(f"{problem}; use a run without finetune.text")
    if tensors is None:
        is_product = trained.kind == "product"
        kind = "products of these runs" if is_product else f"methods of kind {trained.kind!r}"
        raise UsageError(f"{kind} cannot be exported; choose a run of another kind")
    candidates = trained.candidates(world)
    masks = {"seen": candidates.seen, "feasible": candidates.feasible}
    tensors = {**tensors, **{name: torch.from_numpy(mask.copy()) for name, mask in masks.items()}}
    tensors |= {} if trained.novelty is None else trained.novelty.tensors()
    tensors["log_prior"] = torch.from_numpy(candidates.confidence.log_prior(**masks))
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def refuse_existing_model(out: Path, *, force: bool) -> None:
    """Raise `UsageError` if `out` exists; with `force`, if it has files of no model."""
    refuse_existing(out, force=force)
    others = sorted({path.name for path in out.iterdir()} - NAMES) if out.is_dir() else []
    if others:
        problem = f"{out / others[0]} belongs to no model, so {out} is not replaced"
        raise UsageError(f"{problem}; choose another folder")


def copy_export(folder: Path, out: Path, *, force: bool) -> bool:
    """Copy an exported model with all its files; returns False if `folder` is no export."""
    if not all((folder / name).is_file() for name in (MODEL, README)):
        return False
    refuse_existing_model(out, force=force)
    with replace_folder(out.resolve()) as scratch:
        for name in NAMES & {path.name for path in folder.iterdir() if path.is_file()}:
            shutil.copyfile(folder / name, scratch / name)
    return True


def readdress_card(card: Path, repository: str, licence: str) -> None:
    """Write a repository's name, and a licence unless it is `other`, into a copied model card."""
    place = f"hf-hub:{repository}"
    text = card.read_text(encoding="utf-8").replace("--model FOLDER", f"--model {place}")
    text = text.replace('("FOLDER")', f'("{place}")')
    text = re.sub(r"^# .*$", f"# {repository}", text, count=1, flags=re.MULTILINE)
    if licence != "other":
        text = re.sub(r"^license: .*$", f"license: {licence}", text, count=1, flags=re.MULTILINE)
    write_text(card, text)


def upload(
    folder: Path, name: str, commit_message: str = "Exported by duplex", branch: str | None = None, **settings: Any
) -> str:
    """Upload a folder to the Hugging Face repository `name`, made if missing; returns its URL."""
    from huggingface_hub import HfApi

    api = HfApi(token=settings.pop("token", None))
    try:
        api.create_repo(name, exist_ok=True, **settings)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=commit_message, revision=branch)
    except Exception as error:  # of many kinds: network and hub
        reason = first_line(error).partition(" for url")[0]
        problem = f"{name} could not be uploaded to {api.endpoint}: {reason}"
        raise DuplexError(f"{problem}; log in with `hf auth login` or set HF_TOKEN, and try again") from error
    return f"{api.endpoint}/{name}"
