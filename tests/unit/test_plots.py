"""Pictures: they show what they are given, cut nothing off, cover nothing up, and survive a grey
print.
"""

from __future__ import annotations

import itertools
import subprocess
import sys

import matplotlib
import pytest
from claim_runs import timed
from hypothesis import given
from hypothesis import strategies as st

from labutils.course import plots
from labutils.course.plots import layout, scores, traces
from labutils.course.predictions import Score
from labutils.labs import lab06_advisor
from labutils.labs.lab06_advisor import chart, published
from labutils.profiling.roofline import Roofline
from labutils.profiling.trace import PHASES
from labutils.results.judges import VERDICTS
from labutils.results.records import Run

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.text import Text

PARTS = {"kernels": 270, "copies": 3, "data": 410, "sync": 22, "launch": 140, "host": 105}
FAILED = Run("03", "workers=12", status="error: shared memory ran out")


@pytest.fixture(autouse=True)
def course_style():
    with plt.rc_context():
        plots.use_style()
        yield
    plt.close("all")


@pytest.fixture
def ax():
    return plt.subplots()[1]


def ladder() -> list[Run]:
    """Eighteen rungs in three lanes, given out of the lanes' order."""
    lanes = {"same mathematics": (80, 70, 50, 35, 29), "article": (950, 625, 430, 425)}
    lanes["same work"] = (400, 380, 300, 290, 260, 255, 200, 120, 110)
    runs = []
    for lane, times in lanes.items():
        for number, ms in enumerate(times):
            run = timed("04", f"{lane}, rung {number} with a name", ms, spread=0.05)
            run.lane = lane
            runs.append(run)
    return runs


def texts(ax) -> list[str]:
    ax.figure.draw_without_rendering()
    return [t.get_text() for t in ax.figure.findobj(Text) if t.get_text() and t.get_visible()]


def assert_tidy(ax) -> None:
    """Nothing leaves the figure, and no text of the axes' own covers another."""
    figure = ax.figure
    figure.draw_without_rendering()
    tight = figure.get_tightbbox().transformed(figure.dpi_scale_trans)
    assert tight.x0 >= -1 and tight.y0 >= -1
    assert tight.x1 <= figure.bbox.x1 + 1 and tight.y1 <= figure.bbox.y1 + 1
    shown = [t for t in ax.texts if t.get_text()] + [
        t for t in ax.get_yticklabels() if t.get_text()
    ]
    boxes = [(t.get_text(), t.get_window_extent().shrunk(0.98, 0.8)) for t in shown]
    covered = [
        (a, b) for (a, one), (b, other) in itertools.combinations(boxes, 2) if one.overlaps(other)
    ]
    assert covered == []


def test_steps_show_medians_samples_and_failures(ax):
    runs = {
        "workers=0": timed("03", "a", 950, 0.1),
        "workers=3": timed("03", "b", 625),
        "workers=12": FAILED,
    }
    plots.steps(ax, runs)
    assert {"950 ms", "625 ms", "error: shared memory ran out"} <= set(texts(ax))
    assert [label.get_text() for label in ax.get_yticklabels()] == list(runs)
    assert sum(len(dots.get_offsets()) for dots in ax.collections) == 10
    assert "ms" in ax.get_xlabel()
    assert_tidy(ax)


def test_steps_take_a_list_and_no_measurement_at_all(ax):
    plots.steps(ax, [FAILED])
    assert "workers=12" in texts(ax)


def test_sweep_draws_measured_published_model_and_failures(ax):
    x = [0, 1, 3, 8, 12]
    runs = [
        *(timed("03", str(n), ms) for n, ms in zip(x, (950, 700, 625, 640), strict=False)),
        FAILED,
    ]
    plots.sweep(
        ax,
        x,
        runs,
        published={0: 1160, 3: 564, 8: 712, 12: None},
        model={0: 930, 12: 600},
        xlabel="workers",
    )
    said = texts(ax)
    assert {
        "failed (here)",
        "failed (article)",
        "article",
        "model",
        "workers",
        "ms an optimizer step",
    } <= set(said)
    measured = next(line for line in ax.lines if line.get_label().startswith("measured"))
    assert list(measured.get_xdata()) == [0, 1, 3, 8]
    assert list(measured.get_ydata()) == [950, 700, 625, 640]
    assert ax.get_ylim()[0] == 0
    assert_tidy(ax)


