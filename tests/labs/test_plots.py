"""Pictures show what they are given, cut nothing off and cover nothing up."""

from __future__ import annotations

import itertools

import matplotlib
import pytest

from labutils.course import plots
from labutils.course.plots.palette import PAPER
from labutils.course.predictions import scores_of
from labutils.profiling.gpu_specs import find_spec
from labutils.profiling.roofline import Roofline
from labutils.results.records import Run, summarise

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.text import Text

FAILED = Run("03", "workers=12", status="error: shared memory ran out")


@pytest.fixture(autouse=True)
def course_style():
    with plt.rc_context():
        plots.use_style()
        yield
    plt.close("all")


@pytest.fixture
def ax() -> Axes:
    return plt.subplots()[1]


def timed(name: str, ms: float, lane: str = "article") -> Run:
    samples = [ms * share for share in (0.95, 0.98, 1, 1.01, 1.06)]
    metrics = {"step_ms": summarise(samples)}
    return Run("04", name, lane=lane, metrics=metrics, samples={"step_ms": samples})


def texts(ax: Axes) -> list[str]:
    ax.figure.draw_without_rendering()
    return [t.get_text() for t in ax.figure.findobj(Text) if t.get_text() and t.get_visible()]


def assert_tidy(ax: Axes) -> None:
    """Nothing leaves the figure, and no text of the axes' own covers another."""
    figure = ax.figure
    figure.draw_without_rendering()
    tight = figure.get_tightbbox().transformed(figure.dpi_scale_trans)
    assert min(tight.x0, tight.y0) >= -1
    assert tight.x1 <= figure.bbox.x1 + 1 and tight.y1 <= figure.bbox.y1 + 1
    shown = [text for text in [*ax.texts, *ax.get_yticklabels()] if text.get_text()]
    boxes = [text.get_window_extent().shrunk(0.98, 0.8) for text in shown]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_sweep_draws_measured_published_model_and_failures(ax):
    x = [0, 1, 3, 8, 12]
    runs = [*(timed("", ms) for ms in (950, 700, 625, 640)), FAILED]
    published = {0: 1160, 3: 564, 8: 712, 12: None}
    plots.sweep(ax, x, runs, published, model={0: 930, 12: 600}, xlabel="workers")
    assert {"failed (here)", "failed (article)", "article", "formula", "workers"} <= set(texts(ax))
    measured = next(line for line in ax.lines if line.get_label().startswith("measured"))
    assert dict(zip(*measured.get_data(), strict=True)) == {0: 950, 1: 700, 3: 625, 8: 640}
    assert_tidy(ax)


def test_a_ladder_shows_what_each_rung_is_worth(ax):
    """Lanes in their order, factors against the rung above, the article's as ratios only."""
    lanes = {"same mathematics": (50, 35), "article": (950, 625), "same work": (620, 400, 120)}
    rungs = [timed(f"{ms} ms", ms, lane) for lane, times in lanes.items() for ms in times]
    for run in rungs:
        run.metrics["floor_ms"] = 8.9 if run.lane == "same mathematics" else 14.8
    rungs[-3].samples["step_ms"] = [590, 605, 620, 640, 655]  # within the noise of the rung above
    published = {"950 ms": 290, "625 ms": 141}
    plots.ladder(ax, [*rungs, FAILED], published=published, whose="A1, its card")
    rows = [label.get_text() for label in ax.get_yticklabels()]
    assert rows == [f"{ms} ms" for ms in (950, 625, 620, 400, 120, 50, 35)]
    said = texts(ax)
    assert {"article", "same work", "same mathematics", "A1, its card", "2.06x"} <= set(said)
    assert {"floor 14.8 ms", "floor 8.9 ms"} <= set(said)
    assert any(text.startswith("3.33x (") for text in said)  # 400 / 120, of the rung above
    hollow = [line for line in ax.lines if line.get_markerfacecolor() == PAPER]
    assert [line.get_ydata()[0] for line in hollow] == [ax.get_yticks()[2]]
    assert_tidy(ax)


def test_names_of_a_frontier_cover_no_point_and_no_other_name(ax):
    places = {"unsloth, packed": (7.5, 10100), "4 bits, compiled, checkpointed": (9, 10900)}
    places |= {"packed": (47.7, 10300), "packed, 4 bits": (37.4, 9000), "lora": (101, 4900)}
    metrics = ("peak_allocated_gb", "useful_tokens_per_s")
    runs = [Run("07", n, metrics=dict(zip(metrics, at, strict=True))) for n, at in places.items()]
    plots.frontier(ax, runs, lambda run: run.run)
    assert_tidy(ax)
    points = ax.transData.transform([*places.values()])
    boxes = [text.get_window_extent() for text in ax.texts]
    assert not any(box.contains(*point) for box in boxes for point in points)


