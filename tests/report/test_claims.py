"""Verdicts on the paper's claims: intervals, which runs are rows, what is comparable, and the paper's numbers."""

import itertools
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from duplex.artifacts import ArtifactPaths
from duplex.config.params import load_params
from duplex.evaluation.intervals import compare_seeds
from duplex.evaluation.metrics import MISSING
from duplex.methods.registry import find_method
from duplex.report import claims
from duplex.report.aggregate import DatasetResults, Results, RunRecord, margins_of
from duplex.report.claims import comparisons_of, counts_of, is_row, judge_all, paper_row
from duplex.report.paired import ROUNDS
from duplex.report.paper_tables import ablation_tables, claims_tables
from duplex.report.verdicts import (
    CLOSE,
    NOT_REPRODUCED,
    REPRODUCED,
    UNDECIDED,
    Gap,
    MeanWithError,
    joint_verdict,
    t_quantile,
)
from tests.report.test_tables import PAPER, line, settings, statistics_of
from tests.subprocesses import ROOT

SPEC = claims.read_package_yaml("claims.yaml")
UNITS = {"parameters": 1e-6, "peak_bytes": 1e-9, "seconds_per_epoch": 1 / 60, "test_seconds": 1.0}
values = st.builds(
    MeanWithError, st.floats(0, 100), st.floats(0.01, 5), st.integers(2, 40), st.just("")
)  # of runs with several seeds


@pytest.mark.parametrize("freedom", range(1, 200))
def test_quantiles_are_students(freedom):
    assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-3)


@given(values, values)
def test_an_order_is_decided_by_the_interval_of_the_difference(a, b):
    gap, reverse = Gap.of((1.0, a), (-1.0, b)), Gap.of((1.0, b), (-1.0, a))
    assert gap.low is not None and gap.high is not None
    assume(min(abs(gap.low), abs(gap.high)) > 1e-9)
    width = stats.t.ppf(0.975, min(a.seeds, b.seeds) - 1) * (a.error**2 + b.error**2) ** 0.5
    ends = (a.mean - b.mean - width, a.mean - b.mean + width)
    assert (gap.low, gap.high) == pytest.approx(ends, abs=1e-3 * width)
    expected = {REPRODUCED: NOT_REPRODUCED, NOT_REPRODUCED: REPRODUCED}
    assert reverse.order == expected.get(gap.order, UNDECIDED)
    assert (gap.order == UNDECIDED) == (gap.low <= 0 <= gap.high)


@pytest.mark.parametrize(
    ("ours", "error", "verdict"),
    [
        (23.5, 0.2, "reproduced"),
        (23.0, 0.2, "undecided"),
        (20.0, 0.2, "not reproduced"),
        (27.0, 0.2, "not reproduced"),
        (21.0, 2.0, "undecided"),
    ],
)
def test_a_number_is_compared_with_the_published_one_as_if_exact(ours, error, verdict):
    paper = claims.paper_value(paper_row("duplex"), "closed", "mit-states", "auc")
    assert paper is not None and (paper.mean, paper.error, paper.seeds) == (23.7, 0.4, 5)
    data = {"mit-states": {"counts": counts_of(statistics_of("mit-states"))}}
    run = ablation("duplex", ours, error, encoder=PAPER)
    run["settings"] |= data["mit-states"]
    measured = claims.Measured("duplex", "mit-states", "summary.json", run)
    assert claims.number_verdict(measured, paper_row("duplex"), "closed", "auc")[0] == verdict


@given(st.floats(-4, 4), st.integers(2, 40))
def test_more_seeds_make_an_equality_surer_in_either_direction(difference, seeds):
    """With the error falling as 1 / sqrt(n), the verdict only changes away from undecided, to that on the value."""
    assume(abs(abs(difference) - CLOSE) > 0.01)
    found = []
    for count in (seeds, 2 * seeds, 10**6):
        ours = MeanWithError(50 + difference, count**-0.5, count)
        found.append(Gap.of((1.0, ours), (-1.0, MeanWithError(50.0, 0.0, 0))).equality)
    expected = REPRODUCED if abs(difference) < CLOSE else NOT_REPRODUCED
    assert found[-1] == expected
    assert all(b == expected or a == b == UNDECIDED for a, b in itertools.pairwise(found))


