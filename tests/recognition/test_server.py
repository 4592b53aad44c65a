"""The server with programs, hostile clients and slow connections."""

import json
import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fastapi")


from duplex import Recognizer
from duplex.cli.model import _training_images
from tests.data.makers import encoded
from tests.features.test_image_files import bomb
from tests.recognition.serving import BOUNDARY, RunningServer, form, form_headers

pytestmark = pytest.mark.slow


def data_of(trained, place: int = 0) -> bytes:
    return trained.images()[place].read_bytes()


def test_answers_equal_the_recognizers(trained, server):
    """Of one request with all images, and of simultaneous requests with one image and a number of answers each."""
    tops = [1 + place % 4 for place in range(16)]
    images = trained.images()[:16]
    files, expected = [(path.name, path.read_bytes()) for path in images], Recognizer.load(trained.run(), device="cpu")
    status, together = server.predict(*files)
    before = server.metrics
    with ThreadPoolExecutor(16) as clients:
        replies = list(clients.map(lambda file, top: server.predict(file, query=f"?top={top}"), files, tops))
    after = server.metrics
    assert status == 200 and [status for status, _ in replies] == [200] * 16
    alone = [reply["answers"][0] for _, reply in replies]
    for records, counts in ((together["answers"], [3] * 16), (alone, tops)):
        for record, answer, path, top in zip(records, expected(images), images, counts, strict=True):
            assert record["image"] == path.name
            assert record["top"][0]["score"] == pytest.approx(answer.best.score, abs=5e-3)
            assert len(record["top"]) == len(record["states"]) == top
    assert after["duplex_images_total"] - before["duplex_images_total"] == 16
    assert after["duplex_batches_total"] - before["duplex_batches_total"] < 16, "some were encoded together"


def test_labels_health_openapi_and_pages(trained, server):
    labels = json.loads(server.ask("GET", "/labels")[1])
    candidates = Recognizer.load(trained.run(), device="cpu").candidates()
    assert labels["states"] == list(candidates.states) and len(labels["compositions"]) == len(candidates)
    assert json.loads(server.ask("GET", "/health")[1])["status"] == "ok"
    paths = json.loads(server.ask("GET", "/openapi.json")[1])["paths"]
    assert {"/predict", "/labels", "/health", "/metrics"} <= set(paths)
    for page in ("/", "/docs"):
        status, text = server.ask("GET", page)
        assert status == 200 and b"http://" not in text and b"https://" not in text


def test_similar_training_images(trained, server):
    path = trained.images("train")[0]
    status, reply = server.predict((path.name, path.read_bytes()), query="?similar=3")
    near = reply["answers"][0]["similar"]
    assert status == 200 and len(near) == 3
    assert near[0]["cosine"] == pytest.approx(1, abs=1e-3) and str(path).endswith(near[0]["image"])
    assert near[0]["thumbnail"].startswith("data:image/jpeg;base64,")
    assert "similar" not in server.predict((path.name, path.read_bytes()))[1]["answers"][0]


def test_a_bad_image_does_not_affect_good_ones(trained, server):
    status, reply = server.predict(("good.png", data_of(trained)), ("bad.png", b"nothing"))
    assert status == 200 and "top" in reply["answers"][0]
    assert reply["answers"][1] == {"image": "bad.png", "error": "not an image"}
    assert server.predict(("bad.png", b""))[0] == 422


def test_images_and_options_that_would_be_ignored_are_refused(trained, server):
    good = form(("a.png", data_of(trained)))
    text = b'--between\r\nContent-Disposition: form-data; name="top"\r\n\r\n1\r\n'
    for path, body, status, words in (
        ("/predict", text + good, 400, "the field 'top' is text"),
        ("/predict?tpo=1", good, 422, "tpo: "),
        ("/predict?top=1.5", good, 422, "top: "),
        ("/predict?top=51", good, 422, "top: "),
        ("/predict/", good, 404, "Not Found"),
        ("/predict", form(*[("a.png", data_of(trained))] * 33), 400, "Maximum number of files is 32"),
    ):
        answered, reply = server.ask("POST", path, body, form_headers())
        assert answered == status and words in json.loads(reply)["error"], (path, reply)
    upper = {"Content-Type": f"Multipart/Form-Data; boundary={BOUNDARY}"}
    assert server.ask("POST", "/predict?top=1", good, upper)[0] == 200


def posted(body: bytes, *, length: int | None = None, kind: str = f"multipart/form-data; boundary={BOUNDARY}") -> bytes:
    size = len(body) if length is None else length
    return (
        f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n\r\n".encode() + body
    )


