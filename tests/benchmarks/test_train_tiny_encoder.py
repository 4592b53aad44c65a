import pytest
import torch

from benchmarks import train_tiny_encoder
from benchmarks.train_tiny_encoder import main, save_weights, train
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


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["--epochs", "many"], 2), (["--image-count"], 2)])
def test_help_and_mistaken_options_train_nothing(words, code, monkeypatch):
    monkeypatch.setattr(train_tiny_encoder, "render_corpus", lambda *_: pytest.fail("training began"))
    monkeypatch.setattr("sys.argv", ["train_tiny_encoder", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code


@pytest.mark.long
def test_training_lowers_the_loss_and_repeats(tmp_path):
    for name in ("one", "two"):
        train(images=256, epochs=2, batch=64, seed=3, out=tmp_path / name)
    weights = [(tmp_path / name / "weights.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