def test_a_value_may_be_a_point_below_another_and_still_be_near_it():
    def gap(value: float, error: float) -> Gap:
        return Gap.of((1.0, MeanWithError(value, error, 30)), (-1.0, MeanWithError(0.0, 0.0, 0)))

    assert [gap(*each).near_order for each in ((-0.5, 0.1), (-0.5, 1.0), (-2.0, 0.1), (3.0, 0.1))] == [
        "reproduced", "undecided", "not reproduced", "reproduced"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        (["reproduced", "reproduced"], "reproduced"), (["reproduced", "not reproduced"], "not reproduced"),
        (["reproduced", "undecided"], "undecided"), (["reproduced", "untrained"], "undecided"),
        (["untrained", "untrained"], "untrained"), (["not run", "not run"], "not run"),
        (["untrained", "not run"], "undecided"),
    ],
)  # fmt: skip
def test_a_sentence_is_reproduced_if_all_its_comparisons_are(parts, verdict):
    assert joint_verdict(parts) == verdict


def test_one_seed_decides_nothing():
    gap = Gap.of((1.0, MeanWithError(50.0, None, 1)), (-1.0, MeanWithError(10.0, 0.1, 5)))
    assert (gap.order, gap.equality, gap.interval) == ("undecided", "undecided", "–")


def ablation(name: str, value: float, error: float = 0.1, encoder: str = "tiny", **more: Any) -> dict[str, Any]:
    row = {"settings": {**settings(name, encoder), "counts": None}, "groups_at_ends": {"head": value, "head_se": error}}
    return {**line(value, seeds=5, **dict.fromkeys(("auc_se", "hm_se", "seen_se", "unseen_se"), error)), **row, **more}


def judged(results: dict[str, Any], **data: Any) -> dict[tuple[str, str, str], list[claims.Judgement]]:
    """Judgements by source, rows and metric, of a data set with these ablations."""
    found = DatasetResults("shapes", data.pop("summary", {}), ablations=results, **data)
    table: dict[tuple[str, str, str], list[claims.Judgement]] = {}
    for sentence in judge_all(Results((found,)), found):
        for each in sentence.parts:
            kept = table.setdefault((each.source, each.rows, each.metric), [])
            kept += [] if each in kept else [each]
    return table


def verdicts(results: dict[str, Any], source: str, start: str = "", **data: Any) -> list[str]:
    """Verdicts on the sentences of a source whose text has this start, one per setting."""
    found = DatasetResults("shapes", {}, ablations=results, **data)
    sentences = judge_all(Results((found,)), found)
    return [each.verdict for each in sentences if each.source == source and each.text.startswith(start)]


def test_each_verdict_on_a_made_project():
    """SP is above fixed prompts; VP with SP is above SP, with a wide interval; VP is below SP."""
    results = {
        "duplex_five": ablation("duplex", 20.5, 1.0),
        "fixed_plain": ablation("fixed_plain", 10.0),
        "module_sp": ablation("module_sp", 20.0),
        "module_vp": ablation("module_vp", 9.0, validation={"auc": 1.0, "untrained": 2}),
    }
    found = judged(results)
    (above,) = found["Tab. 5", "module_sp > fixed_plain", "AUC"]
    (below,) = found["Tab. 5", "module_vp > module_sp", "AUC"]
    (wide,) = found["Tab. 5", "duplex > module_sp", "AUC"]
    (number, *_) = found["Tab. 3", "duplex", "AUC"]
    (missing,) = found["Tab. 10", "duplex > static", "AUC"]
    verdicts = [each.verdict for each in (above, below, wide, number, missing)]
    assert verdicts == ["reproduced", "not reproduced", "undecided", "not comparable", "not run"]
    assert above.reason == "module_sp, fixed_plain; 5 seeds, tiny" and missing.reason == "static"
    assert "module_vp untrained in 2 of 5" in below.reason
    assert (number.reason, number.gap) == ("duplex_five: encoder tiny, not CLIP ViT-L/14", None)
    assert above.paper == "ut-zappos 42.1 > 38.0"
    assert above.left.source == "ablations/artifacts/summary.json#/shapes/module_sp/closed/auc"