def test_sweep_of_nothing_but_failures(ax):
    plots.sweep(ax, [8, 12], [None, FAILED])
    assert texts(ax).count("failed (here)") == 2


@pytest.mark.parametrize("log", [True, False])
def test_waterfall_of_eighteen_rungs(ax, log):
    published = {"as downloaded": 1160, "3 workers": 564, "torch.compile": 408, "pinned": 392}
    plots.waterfall(ax, ladder(), 14.4, published=published, log=log)
    said = texts(ax)
    rungs = [label.get_text() for label in ax.get_yticklabels()]
    assert rungs[:4] == list(published)
    assert [name.split(",")[0] for name in rungs[4:]] == ["article"] * 4 + ["same work"] * 9 + [
        "same mathematics"
    ] * 5
    assert {"lane: article", "lane: same work", "lane: same mathematics", "floor 14.4 ms"} <= set(
        said
    )
    assert any(text.endswith("2.96x") for text in said)
    assert any(
        text.endswith("32.76x") for text in said
    )  # 950 / 29: over the stock loop here, not the article's
    assert ax.get_xscale() == ("log" if log else "linear")
    assert_tidy(ax)


def test_a_rungs_range_and_its_number_stay_inside_the_waterfall(ax):
    slow = Run(
        "04",
        "noisy",
        lane="same work",
        metrics={"step_ms": {"p10": 50.0, "median": 60.0, "p90": 900.0}},
    )
    plots.waterfall(ax, [timed("04", "stock", 100), slow], None, log=False)
    assert ax.get_xlim()[1] > 1.2 * 900


def test_waterfall_without_rungs_is_an_error(ax):
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.waterfall(ax, [FAILED], 10)


def test_waterfall_needs_neither_floor_nor_publication(ax):
    plots.waterfall(ax, [timed("04", "stock", 100), FAILED], None)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["stock"]
    assert_tidy(ax)


def test_waterfall_of_another_time(ax):
    runs = [timed("06", "naive", 250), timed("06", "packed", 900)]
    for run, ms in zip(runs, (85.0, 34.0), strict=True):
        run.metrics["ms_per_1k_useful_tokens"] = ms
    plots.waterfall(ax, runs, 30, metric="ms_per_1k_useful_tokens")
    said = texts(ax)
    assert any(text.endswith("2.50x") for text in said)
    assert any(text.startswith("ms for 1000 useful tokens") for text in said)
    assert_tidy(ax)


def test_curves_leave_out_what_has_no_point(ax):
    plots.curves(
        ax, {"bf16": {1: 30.0, 24: 90.0}, "fp8-te": {}, "qlora": {1: 12.0}}, "batch size", "GB"
    )
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["bf16", "qlora"]
    assert list(ax.get_xticks()) == [1, 24]
    assert ax.get_ylim()[0] == 0
    assert_tidy(ax)


def test_panels_have_one_axis_and_one_legend():
    fig, axes = plt.subplots(1, 2)
    lines = {
        "short": {"lora": {4: 2.0}, "unsloth": {}},
        "long": {"lora": {4: 9.0}, "unsloth": {4: 30.0}},
    }
    plots.panels(axes, lines, "examples", "s")
    assert {ax.get_ylim() for ax in axes} == {(0, 1.08 * 30)}
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["lora", "unsloth"]
    assert [ax.get_legend() for ax in axes] == [None, None]
    plt.close(fig)


def test_counts_stand_side_by_side(ax):
    plots.counts(ax, {"uniform": [3, 8, 0], "varied": [3, 11, 2]}, "step", "recompilations")
    bars = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in ax.patches)
    assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(bars))
    assert sorted(bar.get_height() for bar in ax.patches) == [0, 2, 3, 3, 8, 11]
    assert_tidy(ax)


