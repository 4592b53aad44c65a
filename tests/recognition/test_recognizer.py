"""A recognizer gives the scores of the evaluation, for images in every form."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

import duplex
from duplex import Recognizer, read_features
from duplex.data.tables import read_manifest
from duplex.encoders.base import load_encoder
from duplex.errors import UsageError
from duplex.labels import LabelSpace
from duplex.methods.base import MethodContext
from duplex.recognition.added import encode_prompts, split_composition
from duplex.recognition.answers import UnreadableImage
from duplex.training.checkpoint import load_checkpoint, read_record

DOCS = Path(__file__).parents[2] / "docs" / "library.md"
ROUNDING = 5e-4  # of features to 16 bits, which falls otherwise where a batch of another size differs in a last bit


@pytest.fixture(scope="module")
def recognizer(trained) -> Recognizer:
    return Recognizer.load(trained.run(), device="cpu", exact=True, new_share=0.1)


def pipeline_scores(trained, method: str, world: str) -> torch.Tensor:
    """Return the scores of cached test features by the checkpoint's scorer, among the pairs of all splits."""
    path = trained.run(method) / "checkpoint.safetensors"
    record, tower = read_record(path), load_encoder("tiny", towers="text")
    loaded = load_checkpoint(path, MethodContext(record.labels, {"cls": (128,)}, tower.text), record.encoder)
    features = read_features(trained.paths.features("own"))
    rows = np.flatnonzero(read_manifest(trained.paths.manifest("own"))["split"] == "test")
    return loaded.scorer(record.labels.candidates(world, "train"))({"cls": torch.from_numpy(features.cls[rows])})


@pytest.mark.parametrize(
    ("method", "world", "batch_size"),
    [("duplex", "closed", 1), ("duplex", "closed", 64), ("duplex_open", "open", 64), ("clip", "open", 64)],
)
def test_scores_equal_the_evaluations(trained, method, world, batch_size):
    model = Recognizer.load(trained.run(method), device="cpu", exact=True)
    scores = model.scores(trained.images(), world, batch_size=batch_size)
    torch.testing.assert_close(scores, pipeline_scores(trained, method, world), rtol=0, atol=ROUNDING)


def test_answers_follow_from_the_pipelines_scores(trained, recognizer):
    """Temperature and prior image by image: order, probabilities and marginals are those of one distribution."""
    labels, confidence = recognizer.labels, recognizer.trained.confidence
    compositions = np.unique(np.concatenate([labels.pairs[split] for split in ("train", "val", "test")]))
    seen, share = labels.seen[compositions], recognizer.new_share
    prior = np.where(seen, (1 - share) / seen.sum(), share * np.exp(confidence.unseen_log_odds) / (~seen).sum())
    answers = recognizer(trained.images(), top=1000)
    for row, answer in zip(pipeline_scores(trained, "duplex", "closed").double().numpy(), answers, strict=True):
        q = (row / row.sum()) ** (1 / confidence.temperature) * prior
        q /= q.sum()
        names = labels.names(compositions)
        given = {guess.name: guess.probability for guess in answer.top}
        assert [given[name] for name in names] == pytest.approx(q, rel=0.01, abs=1e-5)
        assert list(given.values()) == sorted(given.values(), reverse=True)
        for marginal, all_names, part in (
            (answer.states, labels.states, labels.state_of),
            (answer.objects, labels.objects, labels.object_of),
        ):
            expected = np.bincount(part(compositions), q, len(all_names))
            assert [marginal[name] for name in all_names] == pytest.approx(expected, rel=0.01, abs=1e-5)
            assert list(marginal.values()) == sorted(marginal.values(), reverse=True)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [1, 64])
def test_a_stream_equals_a_call(trained, recognizer, workers, batch_size):
    paths = trained.images()[:20]
    streamed = list(recognizer.stream(paths, batch_size=batch_size, num_workers=workers))
    for one, other in zip(streamed, recognizer(paths), strict=True):
        assert [guess.name for guess in one.top] == [guess.name for guess in other.top]
        assert one.best.score == pytest.approx(other.best.score, abs=ROUNDING)


