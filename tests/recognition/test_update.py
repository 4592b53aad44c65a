"""`duplex update`: images added without training equal a closed-form fit to all of them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from duplex import Recognizer
from duplex.encoders.base import load_encoder
from duplex.errors import DuplexError, UsageError
from duplex.features.file import read_features
from duplex.features.shared import encode_shared, user_cache
from duplex.methods.gaussian import ClassStatistics, ClosedForm, LinearDiscriminant, PairMeans
from duplex.methods.layers import unit
from duplex.methods.prompts import encode_words
from duplex.recognition import fit, update
from duplex.recognition.export import (
    STATISTICS,
    model_card_facts,
    read_fit,
    read_statistics,
    write_fit,
    write_statistics,
)
from duplex.recognition.folder_fit import FolderFit
from duplex.recognition.update import update_model
from duplex.system.files import sha256, sole_writer
from duplex.training.checkpoint import read_header, read_tensors, write_model
from duplex.training.lineup import Lineup
from duplex.training.novelty import word_terms
from duplex.training.recipes import RecipeChoice, search_recipes
from tests.recognition.drawn_folder import OBJECTS, STATES, draw_folder, draw_pair
from tests.recognition.searches import only_the_first
from tests.subprocesses import duplex

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_folder(tmp_path_factory.mktemp("drawn") / "shop", images=6)


@pytest.fixture(scope="module")
def model(drawn: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fitted") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit.FolderFit, "search", only_the_first)
        return fit.fit_folder(drawn, out, encoder="tiny", say=lambda _: None)


@pytest.fixture
def further(tmp_path: Path) -> Path:
    """Ten images: of known pairs, of a pair that had none, of a new object."""
    folder = tmp_path / "further"
    draw_pair(folder, "red", "star", range(20, 24))
    draw_pair(folder, "red", "moon", range(20, 23))  # without images so far
    draw_pair(folder, "green", "cloud", range(20, 23))
    return folder


def read(folder: Path) -> tuple[dict[str, torch.Tensor], dict]:
    header = read_header(folder / "model.safetensors", "export")
    return read_tensors(header), dict(header.fields)


def stored_features(images: list[Path]) -> torch.Tensor:
    features, _ = encode_shared(
        user_cache(), load_encoder("tiny", towers="image"), images[0].parent, [image.name for image in images],
        [sha256(image) for image in images]
    )  # fmt: skip
    file, rows = features.require()
    return torch.from_numpy(read_features(file).cls[rows])


def test_ten_images_give_the_closed_form_of_all_images(model, drawn, further, tmp_path):
    """Against one fit to the features of all images: those in the cache, and those of the ten images in one batch.

    On some processors the last bit of a feature depends on the other images of its batch.
    """
    update_model(model, further, tmp_path / "out", say=lambda _: None)
    tensors, config = read(tmp_path / "out")
    states, objects = config["labels"]["states"], config["labels"]["objects"]
    recognizer = Recognizer.load(model, device="cpu", exact=True)
    first, added = (sorted(folder.glob("*/*/*.png")) for folder in (drawn, further))
    paths = [*first, *added]
    from duplex.data.images import read_image

    pixels = [recognizer.encoder.image_transform(read_image(path)) for path in added]
    features = torch.cat([stored_features(first), recognizer.encode(pixels)["cls"]])
    labels = torch.tensor([states.index(p.parts[-3]) * len(objects) + objects.index(p.parts[-2]) for p in paths])
    statistics = ClassStatistics.of(unit(features), labels, len(states), len(objects))
    words = encode_words(Recognizer.load(tmp_path / "out", device="cpu").labels, load_encoder("tiny").text)
    whole = ClosedForm.fit(statistics, read_statistics(model).settings, words).to(torch.float32)
    candidates = tensors["state_of"] * len(objects) + tensors["object_of"]
    expected_rows, expected_offset = whole.linear(candidates)
    z = unit(features)
    scores = (z @ tensors["likelihood.whitening"] - tensors["effects.mean"]) @ tensors["likelihood.rows"].T
    scores = scores + tensors["likelihood.offset"]
    expected = (z @ whole.whitening - whole.additive.mean) @ expected_rows.T + expected_offset
    largest = expected.abs().max()
    assert torch.allclose(scores / largest, expected / largest, atol=1e-6)
    for kind, groups in (("states", statistics.by_state()), ("objects", statistics.by_object())):
        log_p = (z @ tensors[f"primitives.{kind}.weight"] + tensors[f"primitives.{kind}.offset"]).log_softmax(-1)
        assert torch.allclose(log_p.exp(), LinearDiscriminant.fit(groups).to(torch.float32)(z).exp(), atol=1e-4)


def test_the_command_says_what_changed_and_writes_a_copy(model, further, tmp_path):
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    done = duplex("update", model, further, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "images added: 10" in done.stderr
    assert "new pairs: green cloud, red moon" in done.stderr
    assert "new objects: cloud" in done.stderr
    assert "new states" not in done.stderr
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    answers = Recognizer.load(tmp_path / "out", device="cpu")(sorted(further.glob("*/*/*.png")), top=1)
    assert sum(answer.best.object == "cloud" for answer in answers) >= 2


def test_new_words_are_candidates_with_every_known_word(model, further, tmp_path):
    update_model(model, further, tmp_path / "out", say=lambda _: None)
    candidates = Recognizer.load(tmp_path / "out", device="cpu").candidates()
    assert set(candidates.pairs) == {(s, o) for s in STATES for o in (*OBJECTS, "cloud")}
    known = dict(zip(candidates.pairs, candidates.seen.tolist(), strict=True))
    assert known["green", "cloud"]
    assert known["red", "moon"]
    assert not known["red", "cloud"]


def test_updates_in_place_add_up(model, further, tmp_path):
    out = tmp_path / "out"
    update_model(model, further, out, say=lambda _: None)
    more = tmp_path / "more"
    draw_pair(more, "blue", "heart", range(30, 32))
    done = duplex("update", out, more, "--in-place")
    assert done.returncode == 0, done.stderr
    assert [update["images"] for update in read_fit(out)["updates"]] == [10, 2]
    assert (
        "images were added without training (12)"
        in model_card_facts(out, name=None, licence="mit", repository=None).remark
    )
    counts = read_statistics(out).statistics.counts
    assert counts.sum() == read_statistics(model).statistics.counts.sum() + 12
    with pytest.raises(UsageError, match="the model already has 2 of the 2 images"):
        update_model(out, more, out, say=lambda _: None)


def test_fine_tuned_blocks_make_the_features_that_are_added(drawn, further, tmp_path, monkeypatch):
    def with_blocks(self: FolderFit) -> RecipeChoice:
        ((recipe,),) = self.space.finetuned(Lineup((2,), (1e-3,))).levels(0.0)
        return search_recipes([recipe], None, self.trials.result, self.say)

    monkeypatch.setattr(FolderFit, "search", with_blocks)
    tuned = fit.fit_folder(drawn, tmp_path / "tuned", encoder="tiny", say=lambda _: None)
    assert read_fit(tuned)["chosen"] == "2 blocks, rate 0.001, 3 epochs"
    update_model(tuned, further, tmp_path / "out", say=lambda _: None)
    old, new = (read_statistics(place) for place in (tuned, tmp_path / "out"))
    recognizer = Recognizer.load(tuned, device="cpu", exact=True)
    from duplex.data.images import read_image

    paths = sorted(further.glob("*/*/*.png"))
    inputs = recognizer.encode([recognizer.encoder.image_transform(read_image(path)) for path in paths])
    with torch.no_grad():
        z = unit(recognizer.trained.finetuned(inputs["block_inputs"])).double()
    moment = new.statistics.moment - old.statistics.moment
    assert torch.allclose(moment, z.T @ z, atol=1e-6)
    assert len(Recognizer.load(tmp_path / "out", device="cpu")(paths, top=1)) == 10


def test_only_images_enter_the_distance_from_known_ones(model, further, tmp_path):
    update_model(model, further, tmp_path / "out", say=lambda _: None)
    before, after = (Recognizer.load(place, device="cpu") for place in (model, tmp_path / "out"))
    assert torch.equal(before.trained.novelty.threshold, after.trained.novelty.threshold)
    near, labels = after.trained.novelty, after.trained.labels
    assert len(near.means) == len(before.trained.novelty.means) + 2
    fitted, shape = read_statistics(tmp_path / "out").statistics, (len(labels.states), len(labels.objects))
    states, objects = word_terms(
        PairMeans(fitted.state_of, fitted.object_of, fitted.counts, near.means.double(), shape)
    )
    torch.testing.assert_close(near.states, states, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(near.objects, objects, atol=1e-4, rtol=1e-4)
    images = sorted(further.glob("green/cloud/*.png"))
    nearer = [after(image)[0].distance < before(image)[0].distance for image in images]
    assert all(nearer)


def saved_again(images: Path, copies: Path) -> Path:
    """Return the folder `copies` with lossless copies of images, of other bytes and equal pixels."""
    for path in images.rglob("*.*"):
        copy = copies / path.relative_to(images).with_suffix(".bmp")
        copy.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            image.save(copy)
    return copies


def test_an_image_that_was_saved_again_is_not_counted_twice(model, drawn, further, tmp_path):
    update_model(model, further, tmp_path / "out", say=lambda _: None)
    for images, count in ((drawn, 132), (further, 10)):
        copies = saved_again(images, tmp_path / f"copies of {count}")
        with pytest.raises(UsageError, match=f"the model already has {count} of the {count} images, such as "):
            update_model(tmp_path / "out", copies, tmp_path / "twice", say=lambda _: None)
    assert not (tmp_path / "twice").exists()


def test_a_copy_that_the_fit_left_out_is_in_the_model(drawn, tmp_path, monkeypatch):
    monkeypatch.setattr(FolderFit, "search", only_the_first)
    shop = shutil.copytree(drawn, tmp_path / "shop")
    copies = saved_again(shop / "red", tmp_path / "copies" / "red")
    shutil.copytree(copies, shop / "red", dirs_exist_ok=True)
    out = fit.fit_folder(shop, tmp_path / "model", encoder="tiny", say=lambda _: None)
    assert int(read_statistics(out).statistics.counts.sum()) == 132
    shutil.copytree(drawn / "red", tmp_path / "first" / "red")
    for images in (copies.parent, tmp_path / "first"):  # the fit used one of both
        with pytest.raises(UsageError, match="the model already has 24 of the 24 images"):
            update_model(out, images, tmp_path / "twice", say=lambda _: None)


def test_an_update_with_the_same_images_saved_again_loses_none(model, further, tmp_path):
    update_model(model, further, tmp_path / "out", say=lambda _: None)
    update_model(model, saved_again(further, tmp_path / "copies"), tmp_path / "out", say=lambda _: None, force=True)
    assert [update["images"] for update in read_fit(tmp_path / "out")["updates"]] == [10]


def test_an_image_that_changes_while_it_is_encoded_is_not_added(model, further, tmp_path, monkeypatch):
    encode = update.encode_files

    def replaced_meanwhile(*arguments: Any, **options: Any) -> Any:
        shutil.copy(further / "green/cloud/0020.png", further / "red/star/0020.png")
        return encode(*arguments, **options)

    monkeypatch.setattr(update, "encode_files", replaced_meanwhile)
    with pytest.raises(DuplexError, match=r"red/star/0020\.png changed while it was being encoded; run the command"):
        update_model(model, further, tmp_path / "out", say=lambda _: None)
    assert not (tmp_path / "out").exists()


def test_another_spelling_of_a_label_is_the_same_label(model, tmp_path):
    said: list[str] = []
    update_model(model, draw_pair_as(tmp_path / "more", "red", "star"), tmp_path / "plain", say=said.append)
    update_model(model, draw_pair_as(tmp_path / "More", "Red", "star_"), tmp_path / "other", say=said.append)
    assert said[0] == said[1] and "images added" in said[0]


def draw_pair_as(folder: Path, state: str, thing: str) -> Path:
    draw_pair(folder / "drawn", "red", "star", range(20, 24))
    (folder / "named" / state).mkdir(parents=True)
    shutil.move(folder / "drawn" / "red" / "star", folder / "named" / state / thing)
    return folder / "named"


def test_the_fit_json_of_another_model_is_refused(model, further, tmp_path):
    """Both have as many images, but other ones."""
    draw_pair(tmp_path / "more", "blue", "heart", range(30, 40))
    update_model(model, further, tmp_path / "out", say=lambda _: None)
    update_model(model, tmp_path / "more", tmp_path / "mixed", say=lambda _: None)
    shutil.copyfile(tmp_path / "out" / "fit.json", tmp_path / "mixed" / "fit.json")
    with pytest.raises(
        UsageError, match=r"mixed/fit\.json belongs to a different model from the model\.safetensors beside"
    ):
        update_model(tmp_path / "mixed", tmp_path / "more", tmp_path / "twice", say=lambda _: None)
    assert not (tmp_path / "twice").exists()


def test_two_updates_in_place_do_not_lose_one(model, further, tmp_path):
    place = shutil.copytree(model, tmp_path / "model")
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    with sole_writer(tmp_path / "model.update", "update"):
        done = duplex("update", place, further, "--in-place")
    assert done.returncode == 1
    assert "another update" in done.stderr
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before


def test_an_update_that_another_would_replace_is_kept(model, drawn, further, tmp_path):
    """Without --in-place, the second of two updates has the first one's place as its default."""
    out = tmp_path / "out"
    update_model(model, further, out, say=lambda _: None)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    draw_pair(tmp_path / "more", "blue", "heart", range(30, 32))
    with pytest.raises(UsageError, match=r"out exists; .*--force"):
        update_model(model, tmp_path / "more", out, say=lambda _: None)
    for force_it in (
        lambda: update_model(model, tmp_path / "more", out, say=lambda _: None, force=True),
        lambda: fit.fit_folder(drawn, out, encoder="tiny", say=lambda _: None, force=True),
    ):
        with pytest.raises(UsageError, match=r"would lose images that updates added to it \(10\)"):
            force_it()
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    draw_pair(further, "blue", "heart", range(30, 32))
    update_model(model, further, out, say=lambda _: None, force=True)
    assert [update["images"] for update in read_fit(out)["updates"]] == [12]


