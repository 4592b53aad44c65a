"""`duplex score` on valid and invalid files."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from duplex.cli import app
from duplex.errors import UsageError
from duplex.evaluation import score_files as module
from duplex.evaluation.accumulate import ScoreAccumulator
from duplex.evaluation.metrics import measure
from tests.evaluation.twins import problem


@pytest.fixture
def arrays() -> dict[str, Any]:
    p = problem(np.random.default_rng(0), 200, 20)
    p.scores[np.arange(200), p.target] += 2
    return {"scores": p.scores, "target": p.target, "seen": p.seen}


def run(*args: Any) -> Any:
    result = CliRunner().invoke(app, ["score", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout) if "--json" in args else result.stdout


def save(path: Path, arrays: dict[str, Any]) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        with h5py.File(path, "w") as store:
            for name, values in arrays.items():
                store[name] = values
    return path


@pytest.mark.parametrize("name", ["s.npz", "s.h5", "s.hdf5"])
def test_npz_and_hdf5_files_give_the_same_metrics(name, tmp_path, arrays, monkeypatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 20 * 33)
    found = run(save(tmp_path / name, arrays), "--json")
    expected = measure(ScoreAccumulator(arrays["target"], arrays["seen"]).add(arrays["scores"]).competitors()).to_dict()
    assert {key: found[key] for key in expected} == json.loads(json.dumps(expected))
    assert 0 < found["auc_interval"][0] < found["auc"] < found["auc_interval"][1] < 100
    assert found["protocol"] == "exact" and found["state_accuracy"] is None


def test_compression_number_types_and_names_of_labels_are_accepted(tmp_path: Path, arrays: dict[str, Any]) -> None:
    plain = run(save(tmp_path / "a.npz", arrays), "--json")
    other = arrays | {"seen": arrays["seen"].astype(int), "target": arrays["target"].astype(np.float64)}
    other |= {"state": np.repeat(["red", "wet"], 10), "object": np.arange(20) % 10, "k": np.array([1, 3])}
    np.savez_compressed(tmp_path / "b.npz", **other)
    found = run(tmp_path / "b.npz", "--json")
    assert found["auc"] == plain["auc"] and 0 < found["state_accuracy"] <= 100 and found["top"]["3"]["k"] == 3
    assert found["top"]["3"]["auc"] > found["auc"]
    with h5py.File(tmp_path / "c.h5", "w") as store:
        for key, values in other.items():
            store[key] = np.char.encode(values, "utf-8") if key == "state" else values
    again = run(tmp_path / "c.h5", "--json")
    assert again["state_accuracy"] == found["state_accuracy"] and again["top"] == found["top"]


def test_k_and_a_feasible_mask_are_used(tmp_path: Path, arrays: dict[str, Any]) -> None:
    mask = np.arange(20) < 15
    path = save(tmp_path / "a.npz", arrays | {"feasible_mask": mask})
    found = run(path, "--json", "--k", 2, "--k", 1, "--rounds", 0)
    accumulator = ScoreAccumulator(arrays["target"], arrays["seen"], feasible_mask=mask, k=2)
    expected = measure(accumulator.add(arrays["scores"]).competitors(), 2, rounds=0)
    assert found["k"] == 2 and found["auc"] == 100 * expected.auc and list(found["top"]) == ["1"]
    assert found["seen_interval"] is None


def test_the_sampled_protocol_is_close_to_the_exact_one(tmp_path: Path, arrays: dict[str, Any]) -> None:
    path = save(tmp_path / "a.h5", arrays)
    exact, found = run(path, "--json"), run(path, "--json", "--protocol", "sampled")
    assert found["protocol"] == "sampled" and found["auc_interval"] is None
    assert found["auc"] != exact["auc"] and abs(found["auc"] - exact["auc"]) < 3


def test_two_files_are_compared_image_by_image(tmp_path: Path, arrays: dict[str, Any]) -> None:
    better = arrays["scores"].copy()
    better[np.arange(200), arrays["target"]] += 0.5
    paths = [save(tmp_path / "a.npz", arrays), save(tmp_path / "b.h5", arrays | {"scores": better})]
    found = run(*paths, "--json")
    gain = found["difference"]["auc"]
    assert gain["value"] == pytest.approx(found["second"]["auc"] - found["first"]["auc"])
    assert 0 < gain["interval"][0] < gain["value"] < gain["interval"][1] and gain["p"] < 0.001
    assert set(found["difference"]) == {"seen", "unseen", "hm", "auc"}
    assert "second - first" in run(*paths)


INVALID = {
    "no scores": (lambda a: {"logits": a["scores"]}, "lacks 'scores' and 'target' and 'seen'; add or"),
    "no images": (lambda a: a | {"scores": a["scores"][:0], "target": a["target"][:0]}, "'scores' has shape"),
    "text": (lambda a: a | {"scores": a["scores"].astype("S8")}, "'scores' has shape"),
    "short target": (lambda a: a | {"target": a["target"][1:]}, "'target' has the shape (199,)"),
    "nan target": (lambda a: a | {"target": a["target"] * np.nan}, "whole numbers"),
    "an unknown mask": (
        lambda a: a | {"feasible": np.ones(20, bool)},
        "has the unknown array 'feasible'; remove it (known arrays: scores, target, seen, feasible_mask, k",
    ),
    "strange mask": (lambda a: a | {"feasible_mask": np.full(20, np.nan)}, "true or false"),
    "short state": (lambda a: a | {"state": np.arange(3)}, "'state' has the shape (3,)"),
    "nan": (lambda a: a | {"scores": np.where(a["scores"] > 2.5, np.nan, a["scores"])}, "contain NaN"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_contents_are_refused(case: str, tmp_path: Path, arrays: dict[str, Any]) -> None:
    change, message = INVALID[case]
    refused(message, save(tmp_path / "bad.npz", change(arrays)), "--json")


def refused(message: str, *args: Any) -> None:
    with pytest.raises(UsageError) as caught:
        run(*args)
    assert message in str(caught.value) and "\n" not in str(caught.value)


class Trap:
    """Would run code if a file were unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle was loaded",))


