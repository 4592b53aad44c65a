"""docs/your_method.md names the whole protocol, and its method with memory works at the first try."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import duplex
from duplex.methods.base import Batch, Method, MethodContext
from duplex.testing import check_method, small_batch, small_context
from duplex.training.checkpoint import read_record
from tests.projects import draw_table, inside
from tests.subprocesses import ROOT
from tests.training.test_ten_lines import arrays, small

PAGE = (ROOT / "docs" / "your_method.md").read_text()
MEMORY = (ROOT / "examples" / "neighbours.py").read_text()


def public_names(*classes: type) -> set[str]:
    names = {name for each in classes for name in (*vars(each), *getattr(each, "__annotations__", {}))}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("cls", [MethodContext, Batch, Method], ids=lambda cls: cls.__name__)
def test_every_public_name_is_on_the_page(cls):
    named = set(re.findall(r"\w+", " ".join(re.findall(r"^\| (`[^|]*`) \|", PAGE, re.M))))
    assert not public_names(cls) - named


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> Iterator[ModuleType]:
    """The page's method with memory as a module in a folder of its own."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "neighbours.py").write_text(MEMORY)
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("neighbours")
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("neighbours", None)


def test_a_method_that_keeps_all_training_images_works_at_the_first_try(plugin, tmp_path):
    data = duplex.load_dataset(**draw_table(tmp_path, 0.05), encoder="tiny")
    check_method(plugin.Neighbours)
    run = duplex.fit(data, plugin.Neighbours, epochs=3, learning_rate=0.01, scale=20.0)
    assert run.method.keys.shape == (int((data.manifest["split"] == "train").sum()), 128)
    results = [duplex.evaluate(run, data, world=world) for world in ("closed", "open")]
    assert [len(result.table()) for result in results] == [4, 5], "one row more in the open world"
    assert 0 < results[1].auc <= results[0].auc
    assert run.val_auc > 100 / data.labels.size
    with inside(tmp_path):
        run.save("model")
        recognizer = duplex.Recognizer.load("model")
        (answer,) = recognizer(tmp_path / "pictures" / data.manifest["image"][0])
    assert answer.best.state in data.labels.states
    (cache,) = (tmp_path / "cache").glob("*/*.h5")
    features = duplex.read_features(cache).cls[:9]
    pairs = recognizer.candidates("closed").pairs
    candidates = data.labels.index([state for state, _ in pairs], [thing for _, thing in pairs])
    expected = run.method.scorer(candidates)({"cls": torch.from_numpy(features)})
    assert np.allclose(recognizer.scores(features, world="closed"), expected.numpy(), atol=1e-6)


def with_text() -> duplex.Dataset:
    features = np.random.default_rng(0).normal(size=(len(arrays()["features"]), 128)).astype(np.float32)
    return small(features=features, encoder="tiny")


def test_a_checkpoint_stores_the_code_that_was_trained_not_a_later_edit(plugin, tmp_path, capsys):
    data, file = with_text(), Path(plugin.__file__ or "")
    edited = f"{MEMORY}\nEDITED = 1\n"
    try:
        run = duplex.fit(data, plugin.Neighbours, epochs=1, on_epoch=lambda _: file.write_text(edited))
        folder = run.save(tmp_path / "run")
        capsys.readouterr()
        duplex.Recognizer.load(folder)
        assert "the code of 'neighbours:Neighbours' has changed since" in capsys.readouterr().err
        stored = duplex.fit(data, plugin.Neighbours, epochs=1).record.training["plugin"]  # still the imported class
        reloaded = duplex.fit(data, importlib.reload(plugin).Neighbours, epochs=1).record.training["plugin"]
    finally:
        file.write_text(MEMORY)
        importlib.reload(plugin)
    assert (stored == read_record(folder / "checkpoint.safetensors").training["plugin"]) and stored != reloaded


@pytest.mark.parametrize("place", ["script", "session"])
def test_a_changed_class_of_a_script_is_reported(tmp_path, capsys, monkeypatch, place):
    """An interactive session keeps no source of the class: of another class, the code cannot be compared."""
    script = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    file = tmp_path / "train.py"
    file.write_text(MEMORY)
    if place == "script":
        script.__file__ = str(file)
    exec(compile(MEMORY, file if place == "script" else "<stdin>", "exec"), vars(script))
    folder = duplex.fit(with_text(), script.Neighbours, epochs=1).save(tmp_path / "run")
    capsys.readouterr()
    checkpoint, said = folder / "checkpoint.safetensors", list[str]()
    for text in (MEMORY, MEMORY.replace("scale * q", "scale + q")):
        file.write_text(text)
        if place == "session" and said:
            exec(compile(text, "<stdin>", "exec"), vars(script))
        duplex.Recognizer.load(folder)
        said.append(capsys.readouterr().err)
    if place == "script":
        line = f"duplex: the code of '__main__:Neighbours' has changed since {checkpoint} was written; "
        assert said[0] == "" and said[1].startswith(line) and said[1].count("\n") == 1
    else:
        line = f"the code of '__main__:Neighbours' may have changed (it cannot be read) since {checkpoint} was written"
        assert said[0] == "" and line in said[1] and said[1].count("\n") == 1
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    with pytest.raises(duplex.DuplexError, match="'__main__:Neighbours' is a class of another script or notebook"):
        duplex.Recognizer.load(folder)


def test_an_image_is_left_out_of_its_own_neighbours(plugin):
    train, options = small_batch(40), plugin.NeighbourOptions(scale=1.0)
    method = plugin.Neighbours(small_context(), options)
    method.start(train)
    place = 3
    batch = train[torch.tensor([place])]
    with torch.no_grad():
        before = method.losses(batch, ())
        method.keys = method.keys.clone()
        method.keys[place] = -method.keys[place]
        assert method.losses(batch, ()) == before, "the image's own copy does not count"
        method.keys[place + 8] = -method.keys[place + 8]  # another image of the same composition
        assert method.losses(batch, ()) != before
