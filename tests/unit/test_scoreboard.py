"""The scoreboard: whatever results there are, it says what they hold, how far off they are, and
what to do next.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from claim_runs import article_runs, timed

from labutils.labs import lab11_scoreboard
from labutils.labs.lab06_advisor import published
from labutils.results import claims, report
from labutils.results.judges import (
    CONFIRMED,
    INCONCLUSIVE,
    NOT_TESTABLE,
    REFUTED,
    Effect,
    judge_all,
)
from labutils.results.records import REFERENCE, Results, Run, Runs, read_runs

CLAIMS = claims.load_claims()
TITLES = {"03": "03 sweep", "04": "04 compile", "06": "06 anyres"}


@pytest.fixture(scope="module")
def theirs():
    """The articles' own numbers, as if measured."""
    return judge_all(None, article_runs(), article_runs())


def of(id: str, verdict: str, ratio: float | None = None, why: str = "because"):
    """A judgement of a claim, the measured ratio being this one."""
    (found,) = judge_all(id, Runs(), Runs())
    effects = {} if ratio is None else {"": Effect(ratio, ratio, ratio)}
    return replace(found, verdict=verdict, why=why, effects=effects)


# Filters


def test_without_a_choice_everything_is_chosen(theirs):
    assert lab11_scoreboard.chosen(theirs) == theirs


def test_each_filter_parts_the_claims(theirs):
    for name, values in lab11_scoreboard.filters().items():
        parts = [lab11_scoreboard.chosen(theirs, **{name: value}) for value in values[1:]]
        assert sum(map(len, parts)) == len(theirs)
        assert values[0] == "all" and len(set(values)) == len(values)


def test_filters_go_together(theirs):
    found = lab11_scoreboard.chosen(theirs, "A2", "05", CONFIRMED)
    assert found and {(j.claim.article, j.claim.lab, j.verdict) for j in found} == {
        ("A2", "05", CONFIRMED)
    }
    assert lab11_scoreboard.chosen(theirs, "A1", "07") == []


def test_every_article_and_lab_with_a_claim_can_be_chosen():
    assert set(lab11_scoreboard.filters()["article"]) == {"all", *claims.articles()}
    assert set(lab11_scoreboard.filters()["lab"]) == {
        "all",
        *(claim.lab for claim in CLAIMS.values()),
    }


@pytest.mark.parametrize("choice", [{"article": "A9"}, {"lab": "3"}, {"verdict": "Confirmed"}])
def test_a_choice_that_there_is_not_is_said_with_those_there_are(theirs, choice):
    ((name, word),) = choice.items()
    with pytest.raises(
        ValueError, match=f"There is no {name} '{word}' to choose by. Choose one of: all, "
    ):
        lab11_scoreboard.chosen(theirs, **choice)


def test_the_tally_counts_every_claim(theirs):
    rows = lab11_scoreboard.tally(theirs)
    assert [row[0] for row in rows] == list(claims.articles())
    assert sum(row[1] for row in rows) == len(CLAIMS)
    for row in rows:
        sides = [tuple(map(int, cell.split(" / "))) for cell in row[2:]]
        assert len(sides) == len(lab11_scoreboard.words(theirs))
        assert [sum(side) for side in zip(*sides, strict=True)] == [row[1], row[1]]


# On record


def test_what_is_on_record_says_what_kind_of_run_it_was():
    runs = {
        ("03", "a"): timed("03", "a", 5),
        ("03", "b"): Run("03", "b", scale="tiny", machine={"cpu": "a laptop's"}),
    }
    runs["03", "b"].at = "2026-05-06T07:08:09+00:00"
    runs["04", "c"] = Run("04", "c", scale="", machine={})
    rows = lab11_scoreboard.on_record(runs, ["03"], TITLES)
    assert rows == [
        (
            "03 sweep",
            "run to its end",
            2,
            "full, tiny",
            "RTX PRO 6000 Blackwell, a laptop's",
            "2026-05-06",
        ),
        ("04 compile", "begun", 1, None, "unknown", None),
        ("06 anyres", "not run", None, None, None, None),
    ]


# How far off


@pytest.mark.parametrize(
    ("id", "ratio", "factor"),
    [
        ("A1.total.speedup", 98 / 290 * 2, 2.0),
        ("A1.total.speedup", None, None),
        ("A2.fixed.fp8-speed", 1.17, 1.95),  # 40 to 43 % shorter: 0.60 at most
        ("A2.fp8.speed", 1.26, 1.26 / 0.96),
        ("A2.fp8.speed", 0.95, 1.0),
        ("A2.fixed.break-even", 0.5, None),
        ("A1.compile.reduce-overhead", None, None),
    ],
)
def test_how_far_off_a_finding_is(id, ratio, factor):
    assert lab11_scoreboard.off_by(of(id, REFUTED, ratio)) == (
        factor and pytest.approx(factor, rel=0.01)
    )


def test_surprises_begin_with_the_largest_and_end_with_those_without_a_number():
    judgements = [
        of("A1.compile.reduce-overhead", REFUTED),
        of("A1.total.speedup", REFUTED, 0.6),
        of("A1.workers.one", CONFIRMED, 0.5),
        of("A1.workers.three", REFUTED, 2.0),
    ]
    found = lab11_scoreboard.surprises(judgements)
    assert [j.claim.id for _, j in found] == [
        "A1.workers.three",
        "A1.total.speedup",
        "A1.compile.reduce-overhead",
    ]
    assert lab11_scoreboard.surprises(judgements, "reference") == []