def hostile(trained) -> dict[str, bytes]:
    good = data_of(trained)
    return {
        "a decompression bomb": posted(form(("bomb.png", bomb(60_000, 60_000)))),
        "not an image": posted(form(("a.png", random.Random(0).randbytes(5000)))),
        "a truncated image": posted(form(("a.png", good[: len(good) // 3]))),
        "no form": posted(b"{}", kind="application/json"),
        "no boundary": posted(form(("a.png", good)), kind="multipart/form-data"),
        "another boundary": posted(form(("a.png", good)).replace(BOUNDARY.encode(), b"other")),
        "a form cut off": posted(form(("a.png", good))[:-30], length=len(form(("a.png", good))) - 30),
        "too many files": posted(form(*[("a.png", b"x")] * 100)),
        "a text field": posted(form(("a", b"x")).replace(b'; filename="a"', b"")),
        "a path as a name": posted(form(("../../etc/passwd", b"root"))),
        "giant headers": b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 200_000 + b"\r\n\r\n",
        "no HTTP": b"\x16\x03\x01 not http at all\r\n\r\n",
        "a path": b"GET /../../../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
        "an encoded path": b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
        "a static path": b"GET /static/../params.yaml HTTP/1.1\r\nHost: x\r\n\r\n",
        "another verb": b"DELETE /predict HTTP/1.1\r\nHost: x\r\n\r\n",
        "no number": posted(form(("a.png", good))).replace(b"/predict", b"/predict?top=many"),
        "a negative number": posted(form(("a.png", good))).replace(b"/predict", b"/predict?top=-1"),
    }


def test_hostile_requests_are_refused(trained, server):
    kinds = hostile(trained)
    for name, data in kinds.items():  # a first time, since some modules are loaded at their first use
        assert 400 <= server.raw(data) < 500, name
    before, good = server.resident, ("good.png", data_of(trained))
    jobs = [(name, kinds[name]) for name in random.Random(0).choices(sorted(kinds), k=300)]
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda job: server.raw(job[1]), jobs))
    wrong = {name: status for (name, _), status in zip(jobs, answers, strict=True) if not 400 <= status < 500}
    assert not wrong
    assert server.predict(good)[0] == 200
    assert server.resident - before < 100 * 2**20


def test_fifty_megabytes_are_refused(trained, server):
    body = form(("big.png", bytes(50 * 2**20)))
    before = server.resident
    refused = (413, 0)  # 0: the connection was closed while the body was being sent
    assert server.ask("POST", "/predict", body, form_headers())[0] in refused
    chunked = iter([body[start : start + 65536] for start in range(0, len(body), 65536)])
    assert server.ask("POST", "/predict", chunked, form_headers())[0] in refused
    assert server.ask("POST", "/predict", form(*[("a.png", b"x")] * 10_000), form_headers())[0] == 400
    assert server.resident - before < 100 * 2**20
    assert server.predict(("good.png", data_of(trained)))[0] == 200


def test_slow_senders_get_408(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as line:
        line.sendall(posted(form(("a.png", b"x" * 400)))[:300])
        line.settimeout(0.5)
        start, reply = time.monotonic(), b""
        while not reply and time.monotonic() - start < 15:
            try:
                reply = line.recv(4096)
            except TimeoutError:
                line.sendall(b"a")
    assert reply.startswith(b"HTTP/1.1 408") and b"\r\nconnection: close\r\n" in reply.lower(), reply
    assert time.monotonic() - start < 10


def test_many_idle_connections_do_not_block_others(trained, server):
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    try:
        assert server.predict(("good.png", data_of(trained)))[0] == 200
    finally:
        for line in idle:
            line.close()


def test_clients_that_leave_do_not_affect_others(trained, server):
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as line:
            line.sendall(posted(form(("a.png", data_of(trained))))[:-200])
    assert server.predict(("good.png", data_of(trained)))[0] == 200


@pytest.mark.slow
def test_it_binds_to_localhost_and_finishes_requests_before_it_stops(trained):
    """A request in progress at SIGTERM is answered; then the exit code is 0."""
    noise = encoded(Image.effect_noise((3000, 3000), 60))
    with RunningServer(trained.run(), trained.folder) as server:
        assert listening(server.process.pid) == {"0100007F"}
        answers = []
        asking = threading.Thread(target=lambda: answers.append(server.predict(("noise.png", noise))))
        asking.start()
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        asking.join(30)
        assert server.process.wait(30) == 0
    assert answers[0][0] == 200


def listening(pid: int) -> set[str]:
    held = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    lines = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in held}


def identify(cache: Path, key: str, value: bytes) -> bytes:
    with h5py.File(cache, "r+") as file:
        before = file["identity"].attrs[key]
        file["identity"].attrs[key] = np.bytes_(value)
    return before


def test_images_of_another_encoder_are_not_similar(project, capsys):
    recognizer = Recognizer.load(project.run(), device="cpu")
    assert _training_images(recognizer) is not None
    path = project.paths.features("own")
    right = identify(path, "weights", b"0" * 64)
    try:
        assert _training_images(recognizer) is None
    finally:
        identify(path, "weights", right)
    assert "similar training images are not shown: " in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [("--workers", "65"), ("--seconds", "inf")])
def test_values_out_of_range_are_refused(trained, command, option, value):
    done = command("serve", trained.run(), option, value)
    assert done.code == 2 and option in done.err


def test_a_port_in_use_is_reported(trained, command):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = command("serve", trained.run(), "--port", taken.getsockname()[1])
    assert done.code == 1 and ": Address already in use; choose another --port" in done.err


def test_a_server_estimates_the_share_of_recent_images_if_asked(trained, server):
    fixed = json.loads(server.ask("GET", "/health")[1])["new_share"]
    stored = Recognizer.load(trained.run(), device="cpu").trained.confidence.new_share
    assert (fixed["value"], fixed["error"]) == (stored, None)
    paths = trained.images()[:24]
    files = [(path.name, path.read_bytes()) for path in paths]
    expected = Recognizer.load(trained.run(), device="cpu", new_share="auto")(paths)[0].share
    with RunningServer(trained.run(), trained.folder, "--new-share", "auto", "--workers", "1") as asked:
        before = asked.predict(files[0])[1]["answers"][0]
        assert (before["new_share"], before["new_share_error"]) == (stored, None)
        asked.predict(*files[1:])
        found = json.loads(asked.ask("GET", "/health")[1])["new_share"]
        after = asked.predict(files[0])[1]["answers"][0]
    assert (found["images"], found["of"]) == (24, 400)
    assert (found["value"], found["error"]) == pytest.approx((expected.value, expected.error), abs=5e-3)
    assert after["new_share"] == pytest.approx(found["value"], abs=1e-6)