def test_untrained_rows_are_no_evidence():
    rows = {name: ablation(name, value) for name, value in (("loss_ch_so", 20.0), ("loss_ch", 10.0))}
    assert verdicts(rows, "Tab. 7", "L_s + L_o improve L_c^h") == ["reproduced"]
    for untrained, verdict in ((2, "reproduced"), (3, "untrained")):
        rows["loss_ch"]["validation"] = {"untrained": untrained}
        assert verdicts(rows, "Tab. 7", "L_s + L_o improve L_c^h") == [verdict]
    clip = {"clip": {**ablation("CLIP", 10.0), "validation": {"untrained": 5}}, "duplex_five": ablation("duplex", 20.0)}
    (found,) = judged(clip)["Tab. 3", "duplex > CLIP", "AUC"]
    assert found.verdict == "reproduced", "zero-shot CLIP has no loss"


def test_an_effect_called_negligible_is_reproduced_by_a_negligible_one():
    for value, verdict in ((10.2, "reproduced"), (11.8, "not reproduced"), (9.0, "undecided")):
        rows = {"fixed_visual": ablation("fixed_visual", value, 0.05), "fixed_plain": ablation("fixed_plain", 10, 0.05)}
        assert verdicts(rows, "Tab. 11", "visual prototypes hardly improve") == [verdict]


def test_a_claim_about_an_encoder_is_judged_on_that_encoder():
    rows = {name: ablation(name, value) for name, value in (("cge", 1.0), ("cge_visual", 2.0))}
    assert verdicts(rows, "Tab. 9", "visual prototypes improve CGE") == ["not comparable"]
    rows = {name: ablation(name, each["closed"]["auc"], encoder="timm:resnet18 tv_in1k") for name, each in rows.items()}
    assert verdicts(rows, "Tab. 9", "visual prototypes improve CGE") == ["reproduced"]


def test_a_figure_of_sixteen_points_is_one_sentence():
    rows = {name: ablation(name, 19.5) for name in SPEC["rows"] if name.startswith("lambda") or name == "update_init"}
    rows["duplex_five"] = ablation("duplex", 20.0)
    assert verdicts(rows, "Fig. 5") == ["reproduced"]
    rows["lambda_30"] = ablation("lambda_30", 25.0)
    assert verdicts(rows, "Fig. 5") == ["not reproduced"]


def test_score_terms_of_one_trained_model_are_rows_of_their_own():
    """They are used where the row was not trained by itself, or its runs stayed untrained."""
    duplex = {**ablation("duplex", 20.0), "terms_visual": ablation("duplex", 12.0)["closed"]}
    duplex["terms_visual+factors"] = ablation("duplex", 15.0)["closed"]
    key = ("Tab. 8", "infer_ch_so > infer_ch", "AUC")
    (found,) = judged({"duplex_five": duplex})[key]
    assert (found.verdict, found.gap.value) == ("reproduced", pytest.approx(3.0))
    assert found.left.source == "ablations/artifacts/summary.json#/shapes/duplex_five/terms_visual+factors/auc"
    alone = ablation("infer_ch", 14.0)
    (found,) = judged({"duplex_five": duplex, "infer_ch": alone})[key]
    assert found.right.mean == 14.0
    alone["validation"] = {"untrained": 5}
    (found,) = judged({"duplex_five": duplex, "infer_ch": alone})[key]
    assert found.right.mean == 12.0
    data = DatasetResults("shapes", {}, ablations={"duplex_five": duplex})
    table = dict(ablation_tables(Results((data,)), data))["Inference terms"]
    assert [row.cells[0].text for row in table.rows] == ["p(c^h)", "p(c^h) + p(s) p(o)", "p(c^h) + p(c^t) + p(s) p(o)"]


def test_claims_about_rows_that_were_not_run_are_a_line_each():
    assert {each.verdict for lines in judged({}).values() for each in lines} == {"not run", "not comparable"}
    assert max(map(len, judged({}).values())) == 1