def test_a_range_goes_through_the_dots_of_its_row(ax):
    ranges = {"either reading": {"b": (-3.0, 5.0)}}
    plots.differences(ax, {"a": [1.0], "b": [1.0]}, (-20, 20), "band", "x", ranges)
    (line,) = (c for c in ax.collections if c.get_label() == "either reading")
    (ends,) = line.get_segments()
    dot = ax.collections[1].get_offsets()[0]
    assert ends[:, 0].tolist() == [-3, 5] and ends[0, 1] == ends[1, 1] == dot[1]
    plots.differences(ax, {"a": [1.0]}, (-20, 20), "band", "x", {"none was read": {}})
    assert "none was read" not in [text.get_text() for text in ax.get_legend().get_texts()]


def test_differences_are_drawn_over_their_band(ax):
    plots.differences(
        ax,
        {"fp8": [0.1, 0.2], "qlora": [-0.3]},
        (-1.1, 0.9),
        "BF16 over all seeds",
        "difference, %",
    )
    assert sum(len(dots.get_offsets()) for dots in ax.collections) == 3
    assert [label.get_text() for label in ax.get_yticklabels()] == ["fp8", "qlora"]
    assert ax.get_xlim()[0] <= -1.1 and ax.get_xlim()[1] >= 0.9
    assert "BF16 over all seeds" in texts(ax)
    assert_tidy(ax)


def test_slower_hosts_show_curves_points_and_rivals(ax):
    curves = {"moe": {0.0: 700.0, 20.0: 1200.0}, "dense": {0.0: 370.0, 20.0: 400.0}}
    points = {"moe": {0.0: 711.0, 10.0: 950.0}, "dense": {0.0: 373.0}}
    plots.slower_hosts(ax, curves, points, {"the other card, predicted": 1100.0})
    assert {
        "moe, predicted",
        "moe, measured",
        "dense, predicted",
        "the other card, predicted",
    } <= set(texts(ax))
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert lines["moe, predicted"].get_color() == lines["moe, measured"].get_color()
    assert list(lines["moe, measured"].get_ydata()) == [711.0, 950.0]
    assert_tidy(ax)


def test_choices_fill_every_band_up_to_its_edges(ax):
    lab06_advisor.choices(ax, chart(published()), most_steps=10_000, most_gb=30)
    assert ax.get_xlim() == (1, 10_000) and ax.get_ylim() == (0, 30)
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend[0] == "qlora" and {"fp8-te", "fixed", "fixed-fp8-te"} <= set(legend)
    area = sum(bar.get_height() * bar.get_width() for bar in ax.patches)
    assert area == pytest.approx((30 - 7.54) * 9_999)
    assert "nothing fits" in texts(ax)
    assert_tidy(ax)


def test_choices_without_a_band_are_an_error(ax):
    with pytest.raises(ValueError, match="nothing to draw"):
        lab06_advisor.choices(ax, [])


def test_timeline_gives_lanes_of_other_categories_their_own_legend(ax):
    host = [(0, 40, "data"), (40, 30, "forward"), (70, 30, "backward")]
    gpu = [(45 + 0.5 * i, 0.3, f"kernel {i % 9}") for i in range(100)]
    plots.timeline(ax, {"host": host, "GPU": gpu}, most=6)
    said = texts(ax)
    assert {"host", "GPU", "ms", "data", "forward", "backward", "other"} <= set(said)
    assert sum(text.startswith("kernel") for text in said) == 6
    assert ax.get_xlim() == (0, 100)
    assert_tidy(ax)


def test_timeline_shares_a_legend_where_lanes_share_categories(ax):
    plots.timeline(
        ax,
        {
            "stock": [(0, 4, "data"), (4, 4, "forward")],
            "compiled": [(0, 4, "data"), (4, 1, "forward")],
        },
    )
    assert texts(ax).count("data") == 1
    assert_tidy(ax)


