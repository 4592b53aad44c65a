"""Recognizers and servers that adapt to the images they receive."""

import json
from typing import Any

import pytest
import torch

from duplex import Recognizer, read_features
from duplex.errors import UsageError
from duplex.methods.base import AdaptedRun, Batch
from duplex.methods.tomcat import Tomcat, TomcatOptions
from tests.recognition.serving import RunningServer

QUICK: dict[str, Any] = {"learning_rate": 1e-2, "alpha": 1.0, "contrast": 1.0, "theta": 1.0, "warm": False}


def adaptation(batch: int = 1, **options: Any) -> dict[str, Any]:
    return {"adapter": "tomcat", "batch": batch, "options": {**QUICK, **options}}


@pytest.fixture
def features(project) -> torch.Tensor:
    return torch.from_numpy(read_features(project.paths.features("own")).cls[-40:])


@pytest.mark.parametrize("batch", [1, 8])
def test_scores_are_those_of_the_adapter_over_all_calls(project, features, batch):
    adapting = Recognizer.load(project.run("clip"), device="cpu", adapt=adaptation(batch))
    found = torch.cat([adapting.scores(part.numpy()) for part in features.split(24)])
    plain = Recognizer.load(project.run("clip"), device="cpu")
    method, candidates = plain.trained.method, plain.candidates()
    compositions = plain.labels.composition(candidates.state_of, candidates.object_of)
    none = Batch({"cls": features[:0]}, torch.zeros(0, dtype=torch.int64))
    run = AdaptedRun(method, compositions, candidates.feasible, none, candidates.scorer)
    stream = ({"cls": rows} for rows in features.split(batch))
    expected = torch.cat(list(Tomcat(run, TomcatOptions(**QUICK)).scores(stream)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not torch.equal(found, plain.scores(features.numpy()))


def test_answers_depend_on_the_images_before_unless_nothing_moves(project, features):
    one, other = (Recognizer.load(project.run("clip"), device="cpu", adapt=adaptation()) for _ in range(2))
    first = one(features.numpy(), top=2)[-1]
    last = other(features.flip(0).numpy(), top=2)[0]
    assert first.best.probability != last.best.probability and first.best.score_terms == {}
    still = Recognizer.load(project.run("clip"), device="cpu", adapt=adaptation(learning_rate=0.0, alpha=0.0))
    plain = Recognizer.load(project.run("clip"), device="cpu").scores(features.numpy())
    torch.testing.assert_close(still.scores(features.numpy()), plain, rtol=1e-5, atol=1e-7)


def test_an_adapter_alone_adapts_to_each_image_by_its_defaults(project, features):
    brief, full = (
        Recognizer.load(project.run("clip"), device="cpu", adapt={"adapter": "tomcat", **more})
        for more in ({}, {"batch": 1, "options": TomcatOptions().to_dict()})
    )
    assert torch.equal(brief.scores(features[:4].numpy()), full.scores(features[:4].numpy()))


def test_unreadable_files_teach_nothing(project, tmp_path):
    (tmp_path / "bad.png").write_text("no image")
    images = sorted(project.folder.rglob("pictures/**/*.png"))[:12]
    among = [path for image in images for path in (tmp_path / "bad.png", image)]
    one, other = (Recognizer.load(project.run("clip"), device="cpu", adapt=adaptation()) for _ in range(2))
    alone = list(one.stream(images, num_workers=0))
    assert len(images) == 12 and list(other.stream(among, num_workers=0))[1::2] == alone


def test_what_cannot_adapt_is_refused(project, tmp_path, features):
    adapting = Recognizer.load(project.run("clip"), device="cpu", adapt=adaptation())
    with pytest.raises(UsageError, match="cannot be combined with adapting"):
        adapting.with_compositions(["rusty kettle"]).scores(features.numpy())
    adapting.save_pretrained(tmp_path / "export")
    auc = json.loads((project.run("clip") / "metrics.json").read_text())["closed"]["auc"]
    assert f"| AUC | {auc:.2f} |" in (tmp_path / "export" / "README.md").read_text(encoding="utf-8")
    exported = Recognizer.load(tmp_path / "export", device="cpu", adapt=adaptation())
    with pytest.raises(UsageError, match="is no run, so it cannot adapt"):
        exported.candidates()
    with pytest.raises(UsageError, match="warm start needs training images, but there are none"):
        Recognizer.load(project.run("clip"), device="cpu", adapt=adaptation(warm=True)).candidates()


@pytest.mark.slow
def test_a_server_adapts_on_request_and_its_page_says_so(project, command, features, monkeypatch):
    run = project.run("clip")
    assert command("serve", str(run), "--adapt").refused("duplex evaluate --stream")
    assert command("serve", str(run), "--adapt", "--workers", "2").refused("one worker")
    metrics = json.loads((run / "metrics.json").read_text())
    image = project.images()[0].read_bytes()
    try:
        (run / "metrics.json").write_text(json.dumps({**metrics, "stream": adaptation()}))
        with RunningServer(run, project.folder, "--adapt") as server:
            assert b"depends on the images before it" in server.ask("GET", "/")[1]
            shares = [server.predict(("a.png", image))[1]["answers"][0]["top"][0]["probability"] for _ in range(3)]
        assert len(set(shares)) > 1
    finally:
        (run / "metrics.json").write_text(json.dumps(metrics))