def test_whole_methods_are_compared_with_whatever_blocks_they_train():
    summary = {"duplex": ablation("duplex", 20.0), "csp": ablation("CSP", 10.0), "paper": ablation("duplex", 5.0)}
    summary["csp"]["settings"]["adapter"] = "none"
    summary["paper"]["settings"]["finetune"] = {"blocks": "all"}
    found = judged({}, summary=summary)["Tab. 3", "duplex > CSP", "AUC"]
    assert [each.verdict for each in found] == ["reproduced", "not reproduced"]
    assert [each.reason for each in found] == [
        "duplex, csp; 5 seeds, tiny",
        "paper, csp; 5 seeds, tiny, fine-tuned blocks",
    ]


def test_in_the_open_world_models_count_that_were_trained_for_it():
    made = ablation("duplex", 20.0)
    made["open"] = made["closed"]
    clip = {**ablation("CLIP", 10.0), "open": line(10.0)["closed"]}
    key = ("Tab. 4", "duplex_open > CLIP", "AUC")
    for world, verdict in (("closed", "not run"), ("both", "not run"), ("open", "reproduced")):
        made["settings_open"] = {**made["settings"], "world": world}
        (found,) = judged({}, summary={"duplex": made, "clip": clip})[key]
        assert found.verdict == verdict
    made["open"] = {**made["closed"], "seeds": 1}
    made["validation"] = {"untrained": 3}  # of the run in the closed world
    (found,) = judged({}, summary={"duplex": made, "clip": clip})[key]
    assert (found.verdict, found.reason) == ("undecided", "duplex, clip; 1 seed, tiny")
    (found,) = judged({"duplex_five": {"open": made["open"]}, "clip": {"open": clip["open"]}})[key]
    assert (found.verdict, found.reason) == ("not run", "duplex_open")


def test_names_are_free_where_settings_are_recorded():
    results = {
        "anything": ablation("module_sp", 20.0),
        "module_sp": ablation("module_sp", 1.0),
        "fixed_plain": ablation("fixed_plain", 10.0),
    }
    results["module_sp"]["settings"]["context"] = "fixed"  # the row of another claim, under this name
    (found,) = judged(results)["Tab. 5", "module_sp > fixed_plain", "AUC"]
    assert (found.verdict, found.left.mean) == ("reproduced", 20.0)


def test_rows_with_different_encoders_or_blocks_are_not_compared():
    results = {"module_sp": ablation("module_sp", 20.0, encoder=PAPER), "fixed_plain": ablation("fixed_plain", 10.0)}
    key = ("Tab. 5", "module_sp > fixed_plain", "AUC")
    (found,) = judged(results)[key]
    assert found.verdict == "not comparable"
    for name, row in (("sp_paper", "module_sp"), ("plain_paper", "fixed_plain")):
        results[name] = ablation(row, 30.0, encoder=PAPER)
        results[name]["settings"]["finetune"] = {"blocks": "all"}
    (found,) = judged(results)[key]
    assert (found.verdict, found.left.mean, found.right.mean) == ("undecided", 30.0, 30.0)
    assert found.reason.endswith("fine-tuned blocks")


@pytest.mark.parametrize(
    ("encoder", "pairs", "verdict"),
    [(PAPER, None, "reproduced"), ("ViT-B-32-quickgelu openai", None, "not comparable"),
     (PAPER, 1261, "not comparable")],
)  # fmt: skip
def test_numbers_need_the_papers_data_and_encoder_whatever_the_names(encoder, pairs, verdict):
    statistics = statistics_of("mit-states", pairs)
    results = ablation("duplex", 23.7, encoder=encoder)
    results["settings"]["counts"] = counts_of(statistics)
    data = DatasetResults("mit-states", {"mine": results}, statistics=statistics)
    sentences = judge_all(Results((data,)), data)
    (found,) = [each for each in sentences if each.source == "Tab. 3" and each.text.endswith("reaches these numbers")]
    assert {each.metric: each.verdict for each in found.parts}["AUC"] == verdict
    table = claims_tables(Results((data,)), data)[1]
    assert verdict in {row.cells[4].text for row in table.rows}


