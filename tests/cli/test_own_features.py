"""`duplex data add --features`: files are checked, and methods are trained on them or say what is missing."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from duplex.artifacts import ArtifactPaths
from duplex.config.datasets import write_dataset
from duplex.config.params import load_params, read_yaml
from duplex.data.shapes import shapes_manifest
from duplex.errors import DuplexError
from duplex.features.file import read_features
from duplex.project.plan import write_plan
from duplex.project.reproduce import plan_reproduction
from duplex.project.run import ProjectData
from tests.commands import Command

pytestmark = pytest.mark.slow

WIDTH = 12


@pytest.fixture
def table(project: Path) -> pd.DataFrame:
    """A table without images beside it, in no special order, and files of features for it."""
    manifest = shapes_manifest(scale=0.04).sample(frac=1, random_state=0, ignore_index=True)
    manifest.to_csv(project / "table.csv", index=False)
    np.save(project / "X.npy", features(manifest))
    return manifest


def features(manifest: pd.DataFrame) -> np.ndarray:
    """Return features that name their pair: a one-hot state folded into `WIDTH`, plus noise."""
    random = np.random.default_rng(0)
    codes = {label: random.normal(size=WIDTH) for label in sorted({*manifest["state"], *manifest["object"]})}
    means = [codes[s] + codes[o] for s, o in zip(manifest["state"], manifest["object"], strict=True)]
    return (np.stack(means) + 0.1 * random.normal(size=(len(manifest), WIDTH))).astype(np.float32)


def test_a_method_without_text_is_trained_at_once(project: Path, command: Command, table: pd.DataFrame):
    """By names, in another order than the table's, with a row of no image."""
    order = np.random.default_rng(1).permutation(len(table))
    names = np.array([*table["image"].to_numpy()[order], "another.png"], dtype=str)
    np.savez(project / "X.npz", features=np.vstack([features(table)[order], np.ones((1, WIDTH))]), images=names)
    result = command("data", "add", "mine", "table.csv", "--features", "X.npz", "--encoder", "none")
    assert result.code == 0
    assert "which need a text tower or patch tokens" in result.err
    params = load_params()
    assert params.run.datasets == ("shapes",), "run.methods has methods that need text"
    assert (params.datasets["mine"].encoder.name, params.datasets["mine"].features) == ("imported", project / "X.npz")
    assert "1 rows of features belong to no image" in result.out and command("data", "check", "mine").code == 0
    for words in (["prepare"], ["extract"], ["train", "--method", "kg_sp"], ["evaluate", "--method", "kg_sp"]):
        assert command(*words, "--dataset", "mine").code == 0
    assert np.allclose(read_features(ArtifactPaths().features("mine")).cls, features(table), atol=1e-2)
    trained = command("train", "--dataset", "mine", "--method", "cso")
    assert trained.refused("cso on mine needs the text tower", "datasets.mine.encoder", "or choose a method such as")
    assert command("train", "--dataset", "mine", "--method", "compcos").refused("needs word vectors")


def test_the_plan_names_a_missing_input_before_anything_is_loaded(project: Path, command: Command, table: pd.DataFrame):
    command("data", "add", "mine", "table.csv", "--features", "X.npy")
    text = (project / "params.yaml").read_text().replace("datasets: [shapes]", "datasets: [mine]", 1)
    (project / "params.yaml").write_text(text)
    with pytest.raises(DuplexError, match="clip on mine needs the text tower"):
        write_plan(load_params())
    (project / "params.yaml").write_text(text.replace("methods: [linear, clip", "methods: [kg_sp] # [linear, clip", 1))
    write_plan(load_params())


def test_a_named_encoder_lends_its_text_tower(project: Path, command: Command, table: pd.DataFrame):
    np.save(project / "X.npy", np.random.default_rng(0).normal(size=(len(table), 128)).astype(np.float32))
    assert command("data", "add", "mine", "table.csv", "--features", "X.npy", "--encoder", "tiny").code == 0
    assert load_params().run.datasets == ("shapes", "mine")
    params = load_params().model_copy(update={"methods": {"cso": load_params().methods["cso"]}})
    assert (
        plan_reproduction(ProjectData(params, "mine"), [0], None).topics["data"].startswith(f"{len(table)} images in ")
    )
    for words in (["prepare"], ["extract"], ["train", "--method", "clip"]):
        assert command(*words, "--dataset", "mine").code == 0


