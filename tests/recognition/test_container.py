"""The Dockerfile: what it copies and runs exists; its wheel serves a model, and its health check sees the server."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.main import get_command

pytest.importorskip("fastapi")

from duplex.cli import app
from tests.subprocesses import ROOT
from tests.wheels import PIP

TEXT = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
LINES = [line.partition(" ") for line in TEXT.splitlines() if line and not line.startswith("#")]
LAST = max(place for place, (word, _, _) in enumerate(LINES) if word == "FROM")
FINAL = {word: text for word, _, text in LINES[LAST:]}  # the instructions of the image that runs


def copied() -> list[str]:
    """What is copied from the repository."""
    every = [text.split() for word, _, text in LINES if word == "COPY" and "--from" not in text]
    return [source for *sources, _ in every for source in sources]


def command(name: str) -> list[str]:
    return json.loads(FINAL[name].rpartition("CMD ")[2] or FINAL[name])


def test_what_is_copied_and_installed_exists():
    assert {word for word, _, _ in LINES} <= {
        "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD",
    }  # fmt: skip
    assert copied() and all((ROOT / name).exists() for name in copied())
    (install,) = (text for word, _, text in LINES if word == "RUN" and "pip install" in text)
    assert re.search(r"--constraint (\S+)", install)[1] in copied()
    assert install.endswith("'.[serve]'") and "download.pytorch.org/whl/cpu" in install
    (python,) = {text.split()[0] for word, _, text in LINES if word == "FROM"}
    minor = python.removeprefix("python:").removesuffix("-slim")
    assert f"Python :: {minor}" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_server_is_an_ordinary_user_that_listens_where_it_is_asked():
    assert f"useradd --create-home {FINAL['USER']}" in FINAL["RUN"]
    place = [word for word, _, _ in LINES[LAST:]]
    assert place.index("USER") < place.index("ENTRYPOINT") and place[-1] == "CMD"
    name, verb, *options = command("ENTRYPOINT")
    assert name == "duplex"
    parsed = get_command(app).commands[verb].make_context(verb, [*options, *command("CMD")]).params
    assert (parsed["host"], parsed["port"], parsed["model"]) == ("0.0.0.0", int(FINAL["EXPOSE"]), "/model")
    assert f"//127.0.0.1:{FINAL['EXPOSE']}/health" in command("HEALTHCHECK")[-1]


def healthy(port: int) -> bool:
    _, *words = [word.replace(f":{FINAL['EXPOSE']}/", f":{port}/") for word in command("HEALTHCHECK")]
    return subprocess.run([sys.executable, *words], capture_output=True, check=False).returncode == 0


def test_the_health_check_sees_whether_the_server_runs(server):
    assert healthy(server.port)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    assert not healthy(port)


@pytest.mark.slow
def test_the_copied_files_are_a_package_that_serves(tmp_path: Path):
    (tmp_path / "source").mkdir()
    for name in copied():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, tmp_path / "source" / name)
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, tmp_path / "source"]
    subprocess.run([*PIP, *build], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = "from duplex.cli import main; import duplex; print(duplex.__file__, flush=True); main()"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    words = [sys.executable, "-c", code, *command("ENTRYPOINT")[1:], str(tmp_path / "none")]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert "none does not exist; expected a run" in done.stderr