def test_what_is_short_can_be_seen_in_a_timeline(ax):
    plots.timeline(ax, {"host": [(0.0, 900.0, "data"), (900.0, 0.1, "log"), (901.0, 99.0, "clip")]})
    assert ax.get_xlim() == (0, 1000) and {"data", "log", "clip", "host"} <= set(texts(ax))
    blocks = [path.get_extents() for drawn in ax.collections for path in drawn.get_paths()]
    assert max(blocks, key=lambda block: block.height).width == pytest.approx(5)


def test_breakdown_adds_up_and_names_only_what_can_be_seen(ax):
    parts = {"kernels": 270, "copies": 3, "data": 410, "sync": 22, "launch": 140, "host": 105}
    plots.breakdown(ax, {"here": parts, "H200": {"kernels": 100, "host": 20}})
    assert {"950 ms", "120 ms", "270", "410"} <= set(texts(ax)) and "3" not in texts(ax)
    assert_tidy(ax)


def test_names_of_a_roofline_find_room_beside_their_neighbours(ax):
    places = {"Self-attention": (2048, 275), "UNet convolution": (1324, 475), "top": (1365, 780)}
    places |= {"SiLU": (1, 3.7), "close to top": places["top"], "in a cache": (8, 3000)}
    runs = {
        name: Run("00", name, metrics={"intensity": at, "flops": rate * 1e9, "alone_ms": 1.0})
        for name, (at, rate) in places.items()
    }
    plots.roofline(ax, {"bf16": Roofline(800, 4000)}, runs)
    assert_tidy(ax)
    assert sorted(text.get_text() for text in ax.texts) == sorted(places)
    assert ax.get_ylim()[1] > 3000
    assert "bf16: 800 TFLOP/s, 4,000 GB/s" in texts(ax)


def test_peaks_show_the_share_of_the_dense_peak(ax):
    rates = {"bf16": [700.0, 710.0], "fp8": [1400.0, 1410.0], "fp32": [49.0, 50.0]}
    run = Run("00", "machine", samples={f"tflops_{dtype}": each for dtype, each in rates.items()})
    plots.peaks(ax, run, find_spec("NVIDIA H200"))
    assert any("71 % of 989" in text for text in texts(ax))
    assert_tidy(ax)


def test_typical_milliseconds_have_what_the_whole_has():
    waits = [(float(at), 0.01, "wait") for at in range(20)]  # all in the first fifth
    calls = [(at / 10, 0.05, "call") for at in range(1000)]
    found = plots.typical({"host": [*calls, *waits], "GPU": []}, 2.0)
    assert {kind for *_, kind in found["host"]} == {"call", "wait"} and not found["GPU"]
    # A wait at the end, after calls that fill the rest, is not what most of the step is like.
    calls, wait = [(at / 10, 0.09, "call") for at in range(910)], [(91.0, 9.0, "wait")]
    assert {kind for *_, kind in plots.typical({"host": calls + wait}, 2.0)["host"]} == {"call"}


def test_a_picture_of_memory_keeps_the_peak_however_many_events(ax):
    levels = [10**9] * 5000
    levels[4321] = 7 * 10**9
    series = {"weights": [10**9] * 5000, "activations": levels}
    plots.stacked_memory(ax, series, [(0, "forward"), (4000, "backward")], plots.MEMORY_FILLS)
    tops = [path.vertices[:, 1].max() for area in ax.collections for path in area.get_paths()]
    assert max(tops) == 8
    assert any("peak 8 GB" in text for text in texts(ax))
    assert {"forward", "backward"} <= set(texts(ax))


def test_names_of_points_that_are_near_each_other_lie_apart(ax):
    points = {"resized": (1.7, (130, 138, 150)), "in memory": (1.2, (150, 168, 260))}
    points |= {"PNG": (60.0, (370, 412, 520))}
    plots.over_decoding(ax, {0: {0.0: 160.0, 70.0: 440.0}}, {0: points}, "ms")
    assert len(ax.texts) == 3
    assert_tidy(ax)


def test_calibration_shows_each_prediction_with_both_numbers(ax):
    asked = [("00", "far too high", "us", 100, 0.001), ("01", "half", "ms", 700, 1400)]
    asked += [("02", "right", "", 448, 448), ("03", "no factor", "%", 0, 5)]
    names = ("lab", "topic", "unit", "value", "measured")
    records = [dict(zip(names, one, strict=True)) | {"status": "score"} for one in asked]
    plots.calibration(ax, scores_of(records), near=2)
    assert {"100 | 0.001 us", "700 | 1,400 ms", "00  far too high"} <= set(texts(ax))
    assert not any("no factor" in text for text in texts(ax))
    places = [line.get_xdata()[0] for line in ax.lines if len(line.get_xdata()) == 1]
    assert places == pytest.approx([plots.MOST_OFF, 0.5, 1])
    assert_tidy(ax)