def test_numbers_of_the_published_sweep_are_compared_where_there_are_any():
    statistics = statistics_of("mit-states")
    results = ablation("duplex", 20.0, encoder=PAPER)
    results["settings"]["counts"] = counts_of(statistics)
    results["closed"] |= {"auc_sampled": 23.7, "auc_sampled_se": 0.1}
    found = judged({}, summary={"duplex": results, "clip": ablation("CLIP", 1.0, encoder=PAPER)}, statistics=statistics)
    (number,) = found["Tab. 3", "duplex", "AUC"]
    assert (number.left.mean, number.gap.value) == (23.7, pytest.approx(0.0))


def test_a_benchmark_is_not_judged_by_what_the_paper_says_of_others():
    found = judged({}, statistics=statistics_of("cgqa"))
    assert ("Tab. 3", "LOGICZSL > duplex", "AUC") in found and ("Tab. 3", "duplex > LOGICZSL", "AUC") not in found
    assert not [key for key in found if key[0] == "Tab. 7"]


def test_costs_are_compared_with_a_bound():
    def runs(parameters: float, seconds: float) -> dict[int, RunRecord]:
        files = {part: f"{part}.json" for part in ("timing", "evaluation_timing")}
        timing = {"parameters": parameters, "seconds_per_epoch": seconds}
        return {seed: RunRecord({}, timing=timing, files=files) for seed in range(3)}

    summary = {"duplex": ablation("duplex", 1.0), "duplex_static": ablation("static", 1.0)}
    timed = {"duplex": runs(109.0, 3.0), "duplex_static": runs(100.0, 2.0)}
    found = judged({}, summary=summary, runs=timed)
    (parameters,) = found["Tab. 10", "duplex ≤ 1.1 × static", "parameters"]
    (seconds,) = found["Tab. 10", "duplex ≤ 1.1 × static", "epoch"]
    (memory,) = found["Tab. 10", "duplex ≤ 1.1 × static", "memory"]
    assert [each.verdict for each in (parameters, seconds, memory)] == ["reproduced", "not reproduced", "not run"]
    assert parameters.left.source.split() == ["timing.json#/parameters"] * 3
    data = DatasetResults("shapes", summary, runs=timed)
    rows = [[cell.text for cell in row.cells] for row in claims_tables(Results((data,)), data)[1].rows]
    (shown,) = [row for row in rows if "the local graph costs little" in row[1] and row[3] == "parameters"]
    assert shown[4:8] == ["reproduced", "109", "100", "× 1.09"]


def test_a_gain_is_compared_with_another():
    places = {"duplex_five": ("duplex", 30.0), "module_sp": ("module_sp", 20.0)}
    places |= {"fixed_visual": ("fixed_visual", 12.0), "fixed_plain": ("fixed_plain", 11.0)}
    results = {name: ablation(row, value) for name, (row, value) in places.items()}
    ((found,),) = [lines for key, lines in judged(results).items() if key[1].startswith("duplex − module_sp")]
    assert (found.verdict, found.gap.value, found.paper) == ("reproduced", pytest.approx(9.0), "ut-zappos 4.1 > 0.4")


@pytest.mark.parametrize(("right", "verdict"), [(3, "reproduced"), (1, "not reproduced"), (2, "undecided")])
def test_labels_of_wrong_answers_are_counted_among_the_next_two(right, verdict):
    """`right` of four wrong answers have their label in second or third place, in each seed; one answer is right."""
    others = [("a", "b", "c"), ("b", "a", "c"), ("b", "c", "a"), ("b", "c", "d"), ("b", "c", "d")]
    kept = [others[0], *others[1 : 1 + min(right, 2)], *([others[1]] * (right - 2)), *([others[3]] * (4 - right))]
    answers = pd.DataFrame(kept, columns=["top1", "top2", "top3"]).assign(label="a", world="closed")
    runs = {seed: RunRecord({}, predictions=answers, files={"predictions": f"{seed}.csv"}) for seed in (0, 1)}
    tree = {**ablation("duplex", 20.0)}
    data = DatasetResults("shapes", {"duplex": tree}, runs={"duplex": runs})
    (found,) = [each for each in judge_all(Results((data,)), data) if "second or third" in each.text]
    (part,) = found.parts
    assert found.verdict == part.verdict == verdict and part.rows == "duplex > 50 %"
    assert part.left.mean == 25 * right and part.left.source == "0.csv 1.csv"


