"""What callers do by mistake changes no result in silence: threads, modes of PyTorch, wrong types, shared data."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import duplex
from duplex.errors import UsageError
from duplex.methods.base import Batch
from duplex.methods.kg_sp import KgSp
from duplex.recognition.labelled_folder import read_labelled_folder
from duplex.training.run import reproducible
from tests.recognition.drawn_folder import draw_folder
from tests.training.test_ten_lines import arrays, small


class Watched(KgSp):
    """A method that must not be in training mode, which drops features, when it reads all training images."""

    def start(self, train: Batch) -> None:
        assert not self.training
        super().start(train)


def trained(data: duplex.Dataset, seed: int = 0, method: Any = "kg_sp", **settings: Any) -> list[float]:
    """The numbers of a run's history, without NaN, and its AUC."""
    run = duplex.fit(data, method, seed=seed, epochs=2, learning_rate=0.01, threads=1, **settings)
    numbers = [*run.history.to_numpy().ravel().tolist()[2:], duplex.evaluate(run, data).auc]
    return [number for number in numbers if not np.isnan(number)]


def test_a_method_starts_in_evaluation_mode():
    assert trained(small(), method=Watched)


def test_fits_in_threads_equal_those_one_after_another():
    data, mode = small(), torch.are_deterministic_algorithms_enabled()
    alone = {seed: trained(data, seed) for seed in (0, 1)}
    assert alone[0] != alone[1]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: trained(data, seed), [0, 1, 0, 1]))
    assert together == [alone[0], alone[1]] * 2
    assert torch.are_deterministic_algorithms_enabled() == mode


def test_pytorch_is_deterministic_until_the_end_of_the_block():
    def modes() -> tuple[Any, ...]:
        filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        return torch.get_deterministic_debug_mode(), filled, torch.get_num_threads()

    before = modes()
    with reproducible(1):
        assert modes() == (2, False, 1)
    assert modes() == before and before[:2] == (0, True)


def test_fit_leaves_the_callers_random_numbers_alone():
    data = small()
    torch.manual_seed(7)
    expected = torch.rand(3).tolist()
    torch.manual_seed(7)
    plain = trained(data)
    assert torch.rand(3).tolist() == expected
    assert trained(data, on_epoch=lambda report: duplex.fit(data, "kg_sp", seed=9, epochs=1)) == plain
    assert trained(data, on_step=lambda step: torch.rand(7), on_epoch=lambda _: torch.manual_seed(1)) == plain


def test_modes_of_the_caller_change_no_result():
    data = small()
    plain, run = trained(data), duplex.fit(data, "kg_sp", epochs=1)
    auc = duplex.evaluate(run, data).auc
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            assert trained(small()) == plain
            assert duplex.evaluate(run, data).auc == auc
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(before)


def test_changes_to_the_manifest_do_not_reach_the_data_set():
    data = small()
    before = trained(small())
    table = data.manifest
    table.loc[:9, "split"] = "test"
    table["state"] = "red"
    assert len(data.manifest) == 33 and trained(data) == before


@pytest.mark.parametrize("name", ["split ", "spilt"])
def test_a_misspelt_split_is_not_ignored(tmp_path, name):
    table = pd.DataFrame(arrays()["table"]).rename(columns={"split": name})
    with pytest.raises(UsageError, match="call it 'split'"):
        small(table=table)
    if name == name.strip():
        table.assign(image=[f"{row}.png" for row in range(33)]).to_csv(tmp_path / "table.csv", index=False)
        with pytest.raises(UsageError, match=f"unknown column '{name}'; call it 'split'"):
            duplex.load_dataset(tmp_path / "table.csv", encoder="tiny", cache=tmp_path / "cache")


def test_further_columns_are_ignored():
    table = pd.DataFrame(arrays()["table"]).assign(
        set="a", image_id="b", spot="c", stage="d", age="e", old_state="f", better_object="g"
    )
    without = table.drop(columns="set")
    assert small(table=table).manifest.equals(small().manifest)
    assert small(table=without.drop(columns="split").assign(site="x")).labels.states == small().labels.states


def by_index(order: list[int], **more: Any) -> dict[str, Any]:
    """Return columns of `arrays`, of which `object` is a Series in another order with its index."""
    table = pd.DataFrame(arrays()["table"])
    return {"state": table["state"], "object": table["object"].iloc[order], "split": table["split"].tolist(), **more}