def test_a_phase_looks_the_same_in_every_timeline(ax):
    plots.timeline(ax, {"host": [(0, 4, "data"), (4, 4, "forward")], "GPU": [(4, 2, "GEMM")]})
    other = plots.timeline(
        plt.subplots()[1], {"host": [(0, 4, "forward")], "GPU": [(1, 2, "GEMM")]}
    )
    colors = [
        {tuple(color) for blocks in axes.collections for color in blocks.get_facecolor()}
        & {(*to_rgb(plots.TEAL), 1.0)}
        for axes in (ax, other)
    ]
    assert colors[0] == colors[1] == {(*to_rgb(plots.TEAL), 1.0)}


def test_every_phase_of_the_loop_has_a_fill():
    assert set(PHASES) == set(plots.PHASE_FILLS)


def test_timeline_of_nothing_is_an_error(ax):
    with pytest.raises(ValueError, match="no interval"):
        plots.timeline(ax, {"host": []})


def test_near_blocks_are_joined_and_far_ones_kept():
    assert traces._merge([(0, 1), (1.001, 1), (5, 1)], 0.01) == [(0, 2.001), (5, 1)]
    assert traces._merge([(0, 5), (1, 1)], 0.01) == [(0, 5)]


def test_breakdown_adds_up(ax):
    plots.breakdown(ax, {"stock": PARTS, "workers": PARTS | {"data": 30}})
    said = texts(ax)
    assert {"950 ms", "570 ms", "410", *PARTS} <= set(said)
    fills = {}
    for bars in ax.containers:
        for bar in bars:
            fills.setdefault(round(bar.get_width()), set()).add(bar.get_facecolor())
    assert len(fills[270]) == 1  # one part, one fill, in every bar
    assert_tidy(ax)


def test_breakdown_of_one_bar_in_another_unit(ax):
    plots.breakdown(ax, {"weights": 3.4, "optimizer": 6.9}, unit="GB")
    assert "10.3 GB" in texts(ax) and ax.get_xlabel() == "GB"
    assert_tidy(ax)


def test_utilisation_states_its_mean(ax):
    plots.utilisation(ax, [0, 1, 2, 3], [0.2, 0.4, 0.6, 0.4])
    assert "mean 40 %" in texts(ax)
    assert ax.get_ylim()[1] >= 100
    assert_tidy(ax)


def test_utilisation_with_the_drivers_own_samples(ax):
    plots.utilisation(ax, [0, 1], [0.2, 0.4], driver=[(0.5, 0.3), (0.9, 0.5)])
    dots = next(line for line in ax.lines if line.get_label() == "driver's samples")
    assert list(dots.get_ydata()) == [30, 50]
    assert_tidy(ax)


def test_magnitudes_are_said_in_words(ax):
    rows = {
        "a layer": {"all": 16_777_216, "LoRA": 65_536},
        "a model": {"all": 8_190_735_360, "LoRA": 21_823_488},
    }
    plots.magnitudes(ax, rows, "parameters")
    said = texts(ax)
    assert {
        "16.8 million",
        "65.5 thousand",
        "8.19 billion",
        "21.8 million",
        "all",
        "LoRA",
        "a layer",
    } <= set(said)
    assert [bar.get_width() for bars in ax.containers for bar in bars] == [
        16_777_216,
        65_536,
        8_190_735_360,
        21_823_488,
    ]
    assert ax.get_xscale() == "log"
    assert_tidy(ax)


def test_grouped_bars_are_medians_with_their_spread(ax):
    plots.grouped(
        ax,
        {
            "thin": {"forward": [1, 2, 3], "backward": [4]},
            "dense": {"forward": [5], "backward": [9]},
        },
    )
    heights = [
        bar.get_height() for bars in ax.containers if hasattr(bars, "patches") for bar in bars
    ]
    assert heights == [2, 4, 5, 9]
    assert {"forward", "backward"} <= set(texts(ax))
    assert_tidy(ax)


def test_a_timeline_begins_at_its_windows_beginning(ax):
    plots.timeline(ax, {"host": [(3.0, 4.0, "data")]})
    assert ax.get_xlim() == (0, 7)