def test_other_features_make_the_extraction_run_again(project: Path, command: Command, table: pd.DataFrame):
    command("data", "add", "mine", "table.csv", "--features", "X.npy")
    before = ProjectData(load_params(), "mine").settings("extract")
    assert ProjectData(load_params(), "mine").settings("extract") == before
    np.save(project / "X.npy", features(table) + 1)
    assert ProjectData(load_params(), "mine").settings("extract") != before
    (project / "X.npy").unlink()
    with pytest.raises(DuplexError, match=r"X\.npy does not exist"):
        ProjectData(load_params(), "mine").settings("extract")
    assert "X.npy: missing" in command("doctor").out


def test_features_replaced_after_extract_are_refused(project: Path, command: Command, table: pd.DataFrame):
    command("data", "add", "mine", "table.csv", "--features", "X.npy", "--encoder", "none")
    words = "--dataset", "mine", "--method", "kg_sp"
    for stages in (["prepare", "-d", "mine"], ["extract", "-d", "mine"], ["train", *words], ["evaluate", *words]):
        assert command(*stages).code == 0
    np.save(project / "X.npy", features(table) + 1)
    for stage in ("train", "evaluate"):
        assert command(stage, *words).refused("its file of features has changed", "`duplex prepare --dataset mine`")
    assert "its file of features has changed" in command("doctor").out
    extracted = command("extract", "--dataset", "mine")
    assert extracted.code == 0
    assert extracted.err.startswith("preparing mine first: its file of features has changed\n")
    assert command("train", *words).code == 0
    (project / "X.npy").unlink()
    assert command("evaluate", *words).code == 0, "the file may be on another machine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda X, names: {"features": X[:, 0]}, "expected a float array of shape [images, width]"),
        (lambda X, names: {"features": X[:9], "images": names[:9]}, "has no features for"),
        (lambda X, names: {"features": X, "images": names[:-1]}, "expected"),
        (lambda X, names: {"features": X, "images": np.array([*names[:-1], names[0]])}, "twice"),
        (lambda X, names: {"features": X, "images": np.char.add("photos/", names)}, "has no features for"),
        (lambda X, names: {"features": X, "pictures": names}, "expected arrays named 'features' and 'images'"),
    ],
)
def test_files_that_do_not_fit_are_one_line(project: Path, command: Command, table: pd.DataFrame, change, message):
    content = change(features(table), table["image"].to_numpy().astype(str))
    np.save(project / "X.npy", content["features"]) if len(content) == 1 else np.savez(project / "X.npz", **content)
    before = (project / "params.yaml").read_bytes()
    name = "X.npy" if len(content) == 1 else "X.npz"
    assert command("data", "add", "mine", "table.csv", "--features", name).refused(message)
    assert (project / "params.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table.csv", "--features", "X.npy", "--encoder", "tiny"], "tiny makes features of width 128"),
        (
            ["table.csv", "--features", "X.npy", "--encoder", "ViT-B-32-quickgelu", "--weights", "openai"],
            "features of width 512",
        ),
        (["table.csv", "--features", "absent.npy"], "absent.npy does not exist"),
        (["table.csv", "--encoder", "none"], "--encoder none needs --features"),
        (["table.csv", "--features", "X.npy", "--encoder", "none", "--weights", "openai"], "--weights needs"),
        (["pictures", "--features", "X.npy"], "images of a folder have no fixed order"),
    ],
)
def test_encoders_and_folders_that_do_not_fit_are_one_line(project, command, table, words, message):
    for name in table["image"]:
        state, thing = name.split("/")[0].split("_")
        place = project / "pictures" / state / thing / Path(name).name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    assert command("data", "add", "mine", *words).refused(message)