@pytest.mark.parametrize(
    ("names", "options"),
    [(["trained.onnx", "see.py", "encoder.onnx"], "--onnx --onnx-encoder"), (["trained.onnx"], "--onnx"),
     (["page"], "--page DIST")],
)  # fmt: skip
def test_onnx_files_with_the_scores_of_before_are_left_out(model, further, tmp_path, names, options):
    place = shutil.copytree(model, tmp_path / "model")
    for name in names:
        (place / name).write_bytes(b"of before")
    lines: list[str] = []
    update_model(place, further, place, say=lines.append)
    stale = [name for name in names if name != "encoder.onnx"]
    command = f"`duplex export {place} FOLDER {options}`"
    listed = ", ".join(stale)
    assert f"not copied to {place}, since the scores have changed: {listed}; {command} writes new ones" in lines
    kept = {path.name for path in model.iterdir()} | set(names) - set(stale)
    assert {path.name for path in place.iterdir()} == kept


def test_images_of_the_test_split_are_added_and_counted(model, further, tmp_path):
    rows = ["red/star/0020.png,red,star,train", "red/star/0021.png,red,star,test"]
    (further / "new.csv").write_text("\n".join(["image,state,object,split", *rows]))
    lines: list[str] = []
    update_model(model, further / "new.csv", tmp_path / "out", say=lines.append)
    assert lines[0] == "note: 1 of the images have the split test and are added too: an update uses every row"
    assert lines[1].startswith("images added: 2")