def test_paths_images_arrays_and_features_give_equal_scores(trained, recognizer):
    path = trained.images()[3]
    image = Image.open(path).convert("RGB")
    row = np.flatnonzero(read_manifest(trained.paths.manifest("own"))["split"] == "test")[3]
    feature = read_features(trained.paths.features("own")).cls[row]
    ways = [path, str(path), image, np.asarray(image), torch.from_numpy(np.array(image)), feature, feature[None]]
    scores = [recognizer.scores(way) for way in ways]
    for other in scores[1:]:
        torch.testing.assert_close(other, scores[0], rtol=0, atol=1e-5)
    whole = recognizer(read_features(trained.paths.features("own")))
    assert whole[row].best.score == pytest.approx(recognizer(path)[0].best.score, abs=1e-5)


def test_score_terms_and_probabilities_add_up(trained, recognizer):
    for answer in recognizer(trained.images()[:10], top=1000):
        assert len(answer.top) == len(recognizer.candidates())
        assert sum(guess.probability for guess in answer.top) == pytest.approx(1, abs=1e-4)
        for guess in answer.top:
            assert set(guess.score_terms) == {"visual", "semantic", "factors"}
            assert sum(guess.score_terms.values()) == pytest.approx(guess.score, abs=1e-5)


def test_a_larger_share_of_new_pairs_raises_their_odds_by_its_own(trained):
    images = trained.images()[:10]
    low, high = (Recognizer.load(trained.run(), device="cpu", new_share=share) for share in (0.1, 0.5))
    for one, other in zip(low(images, top=1000), high(images, top=1000), strict=True):
        masses = [sum(guess.probability for guess in answer.top if not guess.seen) for answer in (one, other)]
        odds = [mass / (1 - mass) for mass in masses]
        assert odds[1] / odds[0] == pytest.approx(9, rel=1e-4)
        order = [[guess.name for guess in answer.top if guess.seen] for answer in (one, other)]
        assert order[0] == order[1]


def test_pairs_are_split_where_both_parts_are_known():
    labels = LabelSpace.from_pairs({"train": [("dark", "sky"), ("dark blue", "shirt"), ("red", "wine glass")]})
    for text, pair in {
        "dark blue shirt": ("dark blue", "shirt"),
        "dark wine glass": ("dark", "wine glass"),
        "dark blue kettle": ("dark", "blue kettle"),  # the first cut with a known part
        "rusty kettle": ("rusty", "kettle"),
        "dark,blue shirt": ("dark", "blue shirt"),
    }.items():
        assert split_composition(text, labels) == pair


def test_a_mistaken_argument_is_named(recognizer, tmp_path):
    with pytest.raises(UsageError, match=re.escape(f"{tmp_path} is a folder; give a list of the image files in it")):
        recognizer(str(tmp_path))
    with pytest.raises(UsageError, match="'hollow' cannot be split into a state and an object"):
        recognizer.with_compositions(("hollow", "star"))
    assert recognizer.with_compositions(("red star", "blue heart")).added == (("red", "star"), ("blue", "heart"))
    assert recognizer.with_compositions("red star").added == (("red", "star"),)


@pytest.mark.parametrize("share", [0.0, 1.0, float("nan")])
def test_a_share_of_new_pairs_lies_between_0_and_1(trained, share):
    with pytest.raises(UsageError, match=rf"\(--new-share\) is {share}; expected a number between 0 and 1"):
        Recognizer.load(trained.run(), device="cpu", new_share=share)


def test_the_open_world_excludes_infeasible_compositions(trained):
    model = Recognizer.load(trained.run("duplex_open"), device="cpu")
    candidates = model.candidates("open")
    assert model.worlds == ("open",)
    assert len(candidates) == model.labels.size
    assert 0 < candidates.feasible.sum() <= len(candidates)
    assert len(model(trained.images()[0], top=10_000)[0].top) == candidates.feasible.sum()
    excluded = candidates.pairs[int(np.argmin(candidates.feasible))]
    wider = model.with_compositions([excluded]).candidates("open")
    assert wider.feasible[wider.pairs.index(excluded)] and len(wider) == len(candidates)
    assert wider.feasible.sum() == candidates.feasible.sum() + (not candidates.feasible.all())
    with pytest.raises(UsageError, match="not trained for the closed world; choose the open world"):
        model(trained.images()[0], world="closed")


