"""Tables and predictions: numbers as people read them, and nothing where there is nothing to
say.
"""

from __future__ import annotations

import pytest

from labutils.course.predictions import lean_in_words, scores_of, summaries
from labutils.course.tables import as_table, columns_of
from labutils.results.records import Run


def test_what_says_nothing_is_left_out():
    rows = [("kernels", None, None, 7), ("launches", None, None, None), ("busy", 0.5, None, None)]
    head, _, *body = as_table(("a step", "here", "ms", "H200"), *rows).splitlines()
    assert head == "| a step | here | H200 |"
    assert body == ["| kernels | – | 7 |", "| busy | 0.5 | – |"]
    assert as_table(("a step", "here"), ("kernels", None)) == ""


def test_columns_of_runs_are_those_that_went_well_and_have_numbers():
    run = Run("03", "w", metrics={"step_ms": 12.0}, tags={"workers": 1})
    runs = [run, Run("03", "failed", status="oom")]
    columns = {"workers": "workers", "step_ms": "step, ms", "energy_j": "energy, J"}
    head, _, row = as_table(columns_of(runs, columns)).splitlines()
    assert (head, row) == ("| workers | step, ms |", "| 1 | 12 |")
    assert as_table(columns_of([], lambda those: those[0])) == ""


def test_a_speed_up_is_over_the_base_of_the_same_comparison():
    def run(ms: float, comparison: str = "a", **tags: object) -> Run:
        samples = {"step_ms": [ms, 1.01 * ms, 0.99 * ms, ms], "round": [0, 1, 2, 3]}
        metrics = {"step_ms": {"median": ms, "p10": ms, "p90": ms, "n": 4}}
        return Run("04", "", comparison=comparison, tags=tags, samples=samples, metrics=metrics)

    runs = [run(200, rung="stock"), run(100, rung="graph"), run(200, rung="stock", again=True)]
    *_, stock, graph, again, other = as_table(
        columns_of([*runs, run(7, "b", rung="other")], ("step_ms", "speed-up"))
    ).splitlines()
    assert stock == "| stock | 200 | – |" and graph.startswith("| graph | 100 | 2.00x (")
    assert "1.00x (1.00 to 1.00x)" in again and other == "| other | 7 | – |"
    again_first = as_table(columns_of([runs[2], *runs[:2]], ("step_ms", "speed-up")))
    assert "| stock | 200 | – |" in again_first and "1.00x (1.00 to 1.00x)" in again_first


# Predictions


def record(
    status: str, value: object, measured: object = None, topic: str = "a", unit: str = "x"
) -> dict:
    known = {"lab": "03", "status": status, "topic": topic, "value": value, "unit": unit}
    return known | ({} if measured is None else {"measured": measured})


def test_the_last_prediction_counts_and_forgets_an_older_score():
    records = [record("prediction", 1), record("score", 1, 4), record("prediction", 5, topic="b")]
    records += [record("prediction", 3)]
    scores = scores_of(records)
    assert list(zip(scores["topic"], scores["predicted"], strict=True)) == [("b", 5), ("a", 3)]
    assert scores["measured"].isna().all()
    assert scores_of([*records, record("score", 3, 4)])["measured"].iloc[-1] == 4


def test_summaries_begin_with_what_is_misjudged_most():
    pairs = [(10, 5, "ms"), (4, 8, "s"), (30, 10, "us"), (9, 1, "%"), (0, 5, "x"), (1, None, "x")]
    records = [
        record("prediction" if measured is None else "score", predicted, measured, str(at), unit)
        for at, (predicted, measured, unit) in enumerate(pairs)
    ]
    scores = scores_of(records)
    table = summaries(scores, "kind")
    assert list(table["kind"]) == ["shares and changes", "times"]
    times = table.iloc[1]
    assert (times["predictions"], times["off"], times["near"]) == (3, 2, 2)
    assert times["lean"] == pytest.approx(2)
    assert list(summaries(scores)["predictions"]) == [4]
    assert summaries(scores_of([])).empty
    said = [lean_in_words(lean) for lean in (0.95, 1.5, 0.5)]
    assert said == ["neither way", "1.5x too high", "2x too low"]