def test_a_legend_that_fits_one_row_is_one(ax):
    parts = ("inflate the PNG", "to RGB", "scale", "to float32", "tokenise")
    plots.breakdown(
        ax,
        {
            "this machine": dict.fromkeys(parts, 3.0),
            "H200's host (full)": dict.fromkeys(parts, 2.0),
        },
    )
    ax.figure.draw_without_rendering()
    names = ax.get_legend().get_texts()
    assert len({round(name.get_window_extent().y0) for name in names}) == 1
    assert names[-1].get_window_extent().x1 <= ax.figure.bbox.x1


def test_loss_says_that_weights_are_random(ax):
    plots.loss(ax, {"plain": Run("04", "a", metrics={"loss": [1.0, 0.9]}), "none": FAILED})
    assert "loss (random weights)" in texts(ax)
    assert len(ax.lines) == 1
    assert_tidy(ax)


def test_roofline_numbers_points_apart(ax):
    points = {
        "convolution": (900, 520),
        "LoRA down": (7.9, 18),
        "LoRA up": (8.2, 17),
        "norm": (1.2, 3),
    }
    plots.roofline(ax, {"bf16": Roofline(780, 4200), "fp32": Roofline(50, 4200)}, points)
    said = texts(ax)
    assert {
        "1",
        "2",
        "3",
        "4",
        "1  convolution",
        "FLOP per byte of memory traffic",
        "TFLOP/s",
    } <= set(said)
    bf16 = ax.lines[0]
    assert list(bf16.get_ydata())[-2:] == [780, 780]
    assert_tidy(ax)


def test_one_roofline_needs_no_name_and_no_points(ax):
    plots.roofline(ax, Roofline(100, 1000), {})
    assert any("100 TFLOP/s" in text for text in texts(ax))


def test_peaks_show_the_share_of_the_dense_peak(ax):
    rates = {"fp32": [48, 50, 51], "bf16": [740, 760, 780], "fp8": [1200, 1300, 1350]}
    plots.peaks(ax, rates, {"bf16": 989, "fp8": 1979}, {"bf16": 1979, "fp8": 3958})
    assert {"50.0", "760, 77 % of 989", "data sheet, dense", "data sheet, with sparsity"} <= set(
        texts(ax)
    )
    assert_tidy(ax)


def test_peaks_without_a_data_sheet(ax):
    plots.peaks(ax, {"fp32": [0.1, 0.12]})
    assert ax.get_legend() is None
    assert_tidy(ax)


def test_launch_cost_is_in_microseconds(ax):
    curve = {2**k: [5e-3, 6e-3, 7e-3] for k in range(0, 20, 4)}
    plots.launch_cost(ax, {"called from Python": curve}, 4.2)
    assert list(ax.lines[0].get_ydata()) == pytest.approx([6] * 5)
    assert "one call from Python here: 4.2 µs" in texts(ax)
    assert_tidy(ax)


