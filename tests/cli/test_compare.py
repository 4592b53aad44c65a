"""`duplex compare` equals the comparison of the same margins in memory."""

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from duplex.artifacts import ArtifactPaths
from duplex.cli import app
from duplex.config.datasets import write_dataset
from duplex.errors import DuplexError, UsageError
from duplex.evaluation.curve import Margins
from duplex.evaluation.intervals import Difference, compare, compare_splits
from duplex.project.evaluate import write_table
from duplex.system.files import write_json

IMAGES = 120
SPLITS = ("shapes-split1", "shapes-split2")


@pytest.fixture
def margins(project) -> dict[str, np.ndarray]:
    """The margins of two methods, saved as their predictions in a project."""
    rng = np.random.default_rng(0)
    first = rng.normal(size=IMAGES).round(2)
    second = first + np.where(is_seen(), 0.3, -0.3) + rng.normal(scale=0.3, size=IMAGES)
    second[:4] = np.nan, np.nan, np.inf, -np.inf
    margins_by_method = {"duplex_static": first, "duplex": second}
    for method, margin in margins_by_method.items():
        save(method, predictions(margin))
    return margins_by_method


def is_seen(images: int = IMAGES) -> np.ndarray:
    return np.arange(images) % 2 == 0


def predictions(margin: np.ndarray, world: str = "closed") -> pd.DataFrame:
    rows = np.arange(margin.size)
    names = {"image": [f"{row}.png" for row in rows], "label": "NA 1"}
    return pd.DataFrame(
        {"row": rows, **names, "seen": is_seen(margin.size).astype(int), "right": 1, "margin": margin, "world": world}
    )


def save(method: str, table: pd.DataFrame, dataset: str = "shapes", seed: int = 0) -> None:
    path = ArtifactPaths().run(dataset, method, seed).predictions
    path.parent.mkdir(parents=True, exist_ok=True)
    write_table(table, path)


def run(*words: str, methods: tuple[str, ...] = ("duplex_static", "duplex")) -> str:
    done = CliRunner().invoke(app, ["compare", "--dataset", "shapes", "--methods", *methods, *words])
    if done.exception is not None:  # an exit code, raised from the error
        raise done.exception.__context__ or done.exception
    return done.stdout


def check_differences(report: dict[str, Any], expected: dict[str, Difference]) -> None:
    assert list(report["difference"]) == list(expected)
    for name, gain in expected.items():
        assert report["difference"][name]["value"] == pytest.approx(100 * gain.value)
        assert report["difference"][name]["interval"] == pytest.approx([100 * end for end in gain.interval])
        assert report["difference"][name]["p"] == pytest.approx(gain.p)


def test_a_report_equals_the_comparison_of_the_margins(margins):
    report = json.loads(run("--json"))
    seen = is_seen()
    a, b = (Margins(margin[seen], margin[~seen], seen) for margin in (margins["duplex_static"], margins["duplex"]))
    expected = compare(a, b)
    assert list(report["difference"]) == ["seen", "unseen", "hm", "auc"]
    check_differences(report, expected)
    assert report["difference"]["auc"]["value"] > 0 and report["difference"]["seen"]["value"] < 0
    assert (report["first"], report["second"], report["images_seen"]) == ("duplex_static", "duplex", IMAGES // 2)


def test_both_methods_own_answers_are_printed_as_means_over_seeds(margins):
    for seed in (0, 1):
        for number, method in enumerate(("duplex_static", "duplex")):
            save(method, predictions(margins[method]), seed=seed)
            own = {"unbiased_accuracy": 50.0 + 10 * number + seed, "false_seen": 30.0 - number}
            write_json(ArtifactPaths().run("shapes", method, seed).metrics, {"closed": own})
    report = json.loads(run("--json"))["own_answers"]
    assert report == {
        "unbiased_accuracy": {"first": 50.5, "second": 60.5},
        "false_seen": {"first": 30.0, "second": 29.0},
    }
    text = run()
    assert "no bias: duplex_static 50.5, duplex 60.5" in text and "false seen: duplex_static 30.0, duplex 29.0" in text
    ArtifactPaths().run("shapes", "duplex", 1).metrics.unlink()
    assert json.loads(run("--json"))["own_answers"] == {}, "a mean over some seeds only would mislead"


@pytest.mark.parametrize("words", [(), ("--seed", "0"), ("--world", "open")])
def test_a_run_is_not_compared_with_itself(margins, words):
    methods = ("duplex", "duplex_open" if "open" in words else "duplex")
    with pytest.raises(UsageError, match="are the same run"):
        run(*words, methods=methods)


@pytest.mark.parametrize("methods", [("duplex_static", "duplex", "dual"), ("duplex_static,duplex,dual",)])
def test_each_of_several_methods_is_compared_with_the_first(margins, methods):
    save("dual", predictions(margins["duplex"][::-1]), seed=0)
    save("dual", predictions(margins["duplex"]), seed=1)
    save("duplex_static", predictions(margins["duplex_static"]), seed=1)
    pairs = [("duplex_static", "duplex"), ("duplex_static", "dual")]
    assert json.loads(run("--json", methods=methods)) == [json.loads(run("--json", methods=pair)) for pair in pairs]
    assert run(methods=methods) == "\n".join(run(methods=pair) for pair in pairs)


def test_a_single_method_is_refused(margins):
    with pytest.raises(UsageError, match="nothing to compare duplex with; give two or more methods"):
        run(methods=("duplex",))


def test_the_order_of_rows_has_no_effect_and_that_of_methods_changes_the_sign(margins):
    before = json.loads(run("--json"))["difference"]
    save("duplex", predictions(margins["duplex"]).sample(frac=1, random_state=0))
    assert json.loads(run("--json"))["difference"] == before
    back = json.loads(run("--json", methods=("duplex", "duplex_static")))["difference"]
    assert all(back[name]["value"] == pytest.approx(-before[name]["value"]) for name in before)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--world", "half"), "unknown world 'half'"),
        (("--world", "open"), "no results for the open world; add open to evaluation.worlds"),
        (("--seed", "7"), "duplex train --dataset shapes --method duplex_static --seed 7"),
        (("--dataset", "none"), "unknown data set 'none'"),
        (("--methods", "duplex_static", "magic"), "unknown method 'magic'"),
    ],
)
def test_missing_runs_and_unknown_names_are_reported_in_one_line(margins, words, message):
    with pytest.raises(DuplexError) as error:
        run(*words)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.assign(label="NA 2"), "differ in the column 'label'"),
        (lambda table: table.assign(row=np.arange(IMAGES) + 1), "differ in the column 'row'"),
        (lambda table: table[:-1], "differ in the column 'row'"),
    ],
)
def test_files_that_cannot_be_compared_are_refused(margins, change, message):
    save("duplex", change(predictions(margins["duplex"])))
    with pytest.raises(DuplexError, match=message):
        run()