def test_an_export_does_not_replace_a_model(model, tmp_path):
    """It would lack fit.json and the statistics, and the model could never be updated again."""
    place = shutil.copytree(model, tmp_path / "model")
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    for source, out in ((place, place), (model, place)):
        done = duplex("export", source, out, "--force")
        assert done.returncode == 2
        assert "holds a fitted model; an export would delete its metrics" in done.stderr
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    assert duplex("export", model, tmp_path / "out").returncode == 0
    done = duplex("export", tmp_path / "out", ".", cwd=tmp_path / "out")
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("case", "expected"),
    [("run", "run `duplex fit` with all images instead"), ("unreadable", "cannot be used"),
     ("words", "does not know the words 'rusty'"), ("partial", "(1) have only a state")],
)  # fmt: skip
def test_what_cannot_be_updated_is_one_line_and_leaves_nothing(model, further, tmp_path, case, expected):
    place = shutil.copytree(model, tmp_path / "model")
    if case == "run":
        (place / STATISTICS).unlink()
    elif case == "unreadable":
        (further / "red" / "star" / "bad.png").write_bytes(b"no image")
    elif case == "partial":
        further /= "new.csv"
        further.write_text("image,state,object,split\nred/star/0020.png,red,star,train\nred/star/0021.png,red,,train\n")
    else:
        (further / "red").rename(further / "rusty")
    done = duplex("update", place, further, "--out", tmp_path / "out")
    assert done.returncode in (1, 2)
    lines = [line for line in done.stderr.splitlines() if "reading images" not in line]
    assert len(lines) == 1, done.stderr
    assert expected in lines[0]
    assert not (tmp_path / "out").exists()


