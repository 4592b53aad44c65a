"""The table of ablations has each run once, at the paper's first table that has it."""

from benchmarks.ablation_table import rows_of


def test_a_run_stands_once_in_the_order_of_the_papers_tables():
    world = {"auc": 50.04, "auc_se": 0.25, "hm": 40.0}
    trained = {"validation": {"untrained": 0}, "closed": world, "open": world}
    runs = {"other": trained, "full": trained, "part": {"validation": {"untrained": 2}, "closed": world}}
    tables = [
        {"source": "Tab. 5", "rows": [{"run": ["part", "alone"]}, {"run": ["full"]}]},
        {"source": "Tab. 7", "rows": [{"run": ["not_run"]}, {"run": ["full"]}]},
    ]
    table = rows_of(runs, tables)
    assert list(zip(table["paper"], table["run"], strict=True)) == [
        ("Tab. 5", "part"),
        ("Tab. 5", "full"),
        ("–", "other"),
    ]
    assert table["closed: AUC"].tolist() == ["50.0"] * 3 and table["open: AUC"].isna().tolist() == [True, False, False]
    assert table["untrained"].tolist() == [2, 0, 0]