def test_margins_that_differ_in_the_ninth_digit_are_no_ties(margins):
    save("duplex", predictions(np.where(is_seen(), 12.3456789, 12.3456780)))
    save("duplex_static", predictions(np.full(IMAGES, 12.3456789)))
    assert json.loads(run("--json"))["difference"]["auc"]["value"] == pytest.approx(50)


def test_every_seed_that_both_methods_have_is_compared(margins):
    for seed in (1, 7, 9):
        save("duplex", predictions(margins["duplex"]), seed=seed)
    save("duplex_static", predictions(margins["duplex_static"]), seed=7)  # not one of run.seeds
    assert json.loads(run("--json"))["seeds"] == [0, 7]


@pytest.fixture
def splits(margins) -> list[list[list[Margins]]]:
    """Margins [methods][splits][seeds], saved as predictions of two re-splits with two seeds."""
    for number, name in enumerate(SPLITS, 1):
        source = {"kind": "shapes", "root": "data/shapes", "resplit": number}
        training = {"learning_rate": 0.001, "batch_size": 64, "epochs": 1}
        write_dataset(name, {"source": source, "encoder": {"name": "tiny"}, "training": training}, run=False)
    found: list[list[list[Margins]]] = []
    rng = np.random.default_rng(1)
    for gain, method in ((0.0, "duplex_static"), (0.4, "duplex")):
        found.append([])
        for images, name in zip((60, 90), SPLITS, strict=True):
            seen = is_seen(images)
            runs = [(rng.normal(size=images) + np.where(seen, gain, -gain)).round(2) for _ in range(2)]
            for seed, margin in enumerate(runs):
                save(method, predictions(margin), name, seed)
            found[-1].append([Margins(margin[seen], margin[~seen], seen) for margin in runs])
    return found


def test_a_report_over_splits_equals_the_comparison_of_the_margins(splits):
    report = json.loads(run("--splits", "2", "--json"))
    expected = compare_splits(*splits)
    check_differences(report, expected.difference)
    assert report["deviation"] == pytest.approx({name: 100 * value for name, value in expected.deviation.items()})
    assert {split["dataset"]: split["seeds"] for split in report["splits"]} == {name: [0, 1] for name in SPLITS}
    assert report["splits"][1]["difference"] == pytest.approx(
        {name: 100 * gain for name, gain in expected.by_split[1].items()}
    )
    report = json.loads(run("--splits", "2", "--seed", "1", "--json"))
    assert [split["seeds"] for split in report["splits"]] == [[1], [1]]


def test_a_missing_split_is_named_with_the_command_that_adds_it(splits):
    with pytest.raises(DuplexError, match=r"there is no data set shapes-split3; `duplex data split shapes --splits 4`"):
        run("--splits", "4")
    ArtifactPaths().run("shapes-split2", "duplex", 0).predictions.unlink()
    ArtifactPaths().run("shapes-split2", "duplex", 1).predictions.unlink()
    with pytest.raises(DuplexError, match="duplex train --dataset shapes-split2 --method duplex --seed 0"):
        run("--splits", "2")
