"""`duplex fit`: from a folder to a model, killed and continued, and with corrected labels."""

import hashlib
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from duplex import Recognizer, load_dataset
from duplex.data import contents
from duplex.errors import DuplexError, UsageError
from duplex.features import shared
from duplex.project.suspects import OUTLIERS, open_labelled, rank_suspects, relabelled, write_suspects_page
from duplex.recognition import fit
from duplex.recognition.export import read_fit
from duplex.recognition.update import update_model
from duplex.training import lineup, recipes, trials
from tests.clock import Clock
from tests.encoders.small_timm import write_weights
from tests.recognition.drawn_folder import LACKING, OBJECTS, STATES, draw_pair
from tests.recognition.searches import only_the_first, only_the_product
from tests.subprocesses import duplex, start_duplex

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fitted(drawn: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("fitted") / "model"
    done = duplex("fit", drawn, "--encoder", "tiny", "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done.stderr


def model_bytes(folder: Path) -> dict[str, str]:
    """Digests of a model's files."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_the_model_answers_with_every_labelled_pair_and_with_new_ones(fitted, drawn):
    model, _ = fitted
    recognizer = Recognizer.load(model, device="cpu")
    candidates = recognizer.candidates()
    assert len(candidates) == len(STATES) * len(OBJECTS)
    seen = {pair for pair, known in zip(candidates.pairs, candidates.seen, strict=True) if known}
    assert seen == {(s, o) for s in STATES for o in OBJECTS} - LACKING  # held-out pairs of the split too
    images = sorted(drawn.glob("*/*/0000.png"))
    answers = recognizer(images, top=1)
    right = sum((answer.best.state, answer.best.object) == path.parts[-3:-1] for answer, path in
                zip(answers, images, strict=True))  # fmt: skip
    assert right > len(images) / 2


def test_the_page_beside_the_model_has_the_measured_numbers_and_every_recipe(fitted):
    model, printed = fitted
    page = model.with_name("model-page.html").read_text(encoding="utf-8")
    record = read_fit(model)
    stored = record["measured"]["at_shares"]["stored"]
    assert f"{stored['accuracy']:.1f} %" in page
    for numbers in (record["measured"], record["measured"]["regressions"]):
        at = numbers["at_shares"]["estimated"]
        assert f"{100 * at['new_share']:.1f} ± {100 * at['error']:.1f} %, estimated" in page
    assert f"Expected calibration error {record['measured']['calibration_error']:.1f} %" in page
    assert all(row["recipe"] in page for row in record["recipes"])
    for section in ("By state", "Confusions", "More images", "Wrong answers"):
        assert section in page
    assert f"{model.with_name('model-page.html')} shows" in printed
    assert "two logistic regressions, for comparison: AUC" in printed


def test_accuracy_is_also_measured_at_the_test_images_own_share_and_at_the_estimated_one(fitted):
    model, printed = fitted
    measured = read_fit(model)["measured"]
    card = (model / "README.md").read_text(encoding="utf-8")
    mass = Recognizer.load(model, device="cpu").trained.confidence.unseen_mass
    assert set(mass) >= {"open"}, "the world of the model's answers"
    for name, numbers in (("this recipe", measured), ("two logistic regressions", measured["regressions"])):
        stored, estimated, own = (numbers["at_shares"][origin] for origin in ("stored", "estimated", "true"))
        assert 0.1 <= stored["new_share"] <= 0.9
        assert abs(estimated["new_share"] - own["new_share"]) < 0.1 + 3 * estimated["error"]
        assert f"{100 * estimated['new_share']:.0f} ± {100 * estimated['error']:.0f} % new estimated " in printed
        assert f"| {name} | {100 * own['new_share']:.1f} % (true) | {own['accuracy_seen']:.1f} |" in card
        assert 0.1 < own["new_share"] < 0.9
        share = own["new_share"]
        mean = (1 - share) * own["accuracy_seen"] + share * own["accuracy_unseen"]
        assert own["accuracy"] == pytest.approx(mean)


def test_an_export_of_the_model_keeps_its_card(fitted, tmp_path):
    assert duplex("export", fitted[0], tmp_path / "out").returncode == 0
    assert (tmp_path / "out" / "README.md").read_text() == (fitted[0] / "README.md").read_text()


def test_a_second_fit_trains_and_decodes_nothing_and_gives_the_same_bytes(fitted, drawn, monkeypatch):
    model, _ = fitted
    before = model_bytes(model)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("done again")

    monkeypatch.setattr(trials, "train_run", refuse)
    monkeypatch.setattr(contents, "decode_image", refuse)
    fit.fit_folder(drawn, model, encoder="tiny", say=lambda _: None, force=True)
    assert model_bytes(model) == before


def test_a_fit_killed_at_each_stage_ends_in_the_bytes_of_an_undisturbed_one(fitted, drawn, tmp_path, monkeypatch):
    model, _ = fitted
    out = tmp_path / "model"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "features"))
    for stage in ("*.h5.partial", "result.json", "training.partial"):  # in the order in which they appear
        process = start_duplex("fit", drawn, "--encoder", "tiny", "--out", out)
        limit = time.monotonic() + 120
        while not list(tmp_path.rglob(stage)) and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.005)
        process.kill()
        assert process.wait(60) == -9, stage
        assert list(tmp_path.rglob(stage)) and not out.exists()
    done = duplex("fit", drawn, "--encoder", "tiny", "--out", out)
    assert done.returncode == 0, done.stderr
    assert {**model_bytes(out), "README.md": ""} == {**model_bytes(model), "README.md": ""}
    assert (out / "README.md").read_text() == (model / "README.md").read_text()


def test_on_a_busy_machine_the_same_recipes_are_tried_and_the_model_has_the_same_bytes(
    fitted, drawn, tmp_path, monkeypatch
):
    model, printed = fitted
    lines: list[str] = []
    monkeypatch.setattr(fit, "FolderFit", partial(fit.FolderFit, clock=Clock(100.0)))
    busy = fit.fit_folder(drawn, tmp_path / "model", encoder="tiny", say=lines.append)
    assert read_fit(busy)["recipes"] == read_fit(model)["recipes"]
    assert (busy / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    (outlook,) = (
        place for place, line in enumerate(lines) if line.startswith("training: text prompts, then fine-tuning")
    )
    assert "minutes on this machine" in lines[outlook]
    assert all("validation AUC" not in line for line in lines[:outlook])  # it is said before anything is trained
    assert "1, 2 and 4 blocks" in lines[outlook] and "1, 2 and 4 blocks" in printed


@pytest.mark.parametrize("step", [pytest.param(0.05, marks=pytest.mark.long), 2.0])
def test_in_little_time_what_fits_is_tuned_and_a_second_fit_chooses_the_same(drawn, tmp_path, monkeypatch, step):
    """60 seconds on an idle and on a busy machine, by a pretended clock."""
    clock = Clock(step)
    lines: list[str] = []
    monkeypatch.setattr(fit, "FolderFit", partial(fit.FolderFit, clock=clock))
    model = fit.fit_folder(drawn, tmp_path / "model", encoder="tiny", minutes=1, say=lines.append)
    first = read_fit(model)
    assert any("in 1.0 minutes" in line for line in lines)
    assert sum(recipe["blocks"] > 0 for recipe in first["recipes"]) >= 1
    monkeypatch.setattr(trials, "train_run", None)
    again = read_fit(fit.fit_folder(drawn, model, encoder="tiny", minutes=1, say=lines.append, force=True))
    assert again == first


def test_an_update_that_ends_during_a_fit_is_kept(fitted, drawn, tmp_path, monkeypatch):
    model, _ = fitted
    out = Path(shutil.copytree(model, tmp_path / "model"))
    shutil.copytree(fit.fit_cache_folder(model), fit.fit_cache_folder(out))
    fit_chosen, update = fit.fit_on_all_images, partial(duplex, "update", out, tmp_path / "more", "--in-place")
    draw_pair(tmp_path / "more", "red", "star", range(8, 11))

    def updated_meanwhile(*arguments: Any) -> Any:
        assert update().returncode == 0
        return fit_chosen(*arguments)

    with monkeypatch.context() as patch, pytest.raises(UsageError, match="would lose images that updates"):
        patch.setattr(fit, "fit_on_all_images", updated_meanwhile)
        fit.fit_folder(drawn, out, encoder="tiny", say=lambda _: None, force=True)
    assert [each["images"] for each in read_fit(out)["updates"]] == [3]


def test_an_update_and_the_end_of_a_fit_exclude_each_other(fitted, drawn, tmp_path, monkeypatch):
    model, _ = fitted
    out = Path(shutil.copytree(model, tmp_path / "model"))
    shutil.copytree(fit.fit_cache_folder(model), fit.fit_cache_folder(out))
    before, write = model_bytes(out), fit._write_model
    draw_pair(tmp_path / "more", "red", "star", range(8, 11))
    refused = []

    def write_during_an_update(*arguments: Any) -> None:
        refused.append(duplex("update", out, tmp_path / "more", "--in-place"))
        write(*arguments)

    monkeypatch.setattr(fit, "_write_model", write_during_an_update)
    fit.fit_folder(drawn, out, encoder="tiny", say=lambda _: None, force=True)
    assert refused[0].returncode == 1 and "another update or fit" in refused[0].stderr
    assert model_bytes(out) == before


def test_corrected_labels_and_renamed_files_encode_nothing_again(fitted, drawn, tmp_path, monkeypatch):
    model, _ = fitted
    folder, out = shutil.copytree(drawn, tmp_path / "shop"), tmp_path / "model"
    (folder / "red" / "star" / "0003.png").rename(folder / "blue" / "heart" / "corrected.png")
    monkeypatch.setattr(shared, "extract", None)
    monkeypatch.setattr(fit.FolderFit, "search", only_the_first)
    fit.fit_folder(folder, out, encoder="tiny", say=lambda _: None)
    assert (out / "model.safetensors").read_bytes() != (model / "model.safetensors").read_bytes()


def test_a_data_set_is_loaded_from_the_features_of_a_fit(fitted, drawn, monkeypatch):
    monkeypatch.setattr(shared, "extract", None)
    assert len(load_dataset(drawn, encoder="tiny").inputs().examples["train"]) > 0


def test_suspects_of_a_folder_and_of_its_model_are_those_of_the_cached_features(fitted, drawn, tmp_path, monkeypatch):
    """Wrong labels come early; nothing is encoded."""
    monkeypatch.setattr(shared, "extract", None)
    by_model = rank_suspects(open_labelled(str(fitted[0])))
    assert by_model.equals(rank_suspects(open_labelled(str(drawn))))
    table = by_model[["image", "state", "object"]].sort_values("image", ignore_index=True)
    wrong = table.index[::19]
    table.loc[wrong, "object"] = [OBJECTS[OBJECTS.index(name) - 1] for name in table["object"][wrong]]
    table.to_csv(tmp_path / "wrong.csv", index=False)
    source = open_labelled(str(tmp_path / "wrong.csv"), drawn)
    ranked = rank_suspects(source)
    early = ranked["image"][: len(ranked) // 3]
    assert early.isin(table["image"][wrong]).sum() > len(wrong) / 2 and "split" not in ranked
    write_suspects_page(tmp_path / "page.html", "Suspects", ranked, drawn, 10)
    assert (tmp_path / "page.html").read_text().count("data:image/jpeg") == 10 + OUTLIERS
    ranked[:1].assign(object="moon").to_csv(tmp_path / "edited.csv", index=False)
    corrected = relabelled(source, tmp_path / "edited.csv")
    assert corrected.changed == 1 and list(corrected.manifest) == ["image", "state", "object"]


def test_suspects_need_features_and_the_place_of_a_models_images(fitted, drawn, tmp_path, monkeypatch, capsys):
    draw_pair(tmp_path / "shop", "red", "ring", range(12))
    shutil.copytree(drawn, tmp_path / "shop", dirs_exist_ok=True)
    assert len(rank_suspects(open_labelled(str(tmp_path / "shop")))) == len(open_labelled(str(drawn)).table)
    assert "new, changed or unreadable images are left out (12), such as red/ring/0000.png" in capsys.readouterr().err
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"the images in .* have not been encoded; run `duplex fit` on them first"):
        rank_suspects(open_labelled(str(fitted[0])))
    shutil.copytree(fitted[0], tmp_path / "moved")
    with pytest.raises(UsageError, match=r"moved\.cache/source\.json.*give their folder instead of"):
        open_labelled(str(tmp_path / "moved"))


def test_an_unreadable_image_is_counted_nowhere(drawn, tmp_path, monkeypatch):
    folder, images = shutil.copytree(drawn, tmp_path / "shop"), 8 * (len(STATES) * len(OBJECTS) - len(LACKING))
    (folder / "blue" / "star").mkdir()
    (folder / "blue" / "star" / "0003.png").write_bytes(b"no image")  # the only one of its pair
    monkeypatch.setattr(fit.FolderFit, "search", only_the_first)
    lines: list[str] = []
    model = fit.fit_folder(folder, tmp_path / "model", encoder="tiny", say=lines.append)
    record = read_fit(model)
    counted = [record["counts"][split]["images"] for split in ("train", "val", "test")]
    assert sum(counted) == sum(record["images"].values()) == len(record["contents"]) == images
    assert f"fitting the model to all {images} labelled images" in lines
    assert "images that cannot be used are left out (1): blue/star/0003.png (not an image)" in lines
    labels = Recognizer.load(model, device="cpu").labels
    assert not labels.seen[labels.states.index("blue") * len(labels.objects) + labels.objects.index("star")]
    card = (model / "README.md").read_text(encoding="utf-8")
    listed = [line.split("|")[2] for line in card.splitlines() if line.startswith("|") and "images" in line]
    assert sum(map(float, listed)) == images


def test_the_logistic_regressions_are_left_out_if_a_word_has_no_training_image(drawn, tmp_path, monkeypatch):
    table = load_dataset(drawn, encoder="tiny").manifest[["image", "state", "object", "split"]]
    folder = shutil.copytree(drawn, tmp_path / "shop")
    new = [
        (f"dotted/star/{path.name}", "dotted", "star", "test") for path in draw_pair(folder, "dotted", "star", range(4))
    ]
    pd.concat([table, pd.DataFrame(new, columns=list(table))]).to_csv(folder / "table.csv", index=False)
    monkeypatch.setattr(fit.FolderFit, "search", only_the_first)
    lines: list[str] = []
    fit.fit_folder(folder / "table.csv", tmp_path / "model", encoder="tiny", say=lines.append)
    assert "two logistic regressions, for comparison, are left out: some words have no training images" in lines


def test_the_product_of_regressions_and_closed_form_is_exported_and_updated(drawn, tmp_path, monkeypatch):
    monkeypatch.setattr(fit.FolderFit, "search", only_the_product)
    model = fit.fit_folder(drawn, tmp_path / "model", encoder="tiny", say=lambda _: None)
    assert read_fit(model)["chosen"] == "closed form times regressions"
    images = sorted(drawn.glob("*/*/0000.png"))
    (checkpoint,) = fit.fit_cache_folder(model).glob("recipes-*/*/all/checkpoint.safetensors")
    ours, theirs = (Recognizer.load(place, device="cpu").scores(images, "open") for place in (model, checkpoint.parent))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    draw_pair(tmp_path / "more", "checkered", "star", range(3))
    updated = update_model(model, tmp_path / "more", tmp_path / "updated")
    assert "checkered" in Recognizer.load(updated, device="cpu").labels.states


def test_a_folder_of_other_files_is_refused_before_any_work(tmp_path, drawn):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    for force, said in (((), "mine exists; "), (("--force",), "letter.txt belongs to no model, so")):
        done = duplex("fit", drawn, "--encoder", "tiny", "--out", tmp_path / "mine", *force)
        assert done.returncode == 2 and said in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_full_disk_is_one_line_and_leaves_no_model(tmp_path, drawn, monkeypatch, capsys):

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("duplex.features.file.shutil.disk_usage", lambda _: type("", (), {"free": 1000})())
    with pytest.raises(DuplexError, match="make room") as caught:
        fit.fit_folder(drawn, tmp_path / "model", encoder="tiny", say=lambda _: None)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "model").exists()


def test_time_must_be_more_than_nothing(tmp_path, drawn):
    with pytest.raises(UsageError, match="minutes is 0"):
        fit.fit_folder(drawn, tmp_path / "model", minutes=0)


def test_a_page_of_someone_else_is_not_replaced(drawn, tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "train_run", None)
    page = tmp_path / "model-page.html"
    page.write_text("<html>my own page</html>")
    with pytest.raises(UsageError, match=r"model-page\.html exists; .*--force"):
        fit.fit_folder(drawn, tmp_path / "model", encoder="tiny", say=lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["model-page.html"] and "my own" in page.read_text()


def test_folders_that_are_no_recipes_stay_in_the_cache(fitted, drawn):
    model, _ = fitted
    cache = fit.fit_cache_folder(model)
    (cache / "recipes-of-grandma").mkdir()
    (cache / "recipes-0123abcd").mkdir()
    fit.fit_folder(drawn, model, encoder="tiny", say=lambda _: None, force=True)
    assert (cache / "recipes-of-grandma").is_dir() and not (cache / "recipes-0123abcd").exists()
    (cache / "recipes-of-grandma").rmdir()


@pytest.mark.parametrize(("name", "folder", "model"), [("a.v1", True, "a.v1-model"), ("a.v1.csv", False, "a.v1-model")])
def test_the_default_name_of_a_model_is_that_of_its_source(name, folder, model, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from duplex.cli import app

    places = []
    monkeypatch.setattr(fit, "fit_folder", lambda source, out, **_: places.append(out) or out)
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir() if folder else (tmp_path / name).touch()
    assert CliRunner().invoke(app, ["fit", name]).exit_code == 0
    assert [str(place) for place in places] == [model]


def test_an_encoder_without_a_text_tower_is_fine_tuned(drawn, tmp_path, monkeypatch):
    weights = write_weights(tmp_path)
    monkeypatch.setattr(lineup, "DEPTHS", (1,))
    monkeypatch.setattr(lineup, "EPOCHS", (2, 3))
    monkeypatch.setattr(recipes, "EPOCHS", (2, 3))
    monkeypatch.setattr(recipes, "gain_exceeds_error", lambda dearer, cheaper: dearer.name.startswith("1 block"))
    monkeypatch.setattr(recipes, "choose", lambda candidates: candidates[-1])
    lines: list[str] = []
    encoder = "timm:test_efficientnet"
    model = fit.fit_folder(drawn, tmp_path / "model", encoder=encoder, weights=str(weights), say=lines.append)
    record = read_fit(model)
    assert [recipe["blocks"] for recipe in record["recipes"]] == [0, 0, 0, 0, 0, 1, 1, 1]
    assert record["chosen"].startswith("1 block") and record["recipes"][3]["recipe"] == "heads, rate 0.001"
    assert not any("prompts" in line for line in lines)
    assert not list(fit.fit_cache_folder(model).glob("recipes-*/*/training.partial"))
    recognizer = Recognizer.load(model, device="cpu")
    assert recognizer.trained.finetuned is not None
    assert [answer.best.state for answer in recognizer(sorted(drawn.glob("*/*/0000.png")), top=1)]
    with pytest.raises(UsageError, match="the encoder has no text tower"):
        recognizer.with_compositions("shiny moon").candidates()
    draw_pair(tmp_path / "more", "red", "star", range(8, 11))
    assert read_fit(update_model(model, tmp_path / "more", tmp_path / "updated"))["updates"][0]["images"] == 3