def test_rows_that_are_not_finite_are_named(project: Path, command: Command, table: pd.DataFrame):
    values = features(table)
    values[7, 3] = np.nan
    np.save(project / "X.npy", values)
    result = command("data", "add", "mine", "table.csv", "--features", "X.npy")
    assert result.code == 0
    assert f"problem: 1 rows of features are zero or not finite: {table['image'][7]}" in result.out
    assert command("prepare", "--dataset", "mine").code == 0
    assert command("extract", "--dataset", "mine").code == 0
    assert np.flatnonzero(read_features(ArtifactPaths().features("mine")).bad).tolist() == [7]
    values[::3] = np.inf
    np.save(project / "X.npy", values)
    assert command("prepare", "--dataset", "mine").code == 0
    assert command("extract", "--dataset", "mine").refused("rows are zero or not finite (first: ", "max_bad")
    result = command("data", "add", "mine", "table.csv", "--features", "X.npy")
    assert result.code == 1
    assert "mine was not added" in result.err


def splits_of_copies(table: pd.DataFrame, manifest: pd.DataFrame) -> pd.Series:
    """Return how many splits each feature has, where the rows i and i + len(table) / 2 have equal features."""
    place = dict(zip(table["image"], np.arange(len(table)) % (len(table) // 2), strict=True))
    return manifest.groupby(manifest["image"].map(place))["split"].nunique()


@pytest.mark.parametrize("form", [".npy", ".npz"])
def test_images_of_equal_features_stay_in_one_split(project: Path, command: Command, table: pd.DataFrame, form: str):
    twice = pd.concat([table, table.assign(image="again/" + table["image"])], ignore_index=True)
    values = np.concatenate([features(table)] * 2)
    twice.drop(columns="split").to_csv(project / "twice.csv", index=False)
    np.save(project / "X.npy", values)
    np.savez(project / "X.npz", features=values[::-1], images=twice["image"].to_numpy().astype(str)[::-1])
    before = ProjectData(load_params(), "shapes").settings("prepare").keys()
    result = command("data", "add", "mine", "twice.csv", "--features", f"X{form}")
    assert result.code == 0
    assert f"{len(table)} images have the same features as another image" in result.out
    assert "in two splits" not in result.out
    assert ProjectData(load_params(), "mine").settings("prepare").keys() == before | {"features"}
    assert command("data", "split", "mine", "--splits", "1", "--no-run").code == 0
    for name in ("mine", "mine-split1"):
        assert command("prepare", "--dataset", name).code == 0
        assert (splits_of_copies(twice, pd.read_csv(ArtifactPaths().manifest(name))) == 1).all()


def test_rows_are_the_tables_where_a_split_leaves_images_out(project: Path, command: Command, table: pd.DataFrame):
    table.drop(columns="split").to_csv("table.csv", index=False)
    assert command("data", "add", "mine", "table.csv", "--features", "X.npy").code == 0
    source = read_yaml(Path("datasets/mine.yaml"))["source"]
    write_dataset("mine", {"source": {**source, "split": {"images_per_pair": 1}}}, run=False)
    assert [command(stage, "--dataset", "mine").code for stage in ("prepare", "extract")] == [0, 0]
    images = pd.read_csv(ArtifactPaths().manifest("mine"))["image"]
    rows = [table["image"].tolist().index(image) for image in images]
    assert len(rows) < len(table)
    assert np.allclose(read_features(ArtifactPaths().features("mine")).cls, features(table)[rows], atol=1e-2)


def test_equal_features_in_two_splits_of_the_user_are_reported(project: Path, command: Command, table: pd.DataFrame):
    values = features(table)
    values[table.index[table["split"] == "test"][0]] = values[table.index[table["split"] == "train"][0]]
    np.save(project / "X.npy", values)
    result = command("data", "add", "mine", "table.csv", "--features", "X.npy")
    assert result.code == 0
    assert "problem: 1 image features are in two splits (a leak)" in result.out


def test_features_of_repeated_lines_are_refused(project: Path, command: Command, table: pd.DataFrame):
    pd.concat([table, table[:1]]).to_csv(project / "table.csv", index=False)
    values = features(table)
    np.save(project / "X.npy", np.concatenate([values, values[:1]]))
    added = command("data", "add", "mine", "table.csv", "--features", "X.npy")
    assert added.refused(f"X.npy has {len(table) + 1} rows, but the data set has {len(table)} images")
    np.save(project / "X.npy", values)
    assert command("data", "add", "mine", "table.csv", "--features", "X.npy").code == 0
