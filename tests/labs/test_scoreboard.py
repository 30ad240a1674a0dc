"""The scoreboard: whatever results there are, it says what they hold, how far off they are, and
what to do next.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from labutils.labs import lab12_scoreboard as scoreboard
from labutils.labs.lab06_advisor import published
from labutils.results import claims
from labutils.results.judges import (
    CONFIRMED,
    INCONCLUSIVE,
    NOT_TESTABLE,
    REFUTED,
    Effect,
    judge_all,
)
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
    for name, values in scoreboard.choices(board).items():
        parts = [scoreboard.chosen(board, **{name: value}) for value in values[1:]]
        assert sum(map(len, parts)) == len(scoreboard.chosen(board, **{name: values[0]}))
        with pytest.raises(ValueError, match="Choose one of: all, "):
            scoreboard.chosen(board, **{name: "x"})
    few = scoreboard.chosen(board, article="A2", lab="05", verdict=CONFIRMED)
    assert len(few) > 0 and set(few["article"]) == {"A2"} and set(few["lab"]) == {"05"}


def test_the_tally_counts_every_claim(board):
    table = scoreboard.tally(board)
    assert list(table["claims of"]) == list(claims.articles())
    assert table["in all"].sum() == len(CLAIMS)
    for _, row in table.iterrows():
        sides = [tuple(map(int, cell.split(" / "))) for cell in row.iloc[2:]]
        assert [sum(side) for side in zip(*sides, strict=True)] == [row["in all"]] * 2


def test_what_is_on_record_says_what_kind_of_run_it_was():
    runs = [Run("03", "a", scale="full", machine={"gpu": "H"}), Run("04", "c")]
    runs += [Run("03", "b", machine={"cpu": "a laptop's"}, at="2026-05-06T07:08:09+00:00")]
    table = scoreboard.on_record(Runs(runs), ["03"], TITLES)
    assert list(table["here"]) == ["run to its end", "begun", "not run"]
    sweep = ("03 sweep", "run to its end", 2, "full, tiny", "H, a laptop's", "2026-05-06")
    assert tuple(table.iloc[0]) == sweep


@pytest.mark.parametrize(
    ("id", "ratio", "factor"),
    [
        ("A1.total.speedup", 98 / 290 * 2, 2.0),
        ("A1.total.speedup", None, None),
        ("A2.fixed.fp8-speed", 1.17, 1.95),  # 40 to 43 % shorter: 0.60 at most
        ("A2.fp8.speed", 1.26, 1.26 / 0.96),
        ("A2.fp8.speed", 0.95, 1.0),
        ("A1.compile.reduce-overhead", 2.0, None),
    ],
)
def test_how_far_off_a_finding_is(id, ratio, factor):
    off = scoreboard.off_by(of(id, REFUTED, ratio))
    assert off == (factor and pytest.approx(factor, rel=0.01))


def test_what_comes_next_is_said_with_what_to_type():
    def steps(judgements, done=TITLES, on_gpu=True):
        board = scoreboard.scoreboard(judgements)
        return scoreboard.next_steps(board, list(done), TITLES, on_gpu)

    nothing = judge_all(None, Runs(), Runs())
    first, second = steps(nothing, done=[], on_gpu=False)
    assert "`labutils run 03 04 06`" in first and "GPU" in second
    assert "`labutils run 03 --force`" in steps([of("A1.workers.one", INCONCLUSIVE)])[0]
    assert "Everything" in steps([of("A1.workers.one", CONFIRMED)])[0]
    assert "Everything" in steps([of("A1.workers.one", NOT_TESTABLE)])[0]


def test_advice_is_by_the_nearest_machines_numbers():
    measured = {"first_step_s": 2.0, "step_ms": 500.0, "peak_allocated_gb": 9.0}
    tags = {"experiment": "methods", "method": "bf16", "batch": 1}
    mine = Runs([Run("06", "bf16 b1", metrics=measured, tags=tags)])
    whose, options = scoreboard.options_at_hand(mine, read_runs(REFERENCE))
    assert "section 1" in whose and list(options["memory_gb"]) == [9.0]
    whose, options = scoreboard.options_at_hand(Runs(), read_runs(REFERENCE))
    assert "NVIDIA H200" in whose and len(options) > 3
    assert scoreboard.options_at_hand(Runs(), Runs())[1].equals(published())
    assert "leanest" in scoreboard.advice(published(), 1.0, 100, None)
    assert "| fixed | 106" in scoreboard.advice(published(), 24.0, 1000, None)
