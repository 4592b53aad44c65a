"""Sources of every kind: drawn images, tables and folder trees."""

import csv
import io
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duplex.data.shapes import shapes_manifest
from duplex.data.sources import detect_source, draw_missing_images, load_source, read_folder
from duplex.data.tables import count_dataset, read_manifest, read_table, write_manifest
from duplex.errors import DuplexError, UsageError
from duplex.options import SourceOptions, SplitOptions
from duplex.recognition.labelled_folder import read_labelled_folder
from tests.data.makers import make_folder, make_table, rows
from tests.subprocesses import ENVIRONMENT

ANY_FILE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
GOOD = "image,state,object,split\na b.jpg,red,car,train\nü-1.2.jpg,Faux.Fur,Boots.Mid-Calf,val\nc.jpg,red,car,test\n"


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("split", [True, False])
def test_tables_load_with_and_without_a_split(tmp_path: Path, suffix: str, split: bool) -> None:
    path = make_table(tmp_path, suffix, split=split)
    source = detect_source(path)
    assert (source.kind, source.root, source.table) == ("table", tmp_path, path)
    dataset = load_source(source)
    assert len(dataset.manifest) == len(rows()) and dataset.made_split is not split
    assert all((tmp_path / image).is_file() for image in dataset.manifest["image"])
    if split:
        assert list(dataset.manifest["split"]) == [where for *_, where in rows()]
    assert set(dataset.manifest["split"]) == {"train", "val", "test"}
    assert dataset.notes == {}


READING = """
import sys
import torch
from pathlib import Path
from duplex.data.tables import read_table
read_table(Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_process_that_read_parquet_beside_torch_ends_well(tmp_path: Path) -> None:
    """Arrow's threads, given a Python file, abort every second process at its exit on a single core."""
    path = make_table(tmp_path, ".parquet", split=True)
    core = "import os; hasattr(os, 'sched_setaffinity') and os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])"
    command = [sys.executable, "-c", core + READING, str(path)]
    for _ in range(4):
        assert subprocess.run(command, env=ENVIRONMENT, check=False).returncode == 0


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_folders_load_and_the_split_follows_the_seed(tmp_path: Path, form: str) -> None:
    count = make_folder(tmp_path, form)
    one, same, other = (load_source(SourceOptions("folder", tmp_path, split=SplitOptions(seed=s))) for s in (1, 1, 2))
    assert len(one.manifest) == count and one.made_split
    assert sorted(zip(one.manifest["state"], one.manifest["object"], strict=True)) == sorted(
        (state, thing) for _, state, thing, _ in rows()
    )
    assert one.manifest.equals(same.manifest) and not one.manifest.equals(other.manifest)


@pytest.mark.parametrize(
    "data",
    [
        GOOD.encode(),
        GOOD.replace("\n", "\r\n").encode("utf-8-sig"),
        GOOD.replace("\n", "\n\n,,,\n").encode(),
        GOOD.replace(",", ";").encode("utf-16"),
        GOOD.replace("image", " image ").replace("red", " red ").encode(),
        GOOD.replace("a b.jpg", '"a b.jpg"').rstrip().encode(),
        GOOD.replace("red,", ' "red" , ').replace('"red" ', '"red"').replace(",car", ', "car"').encode(),
    ],
    ids=["plain", "crlf bom", "blank rows", "semicolons utf-16", "spaces", "quotes", "spaces before quotes"],
)
def test_tables_load_from_any_encoding_and_separator(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t.csv").write_bytes(data)
    assert read_table(tmp_path / "t.csv").to_numpy().tolist() == [line.split(",") for line in GOOD.splitlines()[1:]]


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "is empty"), ("image,state,object\n", "has no rows"), ("image,state\nx,y\n", "no column 'object'"),
     ("sep=;\nimage;state;object\nx;y;z\n", "now: 'sep=', ''"),
     ("image,state,object,state\nx,y,z,w\n", "two columns 'state'"),
     ("image,state,object\nx,y\n", "line 2 has 2 cells"), ("image,state,object\nx,,z\n", "line 2: the state is empty"),
     ("image,state,object\n../x,y,z\n", "contains `..`"), ("image,state,object\n/x,y,z\n", "is absolute"),
     ("image,state,object,split\nx,y,z,Train\n", "the split 'Train'"),
     ("image,state,object,split\nx,y,z,train\nw,y,z,\n", "'split' is empty in 1 of 2 rows"),
     ('image,state,object\n"x,y,z\n', "line 2"), ('image,state,object\nx,"y\ny",z\n', "contains an unprintable"),
     ("image,state,object,split\nx,y,z,train\nx,y,w,train\n", "'x' has two different rows"),
     ("image,state,object,split\nx,y,z,train\nw,y,z,val\n", "has no test images")],
)  # fmt: skip
def test_bad_tables_are_errors_of_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(DuplexError, match=says) as caught:
        load_source(SourceOptions("table", tmp_path, path))
    assert "t.csv" in str(caught.value) and "\n" not in str(caught.value)


