import pytest
import torch

from benchmarks.tiny_corpus import LOOKS, MILD, OUTLINES, SEED, training_example
from benchmarks.train_tiny_encoder import main, save_weights
from duplex.data.shapes import HARSH, OBJECTS, STATES, draw, shapes_manifest
from duplex.data.shapes import SEED as BENCHMARK_SEED
from duplex.encoders import tiny
from duplex.encoders.base import read_config
from duplex.encoders.libraries import open_clip


def test_saving_and_loading_returns_the_same_model(tmp_path):
    config = read_config(tiny.CONFIG)
    config["architecture"]["text_cfg"]["vocab_size"] = 5
    model = open_clip.CLIP(**config["architecture"])
    rows = torch.tensor([0, 3, 9, 49406, 49407])
    save_weights(model, rows, tmp_path)
    state, read_rows = tiny.load_state(tmp_path / "weights.safetensors")
    assert torch.equal(read_rows, rows)
    assert torch.equal(state[tiny.TOKENS][rows], model.token_embedding.weight.detach().half().float())
    assert torch.equal(state["visual.head.proj.weight"], model.visual.head.proj.weight.detach().half().float())


def test_an_example_is_a_function_of_its_number():
    (one, caption), (again, same) = training_example(11), training_example(11)
    assert caption == same
    assert one.tobytes() == again.tobytes()
    assert training_example(12)[0].tobytes() != one.tobytes()


def test_the_corpus_is_broader_than_the_benchmark_and_shares_no_image():
    assert set(STATES) < set(LOOKS)
    assert set(OBJECTS) < set(OUTLINES)
    assert SEED != BENCHMARK_SEED
    assert MILD != HARSH
    names = shapes_manifest(scale=0.02)["image"].sample(60, random_state=0)
    benchmark = {draw(name).tobytes() for name in names}
    assert not benchmark & {training_example(number)[0].tobytes() for number in range(60)}


@pytest.mark.slow
def test_training_lowers_the_loss_and_repeats(tmp_path):
    for name in ("one", "two"):
        main(images=256, epochs=2, batch=64, seed=3, out=tmp_path / name)
    weights = [(tmp_path / name / "weights.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