def test_rows_with_answers_are_compared_on_the_same_images_and_seeds():
    """The interval is that of `compare_seeds`; one seed leaves it to the means."""
    rng = np.random.default_rng(3)
    seen = np.arange(80) % 2

    def answers(shift: float) -> pd.DataFrame:
        return pd.DataFrame({"world": "closed", "seen": seen, "margin": rng.normal((2 * seen - 1) * shift, 1.0)})

    tables = {name: [answers(shift) for _ in range(3)] for name, shift in (("module_sp", 0.9), ("fixed_plain", 0.2))}
    runs = {}
    for name, each in tables.items():
        runs[name] = {seed: RunRecord({}, predictions=table) for seed, table in enumerate(each)}
    summary = {name: ablation(name, 50.0) for name in runs}
    (found,) = judged({}, summary=summary, runs=runs)["Tab. 5", "module_sp > fixed_plain", "AUC"]
    margins: dict[str, Any] = {name: [margins_of(table, "closed") for table in each] for name, each in tables.items()}
    expected = compare_seeds(margins["fixed_plain"], margins["module_sp"], ROUNDS)["auc"]
    assert expected.interval is not None and found.verdict == "reproduced"
    assert (found.gap.low, found.gap.value, found.gap.high) == pytest.approx(
        [100 * number for number in (expected.interval[0], expected.value, expected.interval[1])]
    )
    assert found.reason.endswith("over images and seeds")
    single = {name: {0: each[0]} for name, each in runs.items()}
    (alone,) = judged({}, summary=summary, runs=single)["Tab. 5", "module_sp > fixed_plain", "AUC"]
    assert "images" not in alone.reason


def test_seen_bias_is_judged_by_answers_without_a_bias():
    results = {"duplex_five": ablation("duplex", 20.0), "module_sp": ablation("module_sp", 20.0)}
    for name, share in (("duplex_five", 60.0), ("module_sp", 70.0)):
        results[name]["closed"] |= {"false_seen": share, "false_seen_se": 0.5}
    assert verdicts(results, "abstract") == ["reproduced"]
    results["module_sp"]["closed"]["false_seen"] = 50.0
    assert verdicts(results, "abstract") == ["not reproduced"]


def test_ablation_tables_have_the_papers_numbers_verdicts_and_untrained_rows():
    results = {
        "duplex_five": ablation("duplex", 20.5),
        "module_cso": ablation("module_cso", 10.0, validation={"auc": 12.0, "auc_se": 0.1, "untrained": 2}),
    }
    data = DatasetResults("shapes", {}, ablations=results)
    table = dict(ablation_tables(Results((data,)), data))["Modules"]
    titles = [column.title for column in table.columns]
    rows = [dict(zip(titles, (cell.text for cell in row.cells), strict=True)) for row in table.rows]
    assert rows[0]["paper, mit-states: S / U / HM / AUC"] == "48.6 / 49.8 / 36.8 / 20.1"
    assert (rows[0]["validation AUC"], rows[0]["untrained"]) == ("12.0", "2 of 5 seeds")
    assert [row["below the last row"] for row in rows] == ["reproduced", ""]
    assert {row["paper's AUC"] for row in rows} == {"not comparable"}
    assert rows[0]["settings"] == "kind: prompts, inference: [semantic]"


def test_rows_are_the_methods_of_the_ablations():
    """Each named run is its row, and no other row of the same table, so that names and settings agree."""
    params, shipped = load_params(ROOT / "ablations/params.yaml"), load_params(ROOT / "params.yaml")
    for name, row in SPEC["rows"].items():
        for run in row["run"]:
            entry = (params if run in params.methods else shipped).entry(run)
            assert is_row({"kind": entry.kind, **entry.options_for("shapes")}, row), (name, run)
    for kind, options in SPEC["defaults"].items():
        defaults = find_method(kind).Options().to_dict()
        assert {key: defaults[key] for key in options} == options


