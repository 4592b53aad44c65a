"""Runs that adapt to the unlabelled test images: orders, invariances, plug-ins, report and comparison."""

import json
import re
import shutil
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint

import pandas as pd
import pytest
import torch

from duplex.artifacts import ArtifactPaths
from duplex.config.params import Params, StreamParams
from duplex.errors import DuplexError, UsageError
from duplex.labels import LabelSpace
from duplex.methods.base import StreamAdapter
from duplex.project import report
from duplex.project.evaluate import evaluate_stage
from duplex.project.run import LastDatasetLoader, ProjectRun
from duplex.project.train import train_stage
from duplex.system import plugins
from tests.projects import with_evaluation

pytestmark = pytest.mark.slow
QUICK = {"learning_rate": 1e-2, "alpha": 1.0, "contrast": 1.0, "theta": 1.0, "warm": False}

CLASSES = ("Prior", "Forgetful", "Hasty", "Short", "Choosy")
PLUG_IN = '''
from dataclasses import dataclass
from itertools import islice

import torch

import duplex
from duplex.methods.base import StreamAdapter, UnsuitableMethod
from duplex.options import Options


@dataclass(frozen=True)
class PriorOptions(Options):
    power: float = 0.5


class Prior(StreamAdapter):
    """Divides scores by how probable each composition was so far."""

    Options = PriorOptions
    grid = {"power": (0.0, 0.5)}

    def scores(self, stream):
        total = torch.ones(len(self.run.candidates))
        for inputs in stream:
            scores = self.run.scorer(inputs)
            yield scores / (total / total.sum()) ** self.options.power
            total = total + scores.sum(0)


class Forgetful(StreamAdapter):
    def scores(self, stream):
        for inputs in islice(stream, 3):
            yield self.run.scorer(inputs)


class Hasty(StreamAdapter):
    def scores(self, stream):
        for inputs in list(stream):
            yield self.run.scorer(inputs)


class Short(StreamAdapter):
    def scores(self, stream):
        for inputs in stream:
            yield self.run.scorer(inputs)[1:]


class Choosy(StreamAdapter):
    def scores(self, stream):
        raise UnsuitableMethod("choosy adapts other methods; choose another run")
'''


@pytest.fixture
def trained(project, params, monkeypatch):
    """The project with a trained run of csp, and entry points of four adapters."""
    points = plugins.entry_points

    def extended(group: str, **more):
        own = [EntryPoint(name.lower(), f"stream_plug_in:{name}", group) for name in CLASSES]
        found = own if group == "duplex.stream_adapters" else []
        return [*points(group=group, **more), *(point for point in found if more.get("name", point.name) == point.name)]

    (project / "stream_plug_in.py").write_text(PLUG_IN)
    monkeypatch.syspath_prepend(project)
    monkeypatch.delitem(sys.modules, "stream_plug_in", raising=False)
    monkeypatch.setattr(plugins, "entry_points", extended)
    train_stage(ProjectRun("own", "csp", 0, params))
    return params


def with_stream(params: Params, worlds=("closed",), **stream) -> Params:
    return with_evaluation(params, stream=StreamParams(**{"orders": 2, **stream}), worlds=worlds)


def adapted(params: Params, **more) -> tuple[dict, pd.DataFrame]:
    metrics = evaluate_stage(ProjectRun("own", "csp", 0, params), **more)
    return metrics, pd.read_csv(ArtifactPaths().run("own", "csp", 0).predictions)


@pytest.mark.slow
def test_orders_spread_and_the_same_bytes_twice(trained):
    params, files = with_stream(trained, options=QUICK, orders=5), ArtifactPaths().run("own", "csp", 0)
    metrics, table = adapted(params)
    before = files.metrics.read_bytes(), files.predictions.read_bytes()
    closed = metrics["stream"]["closed"]
    by_order = [closed[f"order_{order}"]["auc"] for order in range(5)]
    assert len(set(by_order)) > 1 and closed["auc"] == pytest.approx(sum(by_order) / 5) and closed["auc_sd"] > 0
    assert closed["unadapted"]["auc"] == metrics["closed"]["auc"]
    labels = LabelSpace.load(ArtifactPaths().labels("own"))
    assert closed["entropy_candidates"] == len(labels.candidates("closed", "test"))
    assert set(table["world"]) == {"closed", "closed stream"}
    adapted(params)
    assert (files.metrics.read_bytes(), files.predictions.read_bytes()) == before
    other, _ = adapted(with_stream(trained, options=QUICK, seed=1))
    assert other["stream"]["closed"]["auc"] != closed["auc"]


def test_labels_of_the_stream_have_no_influence(trained):
    recorded = []

    def record(wrong: bool) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        tomcat = plugins.load_plugin(*_point("tomcat"))

        def scores(self, stream, plain=tomcat.scores):
            for each in plain(self, stream):
                found.append(each.clone())
                yield each

        def load(*given):
            inputs = LastDatasetLoader()(*given)
            if wrong:
                test = inputs.examples["test"]
                turned = replace(test, compositions=test.compositions.roll(7))
                inputs = replace(inputs, examples={**inputs.examples, "test": turned})
            return inputs

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tomcat, "scores", scores)
            metrics, _ = adapted(with_stream(trained, options=QUICK), load=load)
        recorded.append(metrics["stream"]["closed"]["auc"])
        return found

    right, wrong = record(False), record(True)
    assert len(right) == len(wrong) and all(map(torch.equal, right, wrong))
    assert recorded[0] != recorded[1]  # the labels were wrong indeed