def test_unreadable_files_and_pickles_are_refused(tmp_path: Path, arrays: dict[str, Any]) -> None:
    for name in ("bad.npz", "bad.h5"):
        whole = save(tmp_path / name, arrays).read_bytes()
        for content in (b"not what the name says", b"", whole[: len(whole) // 2]):
            (tmp_path / name).write_bytes(content)
            refused("cannot be read as", tmp_path / name)
    with (tmp_path / "single.npz").open("wb") as file:
        np.save(file, arrays["scores"])
    refused("single array", tmp_path / "single.npz")
    np.savez(tmp_path / "pickle.npz", **(arrays | {"scores": np.array([[Trap()]], dtype=object)}))
    refused("'scores' cannot be read", tmp_path / "pickle.npz")


def test_a_damaged_array_is_refused(tmp_path: Path, arrays: dict[str, Any]) -> None:
    path = save(tmp_path / "a.npz", arrays)
    raw = bytearray(path.read_bytes())
    raw[400:4000] = bytes(3600)
    path.write_bytes(raw)
    refused("'scores' cannot be read", path)


def test_invalid_options_are_refused(tmp_path: Path, arrays: dict[str, Any]) -> None:
    path = save(tmp_path / "a.npz", arrays)
    refused("unknown protocol 'guess'", path, "--protocol", "guess")
    refused("--k is 0", path, "--k", 0)
    refused("leave out --protocol sampled", path, path, "--protocol", "sampled")
    refused("give it once to compare two files", path, path, "--k", 1, "--k", 2)
    refused("choose a smaller --k", path, "--protocol", "sampled", "--k", 21)
    refused("choose a smaller --k", path, "--k", 10**9)
    refused("differ in 'target'", path, save(tmp_path / "b.npz", arrays | {"target": arrays["target"][::-1]}))


def test_files_with_other_candidates_or_another_k_are_not_compared(tmp_path: Path, arrays: dict[str, Any]) -> None:
    names = {"state": np.repeat(["rød", "wet"], 10), "object": np.arange(20) % 10}
    path = save(tmp_path / "a.npz", arrays | names | {"k": 3})
    encoded = names | {"state": np.char.encode(names["state"], "utf-8"), "k": [3, 5]}
    shown = run(path, save(tmp_path / "b.h5", arrays | encoded))
    assert shown.count("top-3") == 2 and "top-5" not in shown
    assert "top-1" in run(path, save(tmp_path / "c.npz", arrays), "--k", 1)
    for change, says in (
        ({"state": names["state"][::-1]}, "differ in 'state'; use scores of the same images and candidates"),
        ({"state": np.arange(20)}, "differ in 'state'"),
        ({"object": np.roll(names["object"], 1)}, "differ in 'object'"),
        ({"scores": arrays["scores"][:, :-1], "seen": arrays["seen"][:-1], "state": names["state"][:-1],
          "object": names["object"][:-1], "target": arrays["target"] % 19}, "differ in"),
        ({"k": 1}, f"k is 3 for {path} and 1 for {tmp_path / 'd.npz'} (default: 1); set both with --k 3"),
    ):  # fmt: skip
        refused(says, path, save(tmp_path / "d.npz", arrays | names | {"k": 3} | change))


def test_infeasible_labels_are_announced(tmp_path: Path, arrays: dict[str, Any]) -> None:
    path = save(tmp_path / "a.npz", arrays | {"feasible_mask": np.arange(20) < 15})
    result = CliRunner().invoke(app, ["score", str(path), "--json"])
    lost = int((arrays["target"] >= 15).sum())
    assert f"excludes the labels of {lost} images" in result.stderr
    assert json.loads(result.stdout)["images_seen"] + json.loads(result.stdout)["images_unseen"] == 200


ANSWERS = """state,object,answer_state,answer_object
old,car,Old,car
old,car,new,car
Faux.Fur,boat,faux fur,car
new,car,,
"""


def test_answers_without_scores_have_accuracies_of_pair_state_and_object(tmp_path: Path, command: Any) -> None:
    (tmp_path / "a.csv").write_text(ANSWERS)
    found = run(tmp_path / "a.csv", "--json")
    assert found == {"file": str(tmp_path / "a.csv"), "images": 4, "pair": 25.0, "state": 50.0, "object": 50.0}
    assert run(tmp_path / "a.csv").split() == ["pair", "25.00", "state", "50.00", "object", "50.00"]
    (tmp_path / "b.csv").write_text(ANSWERS.replace("answer_object", "word"))
    for arguments in ([tmp_path / "b.csv"], [tmp_path / "a.csv", "--k", "3"], [tmp_path / "a.csv"] * 2):
        assert command("score", *map(str, arguments)).refused()
    assert command("score", str(tmp_path / "a.csv"), "--protocol", "sampled").refused("holds answers, not scores")