def test_added_compositions_have_new_and_trained_words(trained, recognizer):
    labels = recognizer.labels
    inside = {labels.name(int(column)) for column in labels.candidates("closed", "train")}
    outside = next(
        (s, o)
        for s in labels.states
        for o in labels.objects
        if labels.name(int(labels.index([s], [o])[0])) not in inside
    )
    wider = recognizer.with_compositions([outside, "dark picture", "red star", f"{outside[0]} {outside[1]}"])
    candidates = wider.candidates()
    assert candidates.pairs[-2:] == [outside, ("dark", "picture")]
    answer = wider(trained.images()[0], top=1000)[0]
    words = {guess.name: guess.trained_words for guess in answer.top if guess.trained_words is not None}
    assert {name: (trained.state, trained.object) for name, trained in words.items()} == {
        f"{outside[0]} {outside[1]}": (True, True),
        "dark picture": (True, False),
    }
    assert "picture" in answer.objects
    assert len(recognizer.candidates()) == len(candidates) - 2, "the recognizer itself is unchanged"


def test_prompts_of_known_names_equal_the_methods_prototypes(trained, recognizer):
    candidates, tensors = recognizer.candidates(), recognizer.trained.tensors("closed")
    tower = recognizer.trained.backbone.tower("text").text
    encode = partial(encode_prompts, tensors, recognizer.labels, tower)
    torch.testing.assert_close(encode("composition", candidates.pairs), tensors["semantic"], rtol=0, atol=1e-5)
    names = [(name, None) for name in recognizer.labels.states]
    torch.testing.assert_close(encode("state", names), tensors["states"], rtol=0, atol=1e-5)
    labels = replace(recognizer.labels, states=(*recognizer.labels.states, "picture"))  # by an update, without vectors
    added = encode_prompts(tensors, labels, tower, "state", [("picture", None)])
    assert torch.equal(added, encode("state", [("picture", None)]))


def test_unreadable_files_do_not_stop_a_stream(trained, recognizer, tmp_path):
    junk, good = tmp_path / "junk.jpg", trained.images()[0]
    junk.write_text("not an image")
    results = list(recognizer.stream([junk, good, tmp_path / "absent.png"], num_workers=0))
    assert results[0] == UnreadableImage("not an image") and results[2] == UnreadableImage("missing")
    assert results[1].best.score == pytest.approx(recognizer(good)[0].best.score, abs=1e-5)
    with pytest.raises(UsageError, match=r"junk\.jpg cannot be used: not an image"):
        recognizer(junk)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((2, 7), np.float32), r"features have the shape \(2, 7\); expected \[images, 128\] for"),
        (np.full(128, np.nan, np.float32), "has 1 of 1 rows with only zeros"),
        (np.zeros((0, 4, 3), np.uint8), "is not an image"),
        (Image.new("F", (8, 8)), r"the image \(type Image\) cannot be used: unsupported pixel type"),
        (np.ones((8, 8, 3), np.float32), r"\(8, 8, 3\); .*to give an image as an array, use uint8"),
    ],
)
def test_arrays_that_are_not_images_are_reported(recognizer, images, message):
    with pytest.raises(UsageError, match=message):
        recognizer(images)


@pytest.mark.parametrize(("factor", "reason"), [(0.0, "all zero"), (float("nan"), "not finite")])
def test_images_whose_features_are_unusable_are_refused(trained, recognizer, monkeypatch, factor, reason):
    encoded = recognizer.encoder.encode_images
    monkeypatch.setattr(recognizer.encoder, "encode_images", lambda pixels: factor * encoded(pixels))
    with pytest.raises(UsageError, match=rf"index 0 in its batch\) cannot be used: its features are {reason}"):
        recognizer(trained.images()[0])