def test_the_reference_can_be_asked_too():
    found = lab11_scoreboard.surprises(judge_all(None, Runs(), read_runs(REFERENCE)), "reference")
    assert found and all(j.reference_verdict == REFUTED for _, j in found)
    factors = [factor or 0 for factor, _ in found]
    assert factors == sorted(factors, reverse=True) and factors[0] > 1


def test_two_machines_disagree_only_about_what_both_could_test():
    verdicts = [
        (CONFIRMED, REFUTED),
        (CONFIRMED, CONFIRMED),
        (NOT_TESTABLE, REFUTED),
        (REFUTED, NOT_TESTABLE),
    ]
    ids = ["A1.workers.one", "A1.workers.three", "A1.pin.speedup", "A1.total.speedup"]
    judgements = [
        replace(of(id, here), theirs=of(id, there))
        for id, (there, here) in zip(ids, verdicts, strict=True)
    ]
    assert [j.claim.id for j in lab11_scoreboard.disagreements(judgements)] == ["A1.workers.one"]


# Next


def test_without_results_the_labs_are_what_comes_next():
    judgements = judge_all(None, Runs(), Runs())
    first, *others = lab11_scoreboard.next_steps(judgements, [], TITLES | {"11": "11 scoreboard"})
    assert "`labutils run 03 04 06`" in first and f"of the {len(CLAIMS)} claims" in first
    assert not others


def test_what_would_settle_most_comes_first():
    judgements = [of("A1.workers.one", NOT_TESTABLE, why="x")] + [
        of(id, NOT_TESTABLE, why="y") for id in ("A1.workers.three", "A1.pin.speedup")
    ]
    assert lab11_scoreboard.needs(judgements) == [
        ("y", ["A1.workers.three", "A1.pin.speedup"]),
        ("x", ["A1.workers.one"]),
    ]


def test_noise_and_surprises_are_followed_up():
    judgements = [
        of("A1.workers.one", INCONCLUSIVE, 1.0),
        of("A1.total.speedup", REFUTED, 98 / 290 * 2),
    ]
    said = lab11_scoreboard.next_steps(judgements, list(TITLES), TITLES)
    assert "1 claim is inconclusive" in said[0] and "`labutils run 03 --force`" in said[0]
    assert "*A1.total.speedup* is 2 times off here" in said[1]
    assert lab11_scoreboard.next_steps([of("A1.workers.one", CONFIRMED)], list(TITLES), TITLES) == [
        "Everything is tested here. Change a recipe, and predict what it does."
    ]


# Advice


def test_advice_is_by_the_nearest_machine_s_numbers():
    mine = {
        ("06", "bf16 b1"): Run(
            "06",
            "bf16 b1",
            metrics={"first_step_s": 2.0, "step_ms": 500.0, "peak_allocated_gb": 9.0},
        )
    }
    whose, options = lab11_scoreboard.options_at_hand(mine, read_runs(REFERENCE))
    assert whose == "the runs of section 1 (unknown, scale tiny)" and [
        option.memory_gb for option in options
    ] == [9.0]
    whose, options = lab11_scoreboard.options_at_hand({}, read_runs(REFERENCE))
    assert whose.startswith("our reference's runs (NVIDIA H200, scale full") and len(options) > 3
    assert lab11_scoreboard.options_at_hand({}, {}) == (
        "the article's numbers, at batch 1",
        published(),
    )


def test_advice_that_cannot_be_given_says_why():
    assert "None of the" in lab11_scoreboard.advice(published(), 1.0, 100, None)
    assert "both must be numbers above 0" in lab11_scoreboard.advice(published(), 24.0, -1, None)
    assert "| **" in lab11_scoreboard.advice(published(), 24.0, 1000, None)


@pytest.mark.parametrize(
    ("machine", "asked", "gb"),
    [
        ({"gpu_memory_gb": 12.0}, 0.0, 12.0),
        ({"gpu_memory_gb": 12.0}, 80.0, 80.0),
        ({}, 0.0, 24.0),
        ({"gpu_memory_gb": "x"}, 0.0, 24.0),
    ],
)
def test_the_memory_is_what_was_asked_for_or_is_there(machine, asked, gb):
    assert lab11_scoreboard.card_gb(machine, asked) == gb


# What it reads


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "REPOSITORY", tmp_path)
    return tmp_path


def kept(folder, *labs: str):
    results = Results(folder)
    for lab in labs:
        results.done(lab)
    return results.path


def test_together_with_the_others_it_reads_their_folder(checkout):
    kept(checkout / "results" / "older", "03")
    own = kept(checkout / "results" / "course", "03", "04", "11")
    assert report.files_beside(own.parent, "11") == [own]


def test_alone_it_reads_each_lab_s_newest(checkout):
    newer, older = kept(checkout / "results" / "a", "03"), kept(checkout / "results" / "b", "04")
    os.utime(older, (1, 1))
    alone = kept(checkout / "results" / "c", "11")
    assert report.files_beside(alone.parent, "11") == [older, newer]
    assert report.read_page([older, newer], checkout / "none").labs_done == ["03", "04"]


def test_with_nothing_at_all_it_reads_nothing(checkout):
    assert report.files_beside(checkout / "results" / "x", "11") == []


def test_a_page_keeps_predictions(checkout):
    results = Results(checkout / "results" / "a")
    results.append(
        {"lab": "03", "status": "score", "topic": "t", "value": 1, "measured": 2, "unit": "x"}
    )
    page = report.read_page([results.path], checkout / "none")
    assert [record["status"] for record in page.records] == ["score"]
