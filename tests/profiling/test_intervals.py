"""Interval arithmetic against an oracle that counts unit cells one by one."""

from hypothesis import given
from hypothesis import strategies as st

from labutils.profiling.intervals import Lookup, difference, overlap, total, union

ENDS = st.integers(0, 40)
INTERVALS = st.lists(st.tuples(ENDS, ENDS), max_size=12)


def cells(intervals):
    """The unit cells that `intervals` cover: the oracle."""
    return {cell for start, end in intervals for cell in range(start, end)}


def is_normal(intervals):
    return all(a < b for a, b in intervals) and all(
        left[1] < right[0] for left, right in zip(intervals, intervals[1:], strict=False)
    )


@given(INTERVALS)
def test_union_covers_what_any_interval_covers(intervals):
    merged = union(intervals)
    assert cells(merged) == cells(intervals)
    assert total(merged) == len(cells(intervals))
    assert is_normal(merged)


@given(INTERVALS, INTERVALS)
def test_overlap_and_difference_split_a_set_in_two(first, second):
    a, b = union(first), union(second)
    assert cells(overlap(a, b)) == cells(a) & cells(b)
    assert cells(difference(a, b)) == cells(a) - cells(b)
    assert total(overlap(a, b)) + total(difference(a, b)) == total(a)


@given(INTERVALS, ENDS, ENDS)
def test_lookup_answers_as_the_plain_functions_do(intervals, moment, other):
    lookup = Lookup(time := union(intervals))
    found = lookup.index(moment)
    assert (found is not None) == (moment in cells(time))
    assert found is None or time[found][0] <= moment < time[found][1]
    stretch = (min(moment, other), max(moment, other))
    assert lookup.within(stretch) == overlap(time, union([stretch]))
    assert lookup.outside((moment, other)) == len(cells([(moment, other)]) - cells(time))