def test_features_of_another_encoder_are_refused(trained, recognizer):
    features = read_features(trained.paths.features("own"))
    other = replace(features, identity={**features.identity, "weights": "0" * 64})
    with pytest.raises(UsageError, match="another weights file"):
        recognizer(other)


def damaged(trained, tmp_path, change) -> Path:
    with safe_open(trained.run() / "checkpoint.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        meta = file.metadata()
    change(tensors, meta)
    save_file(tensors, tmp_path / "checkpoint.safetensors", meta)
    return tmp_path


def test_the_public_names_exist_and_are_documented():
    text = (DOCS.parent / "reference" / "api.md").read_text(encoding="utf-8")
    for name in duplex.PUBLIC:
        assert getattr(duplex, name).__name__ == name
        assert f"\n* `{name}`: " in text, f"docs/reference/api.md does not list {name}"
    with pytest.raises(AttributeError, match="nothing"):
        duplex.nothing  # noqa: B018
    names: dict[str, Any] = {}
    exec("from duplex import *", names)
    assert {name: names[name] for name in duplex.PUBLIC} == {name: getattr(duplex, name) for name in duplex.PUBLIC}


def test_the_examples_of_the_docs_run(project):
    scope: dict = {"RUN": str(project.run()), "PICTURE": str(project.images()[0])}
    scope["CACHE"] = str(project.paths.features("own"))
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)
    assert len(blocks) >= 5
    for block in blocks:
        code = block.replace('"artifacts/shapes/duplex/0"', "RUN").replace('"kettle.jpg"', "PICTURE")
        code = code.replace('"shapes"', '"own"')
        exec(compile(code.replace('"artifacts/shapes/features.h5"', "CACHE"), str(DOCS), "exec"), scope)


def test_features_of_every_kind_are_read(trained, recognizer):
    features = read_features(trained.paths.features("own")).cls[:3]
    best = [answer.best.name for answer in recognizer(features)]
    as_bfloat16 = torch.from_numpy(features).bfloat16()
    assert [answer.best.name for answer in recognizer(as_bfloat16)] == best
    assert torch.equal(recognizer.scores(as_bfloat16), recognizer.scores(as_bfloat16.float().numpy()))
    assert recognizer.scores([]).shape == recognizer.scores(features[:0]).shape == (0, len(recognizer.candidates()))


def test_a_stream_takes_one_path_and_refuses_counts_that_would_skip_files(trained, recognizer):
    path = trained.images()[0]
    (answer,) = recognizer(path)
    for one in (path, str(path), [path]):
        assert [each.best for each in recognizer.stream(one, num_workers=0)] == [answer.best]
    for changes in ({"batch_size": -1}, {"num_workers": -1}, {"top": 1.5}):
        with pytest.raises(UsageError, match="expected a whole number of"):
            list(recognizer.stream([path], **{"num_workers": 0, **changes}))
    for paths in ([3], [b"x"]):
        with pytest.raises(UsageError, match="expected a"):
            list(recognizer.stream(paths, num_workers=0))


def test_modes_of_the_caller_change_no_answer(trained, recognizer):
    path = trained.images()[0]
    expected = recognizer(path)[0].to_dict()
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.autocast("cpu", torch.bfloat16):
            assert recognizer(path)[0].to_dict() == expected
            fresh = Recognizer.load(trained.run(), device="cpu", exact=True, new_share=0.1)
            assert fresh(path)[0].to_dict() == expected
            assert next(fresh.stream(path, num_workers=0)).to_dict() == expected
    finally:
        torch.set_default_dtype(before)


def features_of(trained, count: int | None = None) -> np.ndarray:
    return read_features(trained.paths.features("own")).cls[:count]


def listed(answers) -> list[tuple[list[str], list[float]]]:
    return [([guess.name for guess in each.top], [guess.probability for guess in each.top]) for each in answers]


