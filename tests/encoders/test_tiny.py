import json
import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open

from duplex.data.shapes import HARSH, OBJECTS, STATES, draw, shapes_manifest
from duplex.data.shapes import SEED as BENCHMARK_SEED
from duplex.encoders import tiny
from duplex.encoders.openclip import SimpleTokenizer
from duplex.encoders.tiny import corpus
from duplex.synthetic import LOOKS, OUTLINES, stream


@pytest.fixture(scope="module")
def loaded():
    config, state, rows = tiny.load_state()
    model = tiny.build(config)
    model.load_state_dict(state)
    return config, model.eval(), rows


# -- the weights --------------------------------------------------------------------------------------------------


def test_the_weights_are_small_and_in_half_precision():
    assert tiny.WEIGHTS.stat().st_size <= 3_000_000
    with safe_open(tiny.WEIGHTS, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    rows = tensors.pop("token_rows")
    assert rows.dtype == torch.int32
    assert torch.equal(rows, rows.unique())
    assert tensors[tiny.TOKENS].shape[0] == len(rows) < 1000
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16, torch.int64}


def test_only_rows_in_use_have_values(loaded):
    _, model, rows = loaded
    finite = model.token_embedding.weight.isfinite().all(dim=1)
    assert torch.equal(finite.nonzero().flatten(), rows)
    others = {name: value for name, value in model.state_dict().items() if name != tiny.TOKENS}
    assert all(value.isfinite().all() for value in others.values())


def test_every_label_and_the_usual_prompt_are_known_and_an_unknown_word_is_named():
    known = [*STATES, *OBJECTS, *LOOKS, *OUTLINES, "a photo of the picture"]
    assert tiny.unknown_words(known) == []
    assert tiny.unknown_words([*known, "a photo of a zebra", "zebra"]) == ["zebra"]


def test_padding_does_not_reach_the_text_feature(loaded):
    """The tower is causal: what stands after the end token changes nothing."""
    config, model, rows = loaded
    length = config["architecture"]["text_cfg"]["context_length"]
    ids = [49406, *SimpleTokenizer().encode("a photo of red star"), 49407]
    texts = torch.zeros(2, length, dtype=torch.long)
    texts[:, : len(ids)] = torch.tensor(ids)
    texts[1, len(ids) :] = int(rows[5])
    with torch.no_grad():
        one, other = model.encode_text(texts)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_saving_and_loading_returns_the_same_model(tmp_path):
    config = tiny.load_config()
    config["architecture"]["text_cfg"]["vocab_size"] = 5
    model = tiny.build(config)
    rows = torch.tensor([0, 3, 9, 49406, 49407])
    tiny.save_state(model, rows, tmp_path)
    shutil.copy(tiny.CONFIG, tmp_path)
    _, state, read_rows = tiny.load_state(tmp_path)
    assert torch.equal(read_rows, rows)
    assert torch.equal(state[tiny.TOKENS][rows], model.token_embedding.weight.detach().half().float())
    assert torch.equal(state["visual.head.proj.weight"], model.visual.head.proj.weight.detach().half().float())


def test_the_tiny_clip_tells_mild_pictures_apart(loaded):
    """On pictures of its own style that it was not trained on it must be far better than chance (1 in 22)."""
    config, model, _ = loaded
    side, context = config["preprocess"]["image_size"], config["architecture"]["text_cfg"]["context_length"]
    kinds = list(OUTLINES)
    pictures = [
        np.asarray(corpus.picture(kind, LOOKS["plain"], corpus.MILD, stream(1, f"{kind} {k}")).resize((side, side)))
        for kind in kinds
        for k in range(4)
    ]
    texts = torch.zeros(len(kinds), context, dtype=torch.long)
    for row, kind in enumerate(kinds):
        ids = [49406, *SimpleTokenizer().encode(f"a photo of {kind}"), 49407]
        texts[row, : len(ids)] = torch.tensor(ids)
    pixels = (torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    with torch.no_grad():
        images, words = model.encode_image(pixels), model.encode_text(texts)
    best = (torch.nn.functional.normalize(images) @ torch.nn.functional.normalize(words).T).argmax(dim=1)
    assert (best == torch.arange(len(kinds)).repeat_interleave(4)).float().mean() > 0.5


# -- its corpus ---------------------------------------------------------------------------------------------------


def test_an_example_is_a_function_of_its_number():
    (one, caption), (again, same) = corpus.example(11), corpus.example(11)
    assert caption == same
    assert one.tobytes() == again.tobytes()
    assert corpus.example(12)[0].tobytes() != one.tobytes()


def test_the_corpus_shares_nothing_with_the_benchmark():
    assert corpus.SEED != BENCHMARK_SEED
    assert corpus.MILD != HARSH
    names = shapes_manifest(scale=0.02)["image"].sample(60, random_state=0)
    benchmark = {draw(name).tobytes() for name in names}
    assert not benchmark & {corpus.example(number)[0].tobytes() for number in range(60)}


def test_captions_are_careless_but_mostly_right():
    captions = [corpus.example(number)[1] for number in range(300)]
    named = [bool(set(caption.split()) & set(OUTLINES)) for caption in captions]
    assert 0.8 < np.mean(named) < 0.97
    stated = [bool(set(caption.split()) & set(LOOKS)) for caption in captions]
    assert 0.6 < np.mean(stated) < 0.95


def test_the_corpus_is_broader_than_the_benchmark():
    assert set(STATES) < set(LOOKS)
    assert set(OBJECTS) < set(OUTLINES)


def test_the_config_is_plain_json():
    config = json.loads(tiny.CONFIG.read_text())
    assert set(config) == {"architecture", "preprocess"}
    assert set(config["preprocess"]) == {"image_size", "mean", "std", "interpolation", "resize_mode"}


@pytest.mark.slow
def test_training_lowers_the_loss_and_repeats(tmp_path):
    from duplex.encoders.tiny.train import main

    for name in ("one", "two"):
        main(pictures=256, epochs=2, batch=64, seed=3, threads=1, out=tmp_path / name)
    weights = [(tmp_path / name / "weights.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
