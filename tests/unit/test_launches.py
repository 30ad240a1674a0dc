"""Steps foretold and measured: the batches, what a run records, slower hosts, the law of launches;
on tiny models.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Mapping
from dataclasses import replace

import pytest
from recipes_at_work import one_thread

from labutils.labs import lab08_launch_bound
from labutils.labs.lab08_launch_bound import Seen, Studied
from labutils.profiling.gpu_specs import find_spec
from labutils.profiling.step_model import Host, Law, Program, replayed_ms
from labutils.profiling.trace import Launch
from labutils.results.records import Run
from labutils.workloads import open_workload
from labutils.workloads.base import Work

FAMILIES = {"dense": "qwen3-lora", "moe": "gpt-oss-lora"}


@pytest.fixture(scope="module", autouse=True)
def single_thread():
    with one_thread():
        yield


@functools.cache
def texts(family: str) -> Mapping[str, object]:
    return {
        kind: open_workload(f"{FAMILIES[family]}-{kind}", "tiny", device="cpu")
        for kind in ("long", "short")
    }


def lengths(workload, recipe):
    return [len(ids) for ids, _ in workload.dataset(None, recipe).conversations]


# Batches


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["long", "short"])
def test_typical_texts_are_about_as_long_as_the_mean(family, kind):
    workload, recipe = texts(family)[kind], lab08_launch_bound.ways(family)["captured"]
    every = lengths(workload, recipe)
    chosen = [every[index] for index in lab08_launch_bound.typical(workload, recipe)]
    mean = sum(every) / len(every)
    assert len(set(lab08_launch_bound.typical(workload, recipe))) == lab08_launch_bound.TEXTS
    assert all(0.6 * mean <= length <= mean for length in chosen)
    assert sum(chosen) <= workload.token_budget(recipe)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["long", "short"])
def test_a_packed_row_holds_all_texts_and_nothing_else(family, kind):
    workload, recipe = texts(family)[kind], lab08_launch_bound.ways(family)["captured"]
    chosen = lab08_launch_bound.typical(workload, recipe)
    batch = lab08_launch_bound.batch_of(workload, recipe, chosen)
    assert batch["input_ids"].shape == (
        1,
        sum(lengths(workload, recipe)[index] for index in chosen),
    )
    assert workload.work_of(recipe, batch).examples == len(chosen)


def test_the_library_and_the_packed_row_see_the_same_tokens():
    workload, ways = texts("dense")["long"], lab08_launch_bound.ways("dense")
    work = {}
    for way in ("loop", "rewritten"):
        batch = lab08_launch_bound.batch_of(
            workload, ways[way], lab08_launch_bound.typical(workload, ways[way])
        )
        work[way] = workload.work_of(ways[way], batch)
    assert work["loop"].useful_tokens == work["rewritten"].useful_tokens
    assert work["loop"].tokens == pytest.approx(
        work["rewritten"].tokens, rel=0.2
    )  # texts side by side are padded


@pytest.mark.parametrize("family", FAMILIES)
def test_a_thin_model_launches_what_the_model_launches_and_computes_next_to_nothing(family):
    tiny, recipe = texts(family)["long"], next(iter(lab08_launch_bound.ways(family).values()))
    workload = lab08_launch_bound.resized(tiny, replace(tiny.size, width=512, inner=512))
    narrow = lab08_launch_bound.thin(workload)
    assert (narrow.size.layers, narrow.size.experts) == (
        workload.size.layers,
        workload.size.experts,
    )
    assert (narrow.weights, narrow.data) == ("random", "generated")
    assert (narrow.size.width, workload.size.width) == (64, 512)
    counted = [
        lab08_launch_bound._operations(other, recipe, other.size) for other in (workload, narrow)
    ]
    assert counted[0] == pytest.approx(counted[1], rel=0.02)
    assert lab08_launch_bound.thin(tiny).size.width == tiny.size.width


def test_a_thin_gpt_oss_20b_reads_a_sixtieth_of_its_experts():
    from labutils.labs.lab08_large_models import parameters_of
    from labutils.workloads.causal_lm import GPT_OSS

    workload = open_workload("gpt-oss-lora-long", "full", device="meta")
    assert (
        parameters_of(lab08_launch_bound.thin(workload).size)["experts"] * 60
        < parameters_of(GPT_OSS["full"])["experts"]
    )


def test_the_shortest_text_is_light():
    workload, recipe = texts("moe")["long"], lab08_launch_bound.ways("moe")["grouped"]
    (index,) = lab08_launch_bound.shortest(workload, recipe)
    assert lengths(workload, recipe)[index] == min(lengths(workload, recipe))


def test_a_light_step_that_was_interrupted_is_looked_at_again(monkeypatch):
    """As when other programs want the cores: the first traces count their time as the operators'
    own.
    """
    workload, recipe = texts("dense")["long"], lab08_launch_bound.ways("dense")["rewritten"]
    disturbed = iter([60_000, 60_000])  # milliseconds
    whole = Program.of

    def of(trace):
        program = whole(trace)
        first = program.queue[0]._replace(work=(("other", next(disturbed, 0), 1),))
        return replace(program, queue=(first, *program.queue[1:]))

    monkeypatch.setattr(lab08_launch_bound.Program, "of", of)
    with lab08_launch_bound.Trainer(lab08_launch_bound.thin(workload), recipe) as trainer:
        light = lab08_launch_bound.Light.of(trainer)
        assert light.program.kernel_ms < light.read().step_ms
        assert next(disturbed, "used up") == "used up"
        disturbed = iter([60_000] * (1 + lab08_launch_bound.TRIES))
        with pytest.raises(ValueError, match="other programs took the CPU"):
            lab08_launch_bound.Light.of(trainer)


def test_ways_differ_by_what_they_are_named_for():
    ways = lab08_launch_bound.ways("moe")
    assert list(ways) == ["expert loop", "grouped", "captured", "compiled"]
    assert set(ways["captured"].changes_from(ways["grouped"])) == {"driver"}
    assert "driver" not in ways["compiled"].changes_from(ways["captured"])
    assert list(lab08_launch_bound.ways("dense"))[:2] == ["loop", "rewritten"]


# A study


@pytest.fixture(scope="module")
def studied():
    return lab08_launch_bound.study(
        texts("moe"), lab08_launch_bound.ways("moe")["expert loop"], "moe", steps=2, delays=(0, 100)
    )


def test_a_failure_leaves_what_was_measured_before_it(monkeypatch):
    def fails(*given):
        raise RuntimeError("no slower host here")

    monkeypatch.setattr(lab08_launch_bound, "slowed", fails)
    found, ways = Studied(), lab08_launch_bound.ways("dense")
    with pytest.raises(RuntimeError, match="no slower host"):
        lab08_launch_bound.study(
            texts("dense"), ways["loop"], "dense", steps=2, delays=(0, 100), found=found
        )
    assert {kind: seen.run.ok for kind, seen in found.seen.items()} == {"long": True, "short": True}
    assert not found.slowed


def test_every_step_is_foretold_and_measured(studied):
    assert list(studied.seen) == ["long", "short"]
    for kind, seen in studied.seen.items():
        run = seen.run
        assert run.ok
        assert run.run.endswith(f" {kind}")
        assert run.metrics["step_ms"]["n"] >= 2
        assert run.metrics["predicted_ms"] == pytest.approx(replayed_ms(seen.program, seen.host))
        assert run.metrics["off"] == pytest.approx(
            run.metrics["predicted_ms"] / run.metric("step_ms") - 1
        )
        assert run.metrics["examples"] == lab08_launch_bound.TEXTS
        assert run.metrics["waits"] == run.metrics["launches"] > 100  # a CPU waits for itself


def test_the_prediction_is_of_the_right_size(studied):
    """Two steps on a machine that does other things as well; the accuracy is measured by the lab."""
    assert all(0.2 < 1 + seen.run.metrics["off"] < 5 for seen in studied.seen.values())


def test_what_needs_a_gpu_is_absent_without_one(studied):
    absent = {"gpu_busy_share", "idle_share", "power_w", "joules_per_step", "reached"}
    assert not any(absent & seen.run.metrics.keys() for seen in studied.seen.values())


def test_a_slower_host_slows_the_step_by_its_delays(studied):
    quick, slow = studied.slowed[0], studied.slowed[100]
    assert slow.metrics["delayed"] == quick.metrics["delayed"] > 100
    longer = slow.metric("step_ms") - quick.metric("step_ms")
    assert longer > 0.5 * slow.metrics["delayed"] * 0.1
    assert slow.metrics["predicted_ms"] > quick.metrics["predicted_ms"]
    assert slow.run.endswith("long, delay 100 us")
    assert (
        quick.metrics["calls"] > quick.metrics["delayed"]
    )  # views take the detour, too, and are not delayed


class Lit:
    """A light step beside a host of our own: readings in turn, and operations that it counts."""

    def __init__(self, readings: list[float], calls: int = 0, waited_ms: float = 0.0) -> None:
        self.program, self.repeats, self.fresh_ms = (
            Program((Launch("", (("GEMM", 0.1, 1),), False),) * 10, 1),
            3,
            1.0,
        )
        self.readings, self.calls, self.waited_ms = iter(readings), calls, waited_ms

    def time(self) -> float:
        self.host.calls += 4 * self.calls
        self.host.waited_ms += 4 * self.waited_ms
        return next(self.readings)

    def read(self) -> lab08_launch_bound.Reading:
        ms = next(self.readings)
        return lab08_launch_bound.Reading(ms, Host(ms / 10))

    metrics = lab08_launch_bound.Light.metrics


def test_a_step_is_warmed_by_itself_and_not_by_what_compiles_it():
    """A first step of 30 s compiles; a second of warm steps of 150 ms follows all the same."""

    class Compiles(lab08_launch_bound.OnOneBatch):
        taken = iter([30_000.0, *[150.0] * 20])

        def timed(self, steps: int, warmup: int = 0) -> list[float]:
            return [next(self.taken) for _ in range(steps)]

    assert Compiles(None, {}).warmed(1000) == 150
    assert len(list(Compiles.taken)) == 20 - 7


def test_the_light_step_is_read_before_and_after_and_the_prediction_takes_the_middle(monkeypatch):
    """The host slows down while the step is measured: neither the reading before nor the one after
    tells it all.
    """
    monkeypatch.setattr(lab08_launch_bound, "Light", Lit)
    workload, recipe = texts("dense")["long"], lab08_launch_bound.ways("dense")["rewritten"]
    with lab08_launch_bound.Trainer(workload, recipe) as trainer:
        chosen = lab08_launch_bound.typical(workload, trainer.recipe)
        there = lab08_launch_bound.OnOneBatch(
            trainer, lab08_launch_bound.batch_of(workload, trainer.recipe, chosen)
        )
        gc.unfreeze()  # the libraries
        seen = lab08_launch_bound.foretell_and_measure(
            "dense long", there, Lit([200.0, 400.0]), 2, 1
        )
    assert not gc.get_freeze_count()  # what is frozen would never be collected
    m = seen.run.metrics
    assert seen.host.other == pytest.approx(30)
    assert (m["light_before_ms"], m["light_step_ms"], m["light_after_ms"]) == (200, 300, 400)
    assert m["predicted_low_ms"] < m["predicted_ms"] < m["predicted_high_ms"]
    assert m["predicted_ms"] == pytest.approx((m["predicted_low_ms"] + m["predicted_high_ms"]) / 2)
    assert "1 of 1 steps" in lab08_launch_bound.steadiness(
        [seen.run]
    ) and "400 after" in lab08_launch_bound.steadiness([seen.run])


def test_a_delay_is_known_and_only_the_detour_is_learnt_from_the_light_step(monkeypatch):
    """A light step of 100 ms has 1000 operations, 500 of them delayed by 20 us: 10 ms. Beside the
    slower host it takes 130, then 150 ms: a detour of 30 us each. The step itself has other
    operations."""

    class Slower:
        def __init__(self, delay_us: float) -> None:
            self.calls = self.delayed = 0
            self.waited_ms = 0.0

        def __enter__(self) -> Slower:
            light.host = self
            return self

        def __exit__(self, *error: object) -> None: ...

    class There:
        def timed(self, steps: int, warmup: int) -> list[float]:
            light.host.calls += 600 * (steps + warmup)
            light.host.delayed += 400 * (steps + warmup)
            return [60.0] * steps

    monkeypatch.setattr(lab08_launch_bound, "SlowerHost", Slower)
    light, seen = Lit([130.0, 150.0], calls=1000, waited_ms=10.0), gpu_seen()
    seen.run.metrics["light_step_ms"] = 100.0
    m = lab08_launch_bound.slowed(There(), seen, light, 20.0, 3).metrics
    assert m["detour_us"] == pytest.approx(30)
    assert (m["calls"], m["delayed"]) == (600, 400)
    assert m["added_us"] == pytest.approx((600 * 30 + 400 * 20) / 100)  # of 100 launches
    assert lab08_launch_bound.slowed(There(), seen, None, 20.0, 3).metrics[
        "added_us"
    ] == pytest.approx(400 * 20 / 100)


def test_a_host_that_changed_its_speed_is_told():
    steady = Run("", "dense long", metrics={"light_before_ms": 100.0, "light_after_ms": 105.0})
    moved = Run("", "dense short", metrics={"light_before_ms": 242.6, "light_after_ms": 466.5})
    old = Run("", "dense long, captured", metrics={"off": 0.1})
    assert lab08_launch_bound.steadiness([steady, old]).startswith("The host was steady")
    assert "1 of 2 steps" in lab08_launch_bound.steadiness([steady, moved, old])
    assert "*dense short* (242.6 ms before, 466.5 after)" in lab08_launch_bound.steadiness(
        [steady, moved, old]
    )
    assert lab08_launch_bound.steadiness([old]) == ""


def test_tables_have_a_value_for_every_column(studied):
    runs = [seen.run for seen in studied.seen.values()]
    assert all(
        len(row) == len(lab08_launch_bound.HEAD) and None not in row
        for row in lab08_launch_bound.rows(runs)
    )
    assert all(
        len(row) == len(lab08_launch_bound.GIVEN_HEAD) and None not in row
        for row in lab08_launch_bound.given_rows(runs)
    )
    assert all(
        len(row) == len(lab08_launch_bound.SPEED_HEAD)
        for row in lab08_launch_bound.speed_rows(runs, "moe long")
    )
    assert lab08_launch_bound.speed_rows(runs[::-1], "moe long")[-1][-1] == 1
    assert lab08_launch_bound.speed_rows(runs, "a loop that did not fit")[0][-1] is None
    assert all(
        len(row) == len(lab08_launch_bound.DELAY_HEAD)
        for row in lab08_launch_bound.delay_rows(studied)
    )
    assert len(lab08_launch_bound.by_delay(studied)) == 3
    kept = {run.run: run for run in [*runs, *studied.slowed.values()]}
    assert [row[1:] for row in lab08_launch_bound.slowed_rows(kept)] == [
        row[1:] for row in lab08_launch_bound.delay_rows(studied)[1:]
    ]


def test_a_study_tells_about_larger_models(studied):
    law = Law(10, 100, 0)
    workload = texts("moe")["long"]
    found = lab08_launch_bound.known(studied, law, workload)
    assert found == {"law": law, "host_ms": studied.seen["long"].run.metrics["light_step_ms"] / 210}


# With a GPU's numbers, made up


def gpu_seen(off: float = 0.1) -> Seen:
    program = Program(tuple(Launch("", (("GEMM", 1.0, 1),), False) for _ in range(100)), 1)
    run = Run(
        "",
        "moe long",
        recipe={"precision": "bf16"},
        metrics={"step_ms": 100.0, "off": off, "reached": 0.5},
    )
    return Seen(run, program, Host(0.2), Work(flops=1e12, bytes=1e9, examples=4))


def test_what_a_gpu_tells_about_larger_models():
    workload, law = texts("moe")["long"], Law(0, 5, 5)
    found = lab08_launch_bound.known(Studied({"long": gpu_seen()}), law, workload)
    assert found["launches"] == pytest.approx(
        100 / law.launches(workload.size.layers, workload.size.experts)
    )
    assert (found["reached"], found["host_ms"]) == (0.5, pytest.approx(0.2))


def test_the_winner_changes_where_the_curve_meets_the_rival():
    seen = gpu_seen()
    rival_ms = 225.0  # a card of 2.25 times the kernels' time
    assert lab08_launch_bound.flip_us(seen, rival_ms, most_us=5000) == pytest.approx(
        (2.25 - 0.2) * 1e3, rel=1e-3
    )
    assert lab08_launch_bound.flip_us(seen, 1e9) is None
    curve = lab08_launch_bound.slowdown(seen, 5000)
    assert curve[0.0] == pytest.approx(100)
    assert max(curve.values()) == pytest.approx(520)


def test_kernels_move_to_another_card_by_their_products_intensity():
    h200, blackwell = find_spec("H200 SXM"), find_spec("RTX PRO 6000 Blackwell Max-Q")
    assert gpu_seen().on(blackwell, h200).kernel_ms == pytest.approx(100 * 989.4 / 438.9)


def foretold(name: str, off: float, by: str) -> Run:
    return Run("", name, metrics={"off": off, "by": by})


def test_accuracy_counts_sizes_whatever_their_sign_and_each_clock_apart():
    runs = [
        foretold("moe long", -0.3, "host"),
        foretold("moe short", 0.1, "host"),
        foretold("moe long, grouped", 0.15, "kernels"),
        foretold("moe short, grouped", -0.2, "host"),
        foretold("dense long", 0.02, "kernels"),
        Run("", "failed", status="oom"),
    ]
    found = lab08_launch_bound.accuracy(runs)
    assert (found["steps"], found["within_20"], found["median_off"], found["worst_off"]) == (
        5,
        4,
        0.15,
        0.3,
    )
    assert (found["host_steps"], found["host_within_20"]) == (3, 2)
    assert (found["kernels_steps"], found["kernels_within_20"]) == (2, 2)
    assert (found["recipes"], found["recipes_within_20"]) == (3, 2)  # the loop's long step is off
    assert "2 of 3 steps that the host decides" in lab08_launch_bound.told(found)
    assert "of 3, 2 had all of their steps within 20 %" in lab08_launch_bound.told(found)
    assert lab08_launch_bound.accuracy([]) == {}


def test_a_captured_step_is_foretold_before_it_is_traced(studied):
    """Two steps stand for the grouped one and the captured one; any program may be the other's
    likeness.
    """
    with lab08_launch_bound.Trainer(
        texts("moe")["long"], lab08_launch_bound.ways("moe")["grouped"]
    ) as trainer:
        workload = trainer.workload
        there = lab08_launch_bound.OnOneBatch(
            trainer,
            lab08_launch_bound.batch_of(
                workload, trainer.recipe, lab08_launch_bound.typical(workload, trainer.recipe)
            ),
        )
        like = Program(tuple(Launch("", (("GEMM", 2.0, 1),), True) for _ in range(8)), 2)
        run = lab08_launch_bound.foretell_and_measure(
            "moe long, captured", there, Host(3.0), 2, 1, like
        ).run
    assert run.metrics["unseen_ms"] == pytest.approx(
        8
    )  # four kernels a step, in one launch that 3 ms hide
    assert run.metrics["launches"] == int(run.metrics["launches"])  # of one traced step
    assert run.metrics["unseen_off"] == pytest.approx(8 / run.metric("step_ms") - 1)
    assert lab08_launch_bound.unseen_rows([run])[0][:2] == (
        "moe long, captured",
        run.metrics["unseen_ms"],
    )
    assert lab08_launch_bound.unseen_rows([seen.run for seen in studied.seen.values()]) == []


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [("moe", "long", "moe long"), ("moe, grouped", "short", "moe short, grouped")],
)
def test_runs_are_named_as_the_claims_expect(name, kind, expected):
    assert lab08_launch_bound.named(name, kind) == expected


# The law


@pytest.mark.parametrize("family", FAMILIES)
def test_the_law_foretells_a_model_that_it_was_not_counted_on(family):
    workload = texts(family)["long"]
    law, size = lab08_launch_bound.launch_law(workload, family), workload.size
    larger = replace(size, layers=size.layers + 2, experts=size.experts and size.experts + 4)
    counted = lab08_launch_bound._operations(
        workload, next(iter(lab08_launch_bound.ways(family).values())), larger
    )
    assert law.launches(larger.layers, larger.experts) == pytest.approx(counted, rel=0.02)
