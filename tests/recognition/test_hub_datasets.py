"""`hf-datasets:OWNER/NAME`: Parquet files of a simulated hub become one table, with the hub's splits or a drawn one."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
from pyarrow import parquet

from duplex.data.download import local_source
from duplex.data.shapes import draw
from duplex.errors import UsageError
from tests.data.makers import encoded
from tests.recognition.drawn_folder import LACKING, OBJECTS, STATES
from tests.recognition.hub import Hub

HELD_OUT = {"validation": {("red", "star"), ("blue", "heart")}, "test": {("striped", "square"), ("green", "moon")}}
LOAD = """
import json, sys
from duplex import load_dataset
said = []
for name in sys.argv[2:]:
    try:
        said.append(repr(load_dataset(f"hf-datasets:{name}", encoder="tiny", cache=sys.argv[1])))
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
print(json.dumps(said))
"""


def shard(pairs: list[tuple[str, str]], numbers: range, names: tuple[str, str] = ("state", "object")) -> bytes:
    rows = []
    for state, thing in pairs:
        for number in numbers:
            image = encoded(draw(f"{state}_{thing}/{number:04d}.png"))
            rows.append({"image": {"bytes": image, "path": "a.png"}, names[0]: state, names[1]: thing})
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


@pytest.mark.slow
def test_data_sets_of_the_hub_are_loaded(tmp_path):
    every = [(state, thing) for state in STATES for thing in OBJECTS if (state, thing) not in LACKING]
    seen = [pair for pair in every if pair not in HELD_OUT["validation"] | HELD_OUT["test"]]
    whole = {"data/train-00000-of-00001.parquet": shard(seen, range(3))}
    for split, pairs in HELD_OUT.items():
        whole[f"data/{split}-00000-of-00001.parquet"] = shard([*sorted(pairs), *seen[:3]], range(4, 6))
    plain = {"part-0.parquet": shard(every[:11], range(4)), "part-1.parquet": shard(every[11:], range(4))}
    with Hub() as hub:
        hub.files |= {"owner/split": {**whole, "README.md": b"-"}, "owner/plain": plain, "owner/text": {"a.txt": b"-"}}
        hub.files["owner/others"] = {"a.parquet": shard(every, range(1), ("attr", "obj"))}
        settings = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        names = ["owner/split", "owner/plain", "owner/text", "owner/others", "owner/none", "a b/c", "owner/split"]
        command = [sys.executable, "-c", LOAD, str(tmp_path / "cache"), *names]
        environment = {**os.environ, **settings, "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        fetched = [request for request in hub.requests if request.startswith("GET") and "resolve" in request]
    split, plain_, *errors, again = json.loads(done.stdout)
    counts = f"{3 * len(seen)} train, 10 val, 10 test images"
    assert split == again == f"Dataset(table: {counts}; 5 states, 5 objects, {len(seen)} seen pairs)"
    assert plain_.startswith("Dataset(table: ") and "22 seen pairs" not in plain_
    assert len(fetched) == len(set(fetched)) and not any("README" in request for request in fetched)
    assert all(error.startswith("UsageError: ") and "\n" not in error for error in errors), errors
    for error, said in zip(
        errors,
        ["has no Parquet files", "no column 'state'", "hf-datasets:owner/none could not be downloaded", "Repo id must"],
        strict=True,
    ):
        assert said in error
    table = pd.read_csv(tmp_path / "cache" / "hf-datasets" / "owner" / "plain" / "table.csv")
    assert list(table) == ["image", "state", "object"] and len(table) == 4 * len(every)


def test_other_sources_are_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert local_source("pictures", tmp_path / "cache") == Path.cwd() / "pictures"
    with pytest.raises(UsageError, match="source is ''; expected a path"):
        local_source("", tmp_path)