def test_repeated_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(GOOD + "c.jpg,red,car,test\n./c.jpg,red,car,test\n")
    dataset = load_source(SourceOptions("table", tmp_path, path))
    assert len(dataset.manifest) == 3
    assert dataset.notes == {"rows left out because they repeat another row": 2}


def test_other_encodings_and_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(GOOD.encode("latin-1"))
    with pytest.raises(DuplexError, match="not UTF-8"):
        read_table(tmp_path / "t.csv")
    (tmp_path / "t.xlsx").touch()
    with pytest.raises(UsageError, match="is in no supported table format"):
        read_table(tmp_path / "t.xlsx")
    with pytest.raises(UsageError, match="neither a folder nor a table"):
        detect_source(tmp_path / "t.xlsx")
    with pytest.raises(UsageError, match="--images is for tables"):
        detect_source(tmp_path, root=tmp_path)


@ANY_FILE
@given(data=st.one_of(st.binary(max_size=200), st.text('imagestateobject,;\t\r\n" é.', max_size=60).map(str.encode)))
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_any_bytes_give_a_table_or_an_error(tmp_path: Path, suffix: str, data: bytes) -> None:
    path = tmp_path / f"t{suffix}"
    path.write_bytes((b"image,state,object\n" if suffix == ".csv" else b"") + data)
    try:
        frame = read_table(path)
    except DuplexError as error:
        assert "\n" not in str(error)
        return
    lines = csv.reader(io.StringIO(data.decode(), newline=""))
    assert len(frame) == sum(any(cell.strip() for cell in line) for line in lines)