def test_each_order_and_each_seed_is_another_permutation_of_the_images(trained, monkeypatch):
    streams: list[tuple[bytes, ...]] = []

    def scores(self, stream):
        read = []
        for inputs in stream:
            read += [row.numpy().tobytes() for row in inputs["cls"]]
            yield self.run.scorer(inputs)
        streams.append(tuple(read))

    monkeypatch.setattr(plugins.load_plugin(*_point("prior")), "scores", scores)
    for seed, orders in ((0, 3), (1, 1)):
        adapted(with_stream(trained, adapter="prior", options={"power": 0.5}, orders=orders, seed=seed, batch=7))
    _, *first, _, other = streams  # without the streams of validation images
    assert len({*first, other}) == 4
    assert len({tuple(sorted(order)) for order in (*first, other)}) == 1


def _point(name: str):
    return plugins.installed_plugins("duplex.stream_adapters")[name], "stream adapter", StreamAdapter


def test_without_learning_the_results_are_those_of_the_run(trained):
    still = {**QUICK, "learning_rate": 0.0, "alpha": 0.0}
    metrics, table = adapted(with_stream(trained, options=still, orders=1, worlds=("closed", "open")))
    for world in ("closed", "open"):
        assert metrics["stream"][world]["auc"] == pytest.approx(metrics[world]["auc"], abs=1e-9)
        both = [table[table["world"] == name].set_index("row")["margin"] for name in (world, f"{world} stream")]
        assert both[0].to_numpy() == pytest.approx(both[1].to_numpy(), abs=1e-5, nan_ok=True)


def test_validation_chooses_among_the_values_of_a_list(trained):
    metrics, _ = adapted(with_stream(trained, adapter="prior", options={"power": [0.0, 0.3, 50.0]}))
    assert metrics["stream"]["options"]["power"] in (0.0, 0.3)
    with pytest.raises(UsageError, match=r"power: .*'x'"):
        adapted(with_stream(trained, adapter="prior", options={"power": "x"}))


def test_adapters_that_break_the_protocol_are_named_in_one_line(trained):
    says = {
        "forgetful": "forgetful must yield one tensor of scores for each of the",
        "hasty": "hasty must yield the scores of a batch before it reads the next one",
        "short": r"short returned scores of shape \[2, \d+\] and type torch.float32; expected shape \[3, \d+\]",
        "no": "unknown stream adapter 'no'; known: choosy, forgetful, hasty, prior, short, tomcat",
    }
    for adapter, message in says.items():
        with pytest.raises(DuplexError, match=message) as refused:
            adapted(with_stream(trained, adapter=adapter, batch=3))
        assert "\n" not in str(refused.value)


def test_a_method_that_cannot_be_adapted_is_evaluated_without_the_stream(trained, project, command):
    plain, _ = adapted(trained)
    text = re.sub(r"\n  stream:.*", "\n  stream: {adapter: choosy}", (project / "params.yaml").read_text())
    (project / "params.yaml").write_text(text)
    done = command("evaluate", "--dataset", "own", "--method", "csp")
    note = "own csp seed 0 is not adapted to the stream: choosy adapts other methods; choose another run"
    assert done.code == 0 and done.err == f"duplex: {note}\n"
    assert json.loads(ArtifactPaths().run("own", "csp", 0).metrics.read_text()) == json.loads(json.dumps(plain))
    asked = command("evaluate", "--dataset", "own", "--method", "csp", "--stream")
    assert asked.code == 2 and "--stream had no effect on this run" in asked.err and "closed" in asked.out


def test_a_plug_in_runs_through_evaluate_report_and_compare(trained, project, command):
    params = project / "params.yaml"
    text = re.sub(r"\n  stream:.*", "\n  stream: {adapter: prior, orders: 3}", params.read_text())
    params.write_text(text)
    done = command("evaluate", "--dataset", "own", "--method", "csp")
    assert done.code == 0 and "over 3 orders, adapted by prior" in done.out
    compared = command("compare", "--dataset", "own", "--methods", "csp", "csp+stream", "--seed", "0", "--json")
    metrics = json.loads(ArtifactPaths().run("own", "csp", 0).metrics.read_text())
    gain = metrics["stream"]["closed"]["order_0"]["auc"] - metrics["closed"]["auc"]
    assert json.loads(compared.out)["difference"]["auc"]["value"] == pytest.approx(gain, abs=1e-6)
    assert compared.err == ""
    report.report_stage(Params.model_validate(trained), ArtifactPaths())
    summary = json.loads(ArtifactPaths().metrics.read_text())["own"]
    assert summary["csp+stream"]["closed"]["auc"] == pytest.approx(metrics["stream"]["closed"]["auc"])
    assert "csp+stream" in (ArtifactPaths().report / "index.html").read_text()


def test_a_flag_adapts_a_run_without_making_it_outdated(trained, command):
    before = command("compare", "--dataset", "own", "--methods", "csp", "csp+stream", "--seed", "0")
    assert before.code == 1 and "does not exist" in before.err
    evaluate_stage(ProjectRun("own", "csp", 0, trained))
    absent = command("compare", "--dataset", "own", "--methods", "csp", "csp+stream", "--seed", "0")
    assert absent.refused("evaluate", "--stream")
    shutil.copytree(ArtifactPaths().run("own", "csp", 0).root, ArtifactPaths().run("own", "csp", 1).root)
    evaluate_stage(ProjectRun("own", "csp", 0, with_stream(trained, ("closed", "open"), options=QUICK, orders=1)))
    assert command("compare", "--dataset", "own", "--methods", "csp", "csp+stream", "--seed", "0").err == ""
    assert ", seed 0" in command("compare", "--dataset", "own", "--methods", "csp", "csp+stream").out