def test_the_papers_own_numbers_satisfy_its_claims():
    """Except those that the file says they contradict."""
    for claim in SPEC["claims"]:
        for each in comparisons_of(claim) if not claim.get("unnumbered") and "number" not in claim else ():
            assert each.paper("shapes") == MISSING
            for benchmark in claim["of"]:
                sides = [(f, claims.paper_value(paper_row(n), t, benchmark, m)) for f, n, t, m in each.sides]
                assert all(value is not None for _, value in sides), (each.title, benchmark)
                total = sum(factor * value.mean for factor, value in sides)
                holds = abs(total) < CLOSE if "equal" in claim else total > 0
                assert holds == (benchmark not in claim.get("contradicted", ())), (each.title, benchmark)


def test_every_number_stands_in_the_paper():
    """Those of claims.yaml and quoted.yaml: S, U, HM and AUC side by side."""
    shared = os.environ.get("DUPLEX_SHARED")
    if shared is None:
        pytest.skip("DUPLEX_SHARED does not name the folder with the paper")
    (paper,) = (Path(shared) / "paper").glob("*.txt")
    text = re.sub(r"\\(?:textbf|underline|text)|\\scriptscriptstyle|\\pm\s*[\d.]+|[{}$]", "", paper.read_text("utf-8"))
    cells = re.sub(r"\s*&\s*", " & ", re.sub(r"\s+", " ", text))
    quoted = claims.read_package_yaml("quoted.yaml")
    for row in [*quoted["closed"], *quoted["open"], *quoted["backbones"]]:
        for benchmark in ("mit-states", "ut-zappos", "cgqa"):
            assert " & ".join(f"{number:.1f}" for number in row.get(benchmark, ())) in cells, (row["method"], benchmark)
    for name, row in SPEC["rows"].items():
        for table in ("closed", "groups_at_ends", "costs"):
            for numbers in row.get(table, {}).values():
                if isinstance(numbers, list):
                    assert " & ".join(f"{number:.1f}" for number in numbers) in cells, (name, numbers)
                else:
                    for metric, number in numbers.items():
                        assert re.search(rf"(?<![\d.])(?:{printed(metric, number)})(?!\d)", cells), (name, metric)


def test_every_later_number_has_its_source():
    later = claims.read_package_yaml("quoted.yaml")["later"]
    shared = os.environ.get("DUPLEX_SHARED")
    text = None if shared is None else (Path(shared) / "since.md").read_text("utf-8")
    for row in [*later["closed"], *later["open"]]:
        assert row["source"] and any(benchmark in row for benchmark in ("mit-states", "ut-zappos", "cgqa"))
        for benchmark in ("mit-states", "ut-zappos", "cgqa"):
            numbers = row.get(benchmark, ())
            if isinstance(numbers, dict):
                assert numbers.keys() <= {"seen", "unseen", "hm", "auc"}, row["method"]
                numbers = numbers.values()
            printed = [f"{number:.1f}" for number in numbers]
            assert text is None or "/".join(printed) in text or " / ".join(printed) in text, row["method"]


def printed(metric: str, number: float) -> str:
    """A number as the paper prints it, as a pattern: accuracies of groups have two decimals."""
    if metric in UNITS:
        unit = {"parameters": "M", "peak_bytes": "G", "seconds_per_epoch": "min", "test_seconds": "s"}[metric]
        return f"{UNITS[metric] * number:.{0 if metric == 'test_seconds' else 1}f}{unit}"
    return f"{number:.2f}|{number:.1f}".replace(".", r"\.")


def test_a_reproduction_has_a_folder_of_its_own_and_its_runs_are_measured_once():
    made = {"csp": ablation("CSP", 10.0)}
    data, file = DatasetResults("cgqa", made, ablations=made), "reproduced/summary.json"
    assert len(claims.measured_methods(Results((data,), metrics_file=file, ablations_file=file), data)) == 1
    assert len(claims.measured_methods(Results((data,)), data)) == 2
    paths = ArtifactPaths(Path("a")).of_reproduction("cgqa")
    assert {paths.report, paths.plots.parent, paths.runs.parent, paths.summary.parent} == {Path("a/reproduced/cgqa")}