def test_the_estimated_share_is_that_of_the_probabilities_and_answers_are_those_at_it(trained):
    model = Recognizer.load(trained.run(), device="cpu", new_share="auto")
    features = features_of(trained)
    answers = model(features, top=5)
    share = answers[0].share
    even = Recognizer.load(trained.run(), device="cpu", new_share=0.5)(features, top=1000)
    q = np.array([sum(guess.probability for guess in each.top if not guess.seen) for each in even])
    mass = model.trained.confidence.unseen_mass["closed"]
    estimate = np.clip((q.mean() - mass.seen) / (mass.unseen - mass.seen), 0.01, 0.99)
    assert share.value == pytest.approx(estimate, abs=6e-5)  # rounded to four digits
    assert all(each.share is share for each in answers)
    assert answers[0].to_dict()["new_share_error"] == pytest.approx(share.error, abs=1e-6)
    given = Recognizer.load(trained.run(), device="cpu", new_share=share.value)(features, top=5)
    for (names, shares), (wanted, expected) in zip(listed(answers), listed(given), strict=True):
        assert names == wanted and shares == pytest.approx(expected, rel=1e-6)
    unspecified = Recognizer.load(trained.run(), device="cpu")
    assert listed(unspecified(features, top=5)) == listed(answers)
    assert unspecified(features[:49])[0].share.error is None


def test_the_means_over_validation_images_are_those_of_the_answers(trained):
    model = Recognizer.load(trained.run(), device="cpu", new_share=0.5)
    manifest = read_manifest(trained.paths.manifest("own"))
    rows = np.flatnonzero(manifest["split"] == "val")
    names = manifest.iloc[rows]
    is_seen = model.labels.is_seen(model.labels.index(names["state"].tolist(), names["object"].tolist()))
    answers = model(features_of(trained)[rows], top=1000)
    q = np.array([sum(guess.probability for guess in each.top if not guess.seen) for each in answers])
    mass = model.trained.confidence.unseen_mass["closed"]
    assert (mass.seen, mass.unseen) == pytest.approx((q[is_seen].mean(), q[~is_seen].mean()), abs=1e-4)


def test_a_stream_estimates_the_share_of_its_readable_images(trained, tmp_path):
    model = Recognizer.load(trained.run(), device="cpu", new_share="auto")
    (tmp_path / "junk.png").write_text("nothing")
    paths = trained.images()[:12]
    streamed = list(model.stream([tmp_path / "junk.png", *paths], batch_size=5, num_workers=0))
    called = model(paths)
    assert streamed[0] == UnreadableImage("not an image") and "12 images" in str(called[0].share)
    for one, other in zip(streamed[1:], called, strict=True):
        assert one.share.value == pytest.approx(other.share.value, abs=ROUNDING)
        assert [guess.name for guess in one.top] == [guess.name for guess in other.top]


def test_one_image_is_answered_at_the_stored_share(trained):
    path = trained.images()[0]
    results = []
    stored = Recognizer.load(trained.run(), device="cpu").trained.confidence.new_share
    for share in ("auto", None, stored):
        model = Recognizer.load(trained.run(), device="cpu", new_share=share)
        results.append((model(path)[0], next(model.stream(path, num_workers=0))))
    for pair in results:
        for answer, expected in zip(pair, results[-1], strict=True):
            assert answer.top == expected.top and answer.states == expected.states
            assert (answer.share.value, answer.share.error) == (stored, None)


def test_a_model_without_means_is_used_at_its_stored_share(trained):
    model = Recognizer.load(trained.run(), device="cpu", new_share="auto")
    model.trained.confidence = replace(model.trained.confidence, unseen_mass={})
    stored = Recognizer.load(trained.run(), device="cpu", new_share=model.trained.confidence.new_share)
    paths = trained.images()[:3]
    for answers in (model(paths), list(model.stream(paths, num_workers=0))):
        assert "no means over validation images" in str(answers[0].share)
        assert [answer.best.name for answer in answers] == [answer.best.name for answer in stored(paths)]