def test_columns_and_features_with_different_indexes_are_refused():
    plain, backwards = small().manifest, list(range(33))[::-1]
    assert small(table=by_index(list(range(33)))).manifest.equals(plain)
    table, features = pd.DataFrame(arrays()["table"], index=backwards), pd.DataFrame(arrays()["features"])
    named = {name: dict(enumerate(column)) for name, column in arrays()["table"].items()}
    named["object"] = dict(sorted(named["object"].items(), reverse=True))
    for wrong in (
        {"table": by_index(backwards)},
        {"table": named},
        {"table": table, "features": features},
        {"table": by_index(list(range(33))), "features": features.iloc[backwards]},
    ):
        with pytest.raises(
            UsageError, match="matched by position, but the pandas indexes of `features` and the"
        ) as caught:
            small(**wrong)
        assert "\n" not in str(caught.value)
    for right in ({"features": features.iloc[backwards]}, {"table": table}):
        assert small(**right).manifest.equals(plain)
    assert small(table=table, features=features.set_axis(backwards)).manifest.equals(plain)


def test_a_split_seed_without_a_random_split_is_refused(tmp_path):
    root = draw_folder(tmp_path / "pics", 4)
    table = read_labelled_folder(root).manifest[["image", "state", "object"]]
    place: dict[str, Any] = {"images": root, "encoder": "tiny", "cache": tmp_path / "cache"}
    table.to_csv(tmp_path / "plain.csv", index=False)
    zero, one = (duplex.load_dataset(tmp_path / "plain.csv", split_seed=seed, **place) for seed in (0, 1))
    assert not zero.manifest.equals(one.manifest)
    assert zero.manifest.equals(duplex.load_dataset(tmp_path / "plain.csv", **place).manifest)
    one.manifest.to_csv(tmp_path / "table.csv", index=False)
    with pytest.raises(
        UsageError, match=r"split_seed is 1, but .*table\.csv has a split of its own; leave split_seed out"
    ):
        duplex.load_dataset(tmp_path / "table.csv", split_seed=1, **place)
    assert duplex.load_dataset(tmp_path / "table.csv", **place).manifest.equals(one.manifest)


def test_images_that_are_left_out_are_named(tmp_path, capsys):
    root = draw_folder(tmp_path / "images", 5)
    (root / "red" / "star" / "0003.png").write_bytes(b"not an image")
    for _ in range(2):  # encoded, then read from the cache
        duplex.load_dataset(root, encoder="tiny", cache=tmp_path / "cache", device="cpu")
        said = "1 of 110 images cannot be encoded and are left out; the first is red/star/0003.png (not an image)"
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("row", [0.0, 1e-30, 1e30, 1e300])
def test_features_without_a_direction_are_refused(row):
    features = arrays()["features"].astype(np.float64)
    features[4] = row
    with pytest.raises(UsageError, match=r"has 1 of 33 rows with only zeros, .*, such as row 4"):
        small(features=features)


def test_a_data_set_is_pickled_after_a_fit_with_prompts_too():
    features = np.random.default_rng(0).normal(size=(len(arrays()["features"]), 128)).astype(np.float32)
    data = small(features=features, encoder="tiny", device="cpu")
    before = trained(data, method="csp")
    assert trained(pickle.loads(pickle.dumps(data)), method="csp") == before


def test_rows_of_equal_features_stay_in_one_split(capsys):
    """Copies in training and in test would make the measured accuracy too high."""
    given = arrays()
    random = np.random.default_rng(0).normal(size=(45, 8)).astype(np.float32)
    pairs = [(state, name) for state in ("red", "blue", "green") for name in ("star", "heart", "ring")] * 5
    table = {"state": [state for state, _ in pairs] * 2, "object": [name for _, name in pairs] * 2}
    manifest = duplex.Dataset.from_arrays(np.concatenate([random, random]), table).manifest
    assert manifest["split"][:45].tolist() == manifest["split"][45:].tolist()
    assert "in two splits" not in capsys.readouterr().err
    given["features"][-1] = given["features"][0]  # the user's own split is kept
    duplex.Dataset.from_arrays(**given)
    assert "image features are in two splits (a leak): 0 (train) = 32 (test)" in capsys.readouterr().err
