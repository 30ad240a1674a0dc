"""labutils.training.processes: children that wait for their turn, and what is said of those that
fail.
"""

from __future__ import annotations

import os
import time

import pytest

from labutils.training.processes import Child

WAITS = (
    "import sys; print('warm'); print('ready', flush=True); print(sys.stdin.readline().strip() * 2)"
)


def child(program: str, limit_s: float = 60, **variables: str) -> Child:
    return Child(["-c", program], os.environ | variables, limit_s)


def test_a_child_waits_for_its_turn_and_says_what_it_found():
    with child(WAITS) as waiting:
        assert waiting.until_ready() == "warm\n"
        waiting.go()
        assert waiting.until_end() == "gogo\n"


def test_children_get_ready_side_by_side():
    """The first can't end before it is told to, whichever is ready first."""
    with child(WAITS) as first, child(WAITS) as second:
        assert [second.until_ready(), first.until_ready()] == ["warm\n", "warm\n"]
        second.go()
        assert second.until_end() == "gogo\n"
        first.go()
        assert first.until_end() == "gogo\n"


@pytest.mark.parametrize(
    ("program", "last"),
    [
        ("raise SystemExit('no room')", "no room"),
        (
            "import sys; print('no room', file=sys.stderr); 1 / 0",
            "ZeroDivisionError: division by zero",
        ),
    ],
)
def test_one_that_fails_before_it_is_ready_says_why(program, last):
    with child(program) as failed:
        assert failed.until_ready() == ""
        failed.go()  # nobody hears it
        assert failed.until_end() == ""
        assert failed.failure() == f"the process ended with code 1: {last}"


def test_what_it_said_before_it_failed_is_not_lost():
    with child("print('half'); raise SystemExit(3)") as failed:
        failed.until_ready()
        failed.go()
        assert failed.until_end() == "half\n"
        assert failed.failure() == "the process ended with code 3: nothing was printed"


def test_what_it_said_before_it_was_ready_is_no_answer():
    with child(
        "import sys; print(2); print('ready', flush=True); sys.stdin.readline(); sys.exit('broke')"
    ) as failed:
        assert failed.until_ready() == "2\n"
        failed.go()
        assert failed.until_end() == ""
        assert failed.failure() == "the process ended with code 1: broke"


def test_one_that_hangs_is_ended_at_its_limit():
    start = time.monotonic()
    with child("import time; time.sleep(600)", limit_s=1) as hung:
        assert hung.until_ready() == ""
        assert hung.failure() == "the process ended with code -9: nothing was printed"
    assert time.monotonic() - start < 60


def test_a_block_that_is_left_ends_its_child():
    with pytest.raises(KeyboardInterrupt), child("import time; time.sleep(600)") as left:
        raise KeyboardInterrupt
    assert left._process.returncode == -9


def test_it_gets_the_environment_that_is_given():
    with child("import os; print(os.environ['GIVEN'])", GIVEN="7") as asked:
        assert asked.until_end() == "7\n"
