"""Images in HEIC and AVIF, crops, bytes in a Parquet table, and labels of Label Studio: all through one loader."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from duplex import load_dataset
from duplex.data import images
from duplex.data.check import check_dataset
from duplex.data.contents import content_keys, file_digests, read_digests
from duplex.data.images import MachineFault, image_fault, read_image
from duplex.data.label_studio import pre_annotated
from duplex.data.shapes import draw
from duplex.data.sources import detect_source, load_source, read_folder
from duplex.data.tables import read_table
from duplex.errors import DuplexError, UsageError
from tests.data.makers import encoded

WORDS = list(product(("red", "blue", "green"), ("star", "heart", "moon")))


def test_heic_and_avif_are_read_upright(tmp_path):
    pytest.importorskip("pillow_heif")
    wide = draw("red_star/0001.png").resize((64, 32))
    for name in ("red/star/a.heic", "red/heart/a.avif", "blue/star/a.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        exif = Image.Exif()
        exif[images.ORIENTATION_TAG] = 1 if name.endswith("heic") else 6  # cameras turn the pixels of HEIC themselves
        (wide.rotate(-90, expand=True) if name.endswith("heic") else wide).save(tmp_path / name, exif=exif, quality=90)
    frame, notes = read_folder(tmp_path)
    assert len(frame) == 3 and not notes
    upright = np.asarray(wide.rotate(-90, expand=True), int)
    for name in frame["image"]:
        pixels = np.asarray(read_image(tmp_path / name), int)
        assert pixels.shape == (64, 32, 3) and abs(pixels - upright).mean() < 8
    assert len(set(content_keys(tmp_path, frame["image"].tolist()))) == 1, "near-copies"


def test_heic_without_the_extra_is_a_sentence_that_names_it(tmp_path, monkeypatch):
    pytest.importorskip("pillow_heif")
    for state, thing in WORDS:
        (tmp_path / state / thing).mkdir(parents=True)
        draw(f"{state}_{thing}/0001.png").save(tmp_path / state / thing / "a.png")
        draw(f"{state}_{thing}/0002.png").save(tmp_path / state / thing / "b.heic")
    monkeypatch.setattr(images, "READABLE", tuple(name for name in images.READABLE if name != "HEIF"))
    monkeypatch.setattr(images, "IMAGE_SUFFIXES", images.IMAGE_SUFFIXES - images.HEIF_SUFFIXES)
    remedy = "run pip install 'duplex-czsl[heif]' to read HEIC images"
    assert f"files skipped (9 .heic; {remedy})" in load_source(detect_source(tmp_path)).notes
    with pytest.raises(MachineFault, match=r"b.heic is a HEIC image; run pip install 'duplex-czsl\[heif\]'"):
        image_fault(tmp_path / "red/star/b.heic")


def scenes(folder: Path, columns: str = "image,x,y,width,height,state,object") -> Path:
    """A table of nine objects, all of them on one image, and the same objects as files of their own."""
    sheet = Image.new("RGB", (96, 96))
    lines = [columns]
    for place, (state, thing) in enumerate(WORDS):
        corner = (32 * (place % 3), 32 * (place // 3))
        sheet.paste(draw(f"{state}_{thing}/0001.png").resize((32, 32)), corner)
        lines.append(f"sheet.png,{corner[0]},{corner[1]}.0,32,32,{state},{thing}")
    sheet.save(folder / "sheet.png")
    for place, (x, y) in enumerate(product((0, 32, 64), repeat=2)):
        sheet.crop((y, x, y + 32, x + 32)).save(folder / f"{place}.png")
    (folder / "table.csv").write_text("\n".join(lines))
    return folder / "table.csv"


def test_a_crop_is_an_image_of_its_own(tmp_path):
    table = read_table(scenes(tmp_path))
    names = table["image"].tolist()
    assert names[5] == "sheet.png#xywh=64,32,32,32" and list(table) == ["image", "state", "object"]
    assert read_image(tmp_path / names[5]).tobytes() == read_image(tmp_path / "5.png").tobytes()
    files = [f"{place}.png" for place in range(9)]
    keys = content_keys(tmp_path, [*names, *files, "sheet.png"])
    assert keys[:9] == keys[9:18] and len(set(keys)) == 10
    digests, pixels = read_digests(tmp_path, [*names, *files], {})
    assert digests[:9] == file_digests(tmp_path, names) and len(set(digests)) == 18
    assert [pixels[one] for one in digests[:9]] == [pixels[other] for other in digests[9:]]


def test_features_are_those_of_the_crops(tmp_path):
    cropped = load_dataset(scenes(tmp_path), encoder="tiny", cache=tmp_path / "cache")
    issues = check_dataset(load_source(detect_source(tmp_path / "table.csv")), tmp_path)
    assert not [issue for issue in issues if issue.problem and issue.count and "split" not in issue.what]
    rows = cropped.manifest["image"].map(
        {name: k for k, name in enumerate(read_table(tmp_path / "table.csv")["image"])}
    )
    alone = pd.DataFrame({"image": [f"{k}.png" for k in rows], **cropped.manifest[["state", "object", "split"]]})
    alone.to_csv(tmp_path / "alone.csv", index=False)
    files = load_dataset(tmp_path / "alone.csv", encoder="tiny", cache=tmp_path / "other")
    np.testing.assert_array_equal(cropped.features, files.features)


@pytest.mark.parametrize(
    ("cells", "said"),
    [("-1,0,5,5", "crop is x -1"), ("0,0,0,5", "width 0"), ("a,0,5,5", "x a,"), (f"{2**31},0,1,1", "x 2147483648")],
)
def test_a_crop_that_is_none_is_one_line(tmp_path, cells, said):
    path = tmp_path / "t.csv"
    path.write_text(f"image,x,y,width,height,state,object\na.png,,,,,red,star\na.png,{cells},red,star\n")
    with pytest.raises(DuplexError, match=f"line 3: the crop is .*{said[-3:]}") as caught:
        read_table(path)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_crop_outside_of_its_image_is_an_unreadable_image(tmp_path):
    table = scenes(tmp_path)
    table.write_text(table.read_text().replace("64,64.0,32,32", "64,64.0,33,32"))
    assert image_fault(tmp_path / "sheet.png#xywh=64,64,33,32") == "crop outside of the image"
    with pytest.raises(DuplexError, match="crop outside of the image") as caught:
        load_dataset(table, encoder="tiny", cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_images_in_a_parquet_table_become_files_beside_it(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = []
    for number, (state, thing) in enumerate(WORDS):
        image = encoded(draw(f"{state}_{thing}/0001.png"))
        rows.append({"image": {"bytes": image, "path": "a.png"}, "state": state, "object": number % 3})
    names = {"names": ["star", "heart", "moon"], "_type": "ClassLabel"}
    info = json.dumps({"info": {"features": {"object": names, "image": {"_type": "Image"}}}})
    table = pyarrow.Table.from_pylist(rows).replace_schema_metadata({"huggingface": info})
    parquet.write_table(table, tmp_path / "shop.parquet")
    data = load_dataset(tmp_path / "shop.parquet", encoder="tiny", cache=tmp_path / "cache")
    assert sorted(zip(data.manifest["state"], data.manifest["object"], strict=True)) == sorted(WORDS)
    written = sorted((tmp_path / "shop-images").iterdir())
    assert len(written) == 9 and {path.suffix for path in written} == {".png"}
    frame = read_table(tmp_path / "shop.parquet")  # again: nothing is written twice
    assert sorted((tmp_path / "shop-images").iterdir()) == written
    assert (tmp_path / frame["image"][0]).read_bytes() == rows[0]["image"]["bytes"]


def test_numbered_labels_of_parquet_may_be_missing(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    kinds = {name: {"names": ["dry", "wet"], "_type": "ClassLabel"} for name in ("state", "object")}
    columns = {
        "image": ["a.png", "b.png", "c.png"], "state": [0, 1, 1], "object": [1, -1, None], "split": ["train"] * 3,
    }  # fmt: skip
    table = pyarrow.table(columns).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": kinds}})})
    parquet.write_table(table, tmp_path / "t.parquet")
    cells = read_table(tmp_path / "t.parquet").to_numpy().tolist()
    assert [row[1:3] for row in cells] == [["dry", "wet"], ["wet", ""], ["wet", ""]]
    columns["split"] = ["train", "test", "train"]
    table = pyarrow.table(columns).replace_schema_metadata(table.schema.metadata)
    parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(DuplexError, match="row 2: the object is empty"):
        read_table(tmp_path / "t.parquet")


def choice(name: str, value: str, **more: object) -> dict:
    return {"from_name": name, "to_name": "image", "type": "choices", "value": {"choices": [value]}, **more}


def region(name: str, box: tuple[float, ...], label: str) -> dict:
    sides = dict(zip(("x", "y", "width", "height"), box, strict=True))
    size = {"original_width": 200, "original_height": 100}
    return {"from_name": "object", "id": name, **size, "value": {**sides, "rectanglelabels": [label]}}


def write_tasks(path: Path, *tasks: tuple[str, list[dict]]) -> Path:
    record = [{"id": k, "data": {"image": image}, "annotations": [{"result": r}] if r else []} for k, (image, r) in
              enumerate(tasks)]  # fmt: skip
    path.write_text(json.dumps(record))
    return path


def test_label_studios_export_is_a_table(tmp_path):
    path = write_tasks(
        tmp_path / "export.json",
        ("/data/local-files/?d=shop/a%20b.jpg", [choice("state", "red"), choice("object", "star")]),
        ("/data/upload/3/0a1b2c3d-c.jpg", [
            region("one", (0, 0, 33.3, 50), "heart"), choice("state", "blue", id="one"),
            region("two", (50, 25, 50, 75), "moon"), choice("state", "green", id="two"),
        ]),
        ("unlabelled.jpg", []),
    )  # fmt: skip
    assert read_table(path).to_numpy().tolist() == [
        ["shop/a b.jpg", "red", "star"],
        ["c.jpg#xywh=0,0,67,50", "blue", "heart"],
        ["c.jpg#xywh=100,25,100,75", "green", "moon"],
    ]


def test_the_edges_of_a_crop_are_rounded_to_the_nearest_pixel(tmp_path):
    path, boxes = tmp_path / "crops.csv", np.random.default_rng(0).uniform(1, 60, (200, 4)).round(1)
    frame = pd.DataFrame(boxes, columns=["x", "y", "width", "height"]).assign(image="a.jpg", state="red", object="star")
    frame.to_csv(path, index=False)
    found = read_table(path)["image"].str.extract(r"#xywh=(\d+),(\d+),(\d+),(\d+)$").to_numpy(int)
    for (left, top, width, height), (x, y, w, h) in zip(found.tolist(), boxes.tolist(), strict=True):
        assert max(abs(left - x), abs(top - y)) <= 0.5
        assert max(abs(left + width - (x + w)), abs(top + height - (y + h))) <= 0.5 + 1e-9


def test_rotated_rectangles_are_refused(tmp_path):
    turned = region("one", (50, 10, 20, 10), "heart")
    turned["value"]["rotation"] = 90
    path = write_tasks(tmp_path / "export.json", ("c.jpg", [turned, choice("state", "blue", id="one")]))
    with pytest.raises(DuplexError, match="task 0 has a rotated rectangle"):
        read_table(path)


def test_another_annotation_export_is_one_line(tmp_path):
    path = tmp_path / "coco.json"
    for text in (json.dumps({"images": [], "annotations": []}), "[1]", "no JSON", '[{"image": "a.jpg"}]'):
        path.write_text(text)
        with pytest.raises(DuplexError, match="is not Label Studio's JSON export"):
            read_table(path)
    write_tasks(path, ("a.jpg", [choice("colour", "red"), choice("object", "star")]))
    with pytest.raises(DuplexError, match=r"task 0 has no state \(labels found: colour, object\); give it a state"):
        read_table(path)
    write_tasks(path, ("a.jpg", []))
    with pytest.raises(DuplexError, match="has no rows"):
        read_table(path)
    with pytest.raises(UsageError, match=r"save it as one of \.csv, \.tsv, \.parquet, \.pq, \.json"):
        read_table(tmp_path / "t.xlsx")


def test_pre_annotations_are_read_back_once_they_are_accepted(tmp_path):
    record = {"top": [{"state": "red", "object": "star", "probability": 0.7}]}
    task = pre_annotated("my shop/ä.jpg", record)
    assert task["predictions"][0]["score"] == 0.7
    accepted = {"id": 1, "data": task["data"], "annotations": task["predictions"]}
    (tmp_path / "export.json").write_text(json.dumps([accepted]))
    assert read_table(tmp_path / "export.json").to_numpy().tolist() == [["my shop/ä.jpg", "red", "star"]]
    assert pre_annotated("b.jpg", {"error": "missing"})["predictions"] == []
