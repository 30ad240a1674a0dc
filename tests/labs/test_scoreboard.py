"""The scoreboard: whatever results there are, it says what they hold, how far off they are, and
what to do next.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from labutils.labs import lab12_scoreboard as scoreboard
from labutils.results import claims
from labutils.results.effects import effect
from labutils.results.judges import CONFIRMED, INCONCLUSIVE, REFUTED, Effect, judge_all
from labutils.results.records import REFERENCE, Run, Runs, read_runs

CLAIMS = claims.load_claims()
TITLES = {"03": "03 sweep", "04": "04 compile", "06": "06 anyres"}


@pytest.fixture(scope="module")
def board():
    """The H200's own verdicts, as if measured here."""
    return scoreboard.scoreboard(judge_all(None, *[read_runs(REFERENCE)] * 2))


def of(id: str, verdict: str, ratio: float | None = None):
    """A judgement of a claim, the measured ratio being this one."""
    (judgement,) = judge_all(id, Runs(), Runs())
    effects = {} if ratio is None else {"": Effect(ratio, ratio, ratio)}
    return replace(judgement, verdict=verdict, effects=effects)


def test_each_choice_parts_the_claims(board):
    assert list(board["id"]) == list(CLAIMS)
    for column in ("article", "lab", "verdict"):
        parts = [scoreboard.chosen(board, **{column: word}) for word in set(board[column])]
        assert sum(map(len, parts)) == len(board)


def test_statements_advice_and_models_are_counted_apart(board):
    statements, advice, models, settings = scoreboard.tallies(board).split("**:")[1:]
    assert "refuted" in statements and "pays here" not in statements
    assert "pays here" in advice and "refuted" not in advice and "confirmed" not in advice
    assert "the model agrees" in models and "told" in settings
    rows = [line for line in statements.splitlines() if line.startswith("| A")]
    counts = [[int(n) for n in re.findall(r"\d+", row.partition(" | ")[2])] for row in rows]
    assert all(2 * total == sum(those) for total, *those in counts)
    assert sum(row[0] for row in counts) == sum(c.kind == "statement" for c in CLAIMS.values())
    held, tested = scoreboard.confirmed(board)
    assert 0 < held < tested
    assert scoreboard.confirmed(scoreboard.scoreboard(judge_all(None, Runs(), Runs()))) == (0, 0)


def test_what_was_refuted_and_where_two_machines_differ(board):
    table = scoreboard.farthest_off(board)
    assert len(table) == (board["verdict"] == REFUTED).sum()
    assert table["off by a factor of"].dropna().is_monotonic_decreasing
    assert scoreboard.disagreements(board).empty
    row = board.index[board["verdict"] == CONFIRMED][0]
    other = board.assign(verdict=board["verdict"].mask(board.index == row, REFUTED))
    assert list(scoreboard.disagreements(other)["claim"]) == [board["id"][row]]


def test_what_is_on_record_says_what_kind_of_run_it_was():
    runs = [Run("03", "a", scale="full"), Run("04", "c")]
    runs += [Run("03", "b", at="2026-05-06T07:08:09+00:00")]
    table = scoreboard.on_record(Runs(runs), ["03"], TITLES)
    assert list(table["here"]) == ["run to its end", "begun", "not run"]
    assert tuple(table.iloc[0]) == ("03 sweep", "run to its end", 2, "full, tiny", "2026-05-06")


@pytest.mark.parametrize(
    ("id", "ratio", "factor"),
    [
        ("A1.total.speedup", 98 / 290 * 2, 2.0),
        ("A1.total.speedup", None, math.nan),
        ("A2.fixed.fp8-speed", 1.17, 1.95),  # 40 to 43 % shorter: 0.60 at most
        ("A2.fp8.speed", 0.95, 1.0),
        ("A1.compile.reduce-overhead", 2.0, math.nan),
        ("A3.qlora.slower", 1.64, 1.49),  # slightly: up to 1.10 times
        ("A2.left.fp8-once", 1.28, 1.16),  # as much, with the same tolerance
        ("A2.left.fp8-once", 0.5, 1.0),
        ("A3.offload.time", 1.0, 1.019),
    ],
)
def test_how_far_off_a_finding_is(id, ratio, factor):
    assert scoreboard.off_by(of(id, REFUTED, ratio)) == pytest.approx(factor, rel=0.01, nan_ok=True)


def test_what_comes_next_is_said_with_what_to_type():
    def steps(judgements, worth=()):
        return scoreboard.next_steps(scoreboard.scoreboard(judgements), worth)

    assert "`labutils run 03 06`" in steps(judge_all(None, Runs(), Runs()), ["03", "06"])[0]
    assert "`labutils run 03 --force`" in steps([of("A1.workers.one", INCONCLUSIVE)])[0]
    assert "Change a recipe" in steps([of("A1.workers.one", CONFIRMED)])[0]


def test_only_what_a_run_here_may_settle_is_counted():
    ids = ("A2.fp8.speed", "A2.fp8.vision-limits", "A1.lora.count", "A4.network.interface")
    for done, gpu, counted in (([], False, {"01": 1, "06": 1}), (["01"], True, {"01": 0, "06": 2})):
        found = scoreboard.still_open(judge_all(ids, Runs(), Runs()), done, gpu)
        assert dict(zip(found["lab"], found["a run here may settle"], strict=True)) == counted


def test_a_rule_without_a_noise_floor_is_not_right():
    def rule(a, again, b):
        found, twice = (effect(scoreboard.as_run(a), scoreboard.as_run(ms)) for ms in (b, again))
        steady = twice.low >= 0.97 and twice.high <= 1.03
        return (REFUTED, INCONCLUSIVE, CONFIRMED)[1 - found.direction * steady]

    assert "not yet" in scoreboard.check_rule(rule)