def lightness(color: str) -> float:
    """CIE L* of a colour: what is left of it in a grey print."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * y ** (1 / 3) - 16


@pytest.mark.parametrize(
    "fills", [plots.FILLS, tuple(plots.LANE_FILLS.values())], ids=["categories", "lanes"]
)
def test_fills_differ_in_grey(fills):
    for (one, hatch), (other, other_hatch) in itertools.combinations(fills, 2):
        assert hatch != other_hatch or abs(lightness(one) - lightness(other)) >= 12


def test_neighbours_differ_in_lightness():
    for (one, _), (other, _) in itertools.pairwise(plots.FILLS):
        assert abs(lightness(one) - lightness(other)) >= 12


def test_a_figure_of_several_axes_keeps_its_height():
    figure, (ax, _) = plt.subplots(1, 2, figsize=(8, 5))
    plots.breakdown(ax, PARTS)
    assert figure.get_figheight() == 5


def test_importing_the_module_leaves_matplotlib_alone():
    code = "import sys, labutils.course.plots; print('matplotlib' in sys.modules, 'torch' in sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert said.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(1029.6, "1,030"), (14.44, "14.4"), (3.44, "3.4"), (0.031, "0.031"), (0, "0")],
)
def test_figures(value, text):
    assert layout.figure(value) == text


# Several GPUs


def test_a_link_shows_where_messages_lie(ax):
    sizes = [2.0**power for power in range(10, 29, 3)]
    rates = [min(300.0, size / 1e5) for size in sizes]
    marks = {
        "SD 1.5, LoRA": 3.2e6,
        "SD 1.5, whole UNet": 3.4e9,
        "Qwen3, LoRA": 87e6,
        "small Qwen3, whole": 2.4e9,
    }
    plots.link(ax, {"bytes": sizes, "bus_gb_per_s": rates}, marks)
    assert {"1 KiB", "4 MiB", "1 GiB"} <= set(texts(ax))
    assert_tidy(ax)


def test_a_step_stands_beside_what_was_foretold(ax):
    runs = {
        f"{case}ddp 2": timed("10", f"{case}ddp 2", 110, spread=0.05)
        for case in ("", "full ", "qwen ")
    }
    for run in runs.values():
        run.metrics["predicted_step_ms"] = 104.0
    plots.foretold(ax, runs | {"fsdp 2": FAILED}, dict.fromkeys(runs, 100.0))
    assert [label.get_text() for label in ax.get_yticklabels()] == list(runs)
    assert "110 ms" in texts(ax)
    assert_tidy(ax)


def test_what_hides_communication_is_above_it(ax):
    plots.beside(
        ax,
        {
            "ddp 2": ([0.0, 5.0, 6.0, 9.0], [4.0, 7.0]),
            "fsdp 2": ([0.0, 20.0], [1.0, 2.0, 19.0, 21.0]),
        },
    )
    assert [label.get_text() for label in ax.get_yticklabels()] == ["ddp 2", "fsdp 2"]
    assert ax.get_xlim()[0] == 0
    assert_tidy(ax)


def test_networks_are_named(ax):
    from labutils.labs.lab10_distributed import NETWORKS

    ax.figure.set_size_inches(7.2, 3.8)
    plots.curves(ax, {"LoRA": dict.fromkeys(NETWORKS.values(), 99.0)}, "GB/s", "efficiency, %")
    plots.named_ticks(ax, NETWORKS)
    assert any(text.startswith("NVLink") for text in texts(ax))
    assert_tidy(ax)


def test_a_picture_of_memory_keeps_the_peak_however_many_events():
    levels = [10**9] * 5000
    levels[4321] = 7 * 10**9
    series = {"weights": [10**9] * 5000, "activations": levels}
    fig, ax = plt.subplots()
    plots.stacked_memory(ax, series, [(0, "forward"), (4000, "backward")], plots.MEMORY_FILLS)
    assert (
        max(path.vertices[:, 1].max() for area in ax.collections for path in area.get_paths()) == 8
    )
    assert any("peak 8 GB" in text.get_text() for text in ax.texts)
    assert {"forward", "backward"} <= {text.get_text() for text in ax.texts}


def test_predictions_and_errors_are_drawn_where_they_belong():
    fig, ax = plt.subplots()
    plots.predicted_peaks(ax, {"a": (11.0, 10.0), "b": (0.009, 0.01)})
    (line,) = [line for line in ax.lines if line.get_marker() == "o"]
    assert [round(x, 6) for x in line.get_xdata()] == [10, -10]
    fig, ax = plt.subplots()
    plots.errors(
        ax, {"fp16": {"gradient": 3e-3, "loss": 1e-5}, "bf16": {"gradient": 3e-2, "loss": 0.0}}
    )
    assert ax.get_xscale() == "log" and [len(line.get_xdata()) for line in ax.lines] == [2, 1]
    fig, ax = plt.subplots()
    model = {0: {0.0: 10.0, 5.0: 15.0}, 2: {0.0: 10.0, 5.0: 10.0}}
    plots.over_decoding(
        ax, model, {0: {"PNG": (5.0, (14, 15, 16))}, 2: {"PNG": (5.0, (9, 10, 11))}}, "ms"
    )
    assert "PNG" in {text.get_text() for text in ax.texts}


def test_names_of_points_that_are_near_each_other_lie_apart(ax):
    points = {
        "resized": (1.7, (130, 138, 150)),
        "in memory": (1.2, (150, 168, 260)),
        "PNG": (60.0, (370, 412, 520)),
    }
    plots.over_decoding(ax, {0: {0.0: 160.0, 70.0: 440.0}}, {0: points}, "ms")
    ax.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts]
    assert len(boxes) == 3
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


# The scoreboard

PAIRS = list(itertools.product(plots.VERDICT_MARKS, repeat=2))


def many_verdicts(claims: int) -> dict[str, dict[str, tuple[str, str]]]:
    """Four articles with as many claims each."""
    named = {f"some.claim-with-a-name-{n}": PAIRS[n % len(PAIRS)] for n in range(claims)}
    return {f"Article A{number}": dict(named) for number in range(1, 5)}


@pytest.mark.parametrize("claims", [1, 2, 16, 40, 55])
def test_verdicts_show_every_claim_on_one_page(ax, claims):
    plots.verdicts(ax, many_verdicts(claims), sides=("H200", "here"))
    said = texts(ax)
    assert sum(text.startswith("some.claim") for text in said) == 4 * claims
    assert {"Article A1", "Article A4", "H200", "here"} <= set(said)
    assert any(text.startswith("confirmed\nH200 ") for text in said)
    width, height = ax.figure.get_size_inches()
    assert width < 8 and height < 11.2
    marks = [line for line in ax.lines if len(line.get_xdata())]
    assert len(marks) == 8 * claims
    assert_tidy(ax)


def test_a_verdict_s_mark_differs_in_more_than_colour():
    assert len({mark["marker"] for mark in plots.VERDICT_MARKS.values()}) == len(
        plots.VERDICT_MARKS
    )
    assert list(plots.VERDICT_MARKS) == list(VERDICTS)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 4))
def test_columns_hold_every_claim_once_and_end_with_none_but_a_claim(sizes, columns):
    groups = {f"A{g}": {f"{g}.{n}": PAIRS[0] for n in range(size)} for g, size in enumerate(sizes)}
    found = scores._in_columns(groups, columns)
    assert [name for column in found for name, pair in column if pair] == [
        name for of in groups.values() for name in of
    ]
    assert all(column[0][1] is None and column[-1][1] for column in found)
    assert max(map(len, found)) <= max(2, -(-(sum(sizes) + len(sizes) + columns - 1) // columns))


def test_calibration_shows_each_prediction_with_both_numbers(ax):
    scores = [Score("00", "far too high", "us", 100, 0.001), Score("01", "half", "ms", 700, 1400)]
    scores += [Score("02", "right", "", 448, 448), Score("03", "no factor", "%", 0, 5)]
    plots.calibration(ax, scores, near=2)
    said = texts(ax)
    assert {"100 | 0.001 us", "700 | 1,400 ms", "448 | 448 ", "00  far too high"} <= set(said)
    assert not any("no factor" in text for text in said)
    places = [line.get_xdata()[0] for line in ax.lines if len(line.get_xdata()) == 1]
    assert places == pytest.approx([plots.MOST_OFF, 0.5, 1])
    assert ax.get_xlim() == pytest.approx((1 / plots.MOST_OFF, plots.MOST_OFF))
    assert_tidy(ax)


def test_launch_cost_takes_summaries_from_the_record(ax):
    curve = {2**k: {"median": 6e-3, "p10": 5e-3, "p90": 7e-3, "n": 9} for k in range(0, 20, 4)}
    plots.launch_cost(ax, {"H200": curve}, 4.2)
    assert list(ax.lines[0].get_ydata()) == pytest.approx([6] * 5)


def test_a_kind_of_kernel_looks_the_same_in_every_timeline(ax):
    pictures = (
        ["normalisation", "GEMM", "reduction"],
        ["convolution", "reduction", "GEMM", "normalisation"],
    )
    looks = [
        traces._category_fills([(n, 1.0, kind) for n, kind in enumerate(kinds)], 9)
        for kinds in pictures
    ]
    assert {looks[0][kind] == looks[1][kind] for kind in ("GEMM", "normalisation")} == {True}
    assert [len(set(fills.values())) for fills in looks] == [3, 4]
    assert len(set(plots.KIND_FILLS.values())) == len(plots.KIND_FILLS)