def test_two_updates_give_new_words_the_linear_heads_of_one(model, further, tmp_path):
    header, record = read_header(model / "model.safetensors", "export"), read_fit(model)
    tensors = read_tensors(header)
    heads = {name: value for name, value in tensors.items() if name.startswith("primitives.") and ".meta" not in name}
    noise = torch.Generator().manual_seed(0)
    for name, value in heads.items():
        tensors[name.replace("primitives", "classifier")] = value + torch.randn(value.shape, generator=noise)
    with_heads = shutil.copytree(model, tmp_path / "heads")
    write_model(with_heads / "model.safetensors", "export", header.fields, tensors)
    write_fit(with_heads, record, tensors)
    write_statistics(with_heads, read_statistics(model), tensors)
    once = update_model(with_heads, further, tmp_path / "once", say=lambda _: None)
    shutil.move(further / "red", tmp_path / "later" / "red")
    draw_pair(tmp_path / "later", "green", "cloud", range(22, 23))
    (further / "green" / "cloud" / "0022.png").unlink()
    first = update_model(with_heads, further, tmp_path / "first", say=lambda _: None)
    twice = update_model(first, tmp_path / "later", tmp_path / "twice", say=lambda _: None)
    for name, value in read(once)[0].items():
        if name.startswith("classifier."):
            torch.testing.assert_close(read(twice)[0][name], value)


def test_linear_heads_of_new_words_exceed_the_mean_as_those_of_known_words_do():
    z, own = torch.randn(60, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 12
    groups = ClassStatistics.of(unit(z + own[:, None] % 4), own, 3, 4).by_object()
    closed, heads = LinearDiscriminant.fit(groups).to(torch.float32), torch.randn(9, 3)
    t = {"primitives.objects.weight": closed.weight, "primitives.objects.offset": closed.offset}
    t |= {"classifier.objects.weight": heads[:8], "classifier.objects.offset": heads[8]}
    new = update.heads_of_new_words(t, "objects", groups, 3)
    assert all(torch.equal(new[name][..., :3], t[name]) for name in new)
    logits = groups.means.float() @ new["classifier.objects.weight"] + new["classifier.objects.offset"]
    margins = logits.diagonal() - logits[:, :3].mean(1)
    torch.testing.assert_close(margins[3], margins[:3].mean(), rtol=1e-4, atol=1e-4)