@ANY_FILE
@given(data=st.data())
def test_damaged_parquet_gives_its_rows_or_an_error(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "t.parquet"
    pd.DataFrame({"image": ["a", "b"], "state": ["x", "y"], "object": ["o", "o"]}).to_parquet(path)
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    cut = data.draw(st.booleans())
    path.write_bytes(whole[:at] if cut else whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
    try:
        assert len(read_table(path)) == 2
    except DuplexError as error:
        assert "t.parquet" in str(error)


@pytest.mark.parametrize(
    ("column", "says"),
    [([1, 2], "1: the column 'state' holds 1"), ([None, "x"], "state is empty"), ([b"x", b"y"], "'state' holds b'x'")],
)
def test_parquet_cells_must_be_text(tmp_path: Path, column: list[object], says: str) -> None:
    path = tmp_path / "t.parquet"
    pd.DataFrame({"image": ["a", "b"], "state": column, "object": ["o", "o"]}).to_parquet(path)
    with pytest.raises(DuplexError, match=says):
        read_table(path)


@pytest.mark.parametrize(
    ("paths", "says"),
    [([], "holds no images"), (["x.jpg"], "does not have the form"), (["red car/x.jpg", "red/car/y.jpg"], "mixes"),
     (["train/car/x.jpg", "Val/car/y.jpg"], "are named after splits, not states"),
     (["red_star/train/x.jpg", "red_star/test/y.jpg"], "test, train are named after splits, not objects"),
     (["fold0/car/x.jpg", "fold1/car/y.jpg"], "are named after splits, not states"),
     (["car/x.jpg"], "is not a state and an object"), (["red/---/x.jpg", "__/car/x.jpg"], "no word for a prompt")],
)  # fmt: skip
def test_bad_folders_are_errors(tmp_path: Path, paths: list[str], says: str) -> None:
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    with pytest.raises(DuplexError, match=says):
        load_source(SourceOptions("folder", tmp_path))


def test_names_with_spaces_dots_hyphens_and_accents_become_labels(tmp_path: Path) -> None:
    names = [("Faux.Fur", "Boots.Mid-Calf"), ("sur élevé", "lit d'été"), ("NA", "null")]
    for state, thing in names:
        (tmp_path / state / thing).mkdir(parents=True)
        (tmp_path / state / thing / "Bild 1.2-é.JPG").touch()
    frame, notes = read_folder(tmp_path)
    assert notes == {}
    assert sorted(zip(frame["state"], frame["object"], strict=True)) == sorted(names)


def test_a_split_word_beside_other_labels_is_a_label(tmp_path: Path) -> None:
    for name in ("red/train", "red/car", "test/car"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.png").touch()
    assert len(read_folder(tmp_path)[0]) == 3
    shutil.rmtree(tmp_path / "red")
    assert read_folder(tmp_path)[0]["state"].tolist() == ["test"]  # of one state there are no splits


def test_files_that_are_no_images_are_counted_wherever_a_folder_is_read(tmp_path: Path) -> None:
    make_folder(tmp_path, "nested")
    folder = next(path for path in sorted(tmp_path.rglob("*")) if path.is_file()).parent
    for name in ("a.raw", "b.RAW", "noname", "list.txt", ".hidden"):
        (folder / name).touch()
    note = "files skipped (2 .raw, 1 without a suffix)"
    assert load_source(SourceOptions("folder", tmp_path)).notes[note] == 3
    assert f"{note}: 3" in read_labelled_folder(tmp_path).notes


def test_images_that_are_links_out_of_the_root_are_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "secret.jpg").touch()
    (tmp_path / "root/a b.jpg").symlink_to(tmp_path / "secret.jpg")
    path = tmp_path / "t.csv"
    path.write_text(GOOD)
    with pytest.raises(DuplexError, match="leaves the images' folder"):
        load_source(SourceOptions("table", tmp_path / "root", path))


def test_shapes_load_without_images_and_are_drawn_on_demand(tmp_path: Path) -> None:
    source = SourceOptions("shapes", tmp_path / "shapes", seed=3)
    dataset = load_source(source)
    assert dataset.manifest.equals(shapes_manifest(3)) and not (tmp_path / "shapes").exists()
    assert count_dataset(dataset.labels, dataset.manifest).splits["train"].seen == len(dataset.labels.pairs["train"])
    draw_missing_images(source, dataset.manifest.head(3))
    assert len(list((tmp_path / "shapes").rglob("*.png"))) == 3


def test_a_source_needs_its_folder_and_a_table_source_its_table(tmp_path: Path) -> None:
    for kind in ("standard", "table", "folder"):
        with pytest.raises(UsageError, match="there is no folder"):
            load_source(SourceOptions(kind, tmp_path / "none"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="but no `table`; add `table: "):
        load_source(SourceOptions("table", tmp_path))


def test_labels_with_commas_and_quotes_survive_the_manifest(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    pairs = ('"""a"", b","c;d"', "NA,1")
    lines = [f"{split} {i}.jpg,{pairs[i]},{split}" for split in ("train", "val", "test") for i in range(2)]
    table.write_text("image,state,object,split\n" + "\n".join(lines))
    dataset = load_source(SourceOptions("table", tmp_path, table))
    assert dataset.labels.states == ('"a", b', "NA") and dataset.labels.objects == ("1", "c;d")
    write_manifest(dataset.manifest, tmp_path / "manifest.csv")
    assert read_manifest(tmp_path / "manifest.csv").equals(dataset.manifest)
