"""The claims as data, and the eight judges against runs of which the answer is known."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml

from labutils.results import claims, judges
from labutils.results.claims import Claim
from labutils.results.judges import (
    AGREES,
    CONFIRMED,
    COSTS,
    DIFFERS,
    DISAGREES,
    INCONCLUSIVE,
    NO_DIFFERENCE,
    NOT_TESTABLE,
    PAYS,
    REFUTED,
    TOLD,
    judge,
)
from labutils.results.records import REFERENCE, Run, Runs, read_runs, summarise

GPU = {"gpu": "a GPU", "cpu": "a host", "compute_capability": "9.0"}
BASE, CHANGED = {"experiment": "x", "method": "base"}, {"experiment": "x", "method": "changed"}
PAIR = {"base": BASE, "changed": CHANGED}
EVERY = claims.load_claims()
FOLDER = Path(claims.__file__).parent
SCHEMA = json.loads((FOLDER / "schema.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def reference():
    return read_runs(REFERENCE)


def claim(judge: str = "compare", kind: str = "statement", runs=PAIR, **parts) -> Claim:
    """A claim of lab 03; what the dataclass doesn't know is a parameter of the judge."""
    known = {name: parts.pop(name) for name in set(parts) & set(Claim.__dataclass_fields__)}
    return Claim("B1.x", "B1", "1", kind, "x", "03", judge, runs, how=parts, **known)


def recorded(tags=BASE, steps=(), rounds=False, machine=GPU, **metrics) -> Run:
    if steps:
        metrics["step_ms"] = summarise(steps)
    samples = {"step_ms": list(steps)} if steps else {}
    samples |= {"round": list(range(len(steps)))} if rounds else {}
    return Run("03", "", scale="full", tags=tags, metrics=metrics, samples=samples, machine=machine)


def times(base: float, changed: float, spread: float = 0.001, again: float = 0.0) -> Runs:
    """A base and a changed run around these milliseconds, and the base again, in eight rounds."""

    def around(ms: float) -> list[float]:
        return [ms * (1 + spread * (k % 3 - 1)) for k in range(8)]

    runs = [
        recorded(BASE, around(base), rounds=True),
        recorded(CHANGED, around(changed)[::-1], rounds=True),
    ]
    again_tags = BASE | {"again": True}
    return Runs(runs + [recorded(again_tags, around(again), rounds=True)] * bool(again))


# ------------------------------------------------------------------------------- claims as data


def test_every_claim_selects_a_run_of_the_reference_or_says_why_not(reference):
    for one in EVERY.values():
        missing = [tags for tags in one.runs.values() if not reference.select(one.lab, **tags)]
        assert not missing or one.lab == "10" and "tensorflow" in str(missing), one.id
        if not one.judge:
            assert one.reason, one.id


def test_an_unknown_id_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"A1\.workers\.optimum"):
        claims.claim("A1.workers.optimal")


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_article_keeps_to_the_schema(file):
    article = yaml.safe_load(file.read_text("utf-8"))
    jsonschema.validate(article, SCHEMA)
    assert all(one["id"].startswith(article["article"]["key"] + ".") for one in article["claims"])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"judge": "guess"}, "guess"),
        ({"how": {"metrics": ["x"], "most": 1}}, "most"),
        ({"runs": {"loser": {"experiment": "x"}}}, "loser"),
        ({"runs": {"run": {"name": "x"}}}, "experiment"),
        ({"statement": ""}, "statement"),
        ({"reason": "none"}, "reason"),
        ({"kind": "setting"}, "setting"),
        ({"kind": "predicted"}, "predicts"),
        ({"judge": "advice"}, "advice"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_mistake_in_a_file_is_found(change, word):
    article = yaml.safe_load((FOLDER / "a1_stable_diffusion_lora.yaml").read_text("utf-8"))
    article["claims"][0] |= change
    with pytest.raises(jsonschema.ValidationError, match=word):
        jsonschema.validate(article, SCHEMA)


# ------------------------------------------------------------------------------------ the judges


@pytest.mark.parametrize(
    ("changed", "direction", "size", "verdict"),
    [
        (80, "less", None, CONFIRMED),
        (120, "less", None, REFUTED),
        (100, "less", None, INCONCLUSIVE),
        (105, "more", "slight", CONFIRMED),
        (157, "more", "slight", REFUTED),
        (105, "more", "marked", REFUTED),
        (60, "less", "marked", CONFIRMED),
        (105, "as much", None, CONFIRMED),
        (128, "as much", None, REFUTED),
    ],
)
def test_compare_by_direction_and_size(changed, direction, size, verdict):
    how = {"direction": direction} | ({"size": size} if size else {})
    found = judge(claim(**how), times(100, changed))
    assert found.verdict == verdict
    assert found.here.startswith(f"100 ms → {changed} ms")


def test_the_noise_floor_withholds_and_an_unsteady_machine_says_nothing_of_time():
    for again in (97.5, 102.5):  # which of two visits is slower is chance
        assert judge(claim(direction="less"), times(100, 98, again=again)).verdict == INCONCLUSIVE
    more = claim("ratio", form="percent", published=(1.9,), tolerance=5, direction="more")
    for changed, verdict in ((98.5, INCONCLUSIVE), (97, REFUTED)):
        assert judge(more, times(100, changed, again=102)).verdict == verdict
    found = judge(claim(direction="less"), times(100, 50, again=110))
    assert found.verdict == INCONCLUSIVE and "nsteady" in found.why
    runs = times(100, 50, again=101)
    assert judge(claim(direction="less"), runs).verdict == CONFIRMED
    one = claim(runs={"base": CHANGED, "changed": BASE}, direction="more")
    assert judge(one, runs).effects[""].again  # the noise of the rounds, whatever is compared
    for again, by_hand in ((130, INCONCLUSIVE), (101, CONFIRMED)):
        elsewhere = [
            replace(run, tags=run.tags | {"size": 1}, comparison="another hour")
            for run in times(100, 50, again=again)
        ]
        assert judge(one, Runs([*elsewhere, *runs])).verdict == CONFIRMED
        assert judge(one, Runs([*elsewhere, *runs[:2]])).verdict == by_hand


def test_a_busy_machine_says_nothing_of_time_after_one_round_or_by_hand():
    """Records of labs 03 and 10 at tiny on two cores, with two busy processes beside them."""
    runs = read_runs(Path(__file__).with_name("busy_labs.jsonl"))
    timed = ("A1.workers.data-time", "A4.pytorch.persistent", "A4.environment.threads")
    for found in judges.judge_all(timed, runs):
        assert found.verdict == INCONCLUSIVE and "nsteady" in found.why


def test_a_gain_is_compared_with_another_and_over_sizes():
    four = dict(PAIR, than_base=BASE | {"fast": True}, than_changed=CHANGED | {"fast": True})
    runs = Runs(
        [
            recorded(tags, [ms] * 3)
            for tags, ms in zip(four.values(), (100, 90, 100, 50), strict=True)
        ]
    )
    assert judge(claim(runs=four), runs).verdict == CONFIRMED
    back = dict(PAIR, than_base=BASE, than_changed=CHANGED)
    back |= {"base": four["than_base"], "changed": four["than_changed"]}
    assert judge(claim(runs=back), runs).verdict == REFUTED
    sizes = [(1, 100, 95), (4, 100, 80), (8, 100, 60)]
    runs = Runs(
        recorded(tags | {"batch": batch}, [ms] * 3)
        for batch, *both in sizes
        for tags, ms in zip((BASE, CHANGED), both, strict=True)
    )
    over = {"batch": [1, 2, 4, 8]}
    assert judge(claim(direction="less", trend=True, over=over), runs).verdict == CONFIRMED
    assert judge(claim(direction="more", trend=True, over=over), runs).verdict == REFUTED
    assert judge(claim(direction="less", over=over), runs).here.count("batch") == 3


def test_two_sums_of_one_run_are_compared():
    one = claim(runs={"run": BASE}, heavier=["a_share", "b_share"], lighter=["c_share"])
    for shares, verdict in (((0.1, 0.2, 0.25), CONFIRMED), ((0.1, 0.1, 0.25), REFUTED)):
        metrics = dict(zip(("a_share", "b_share", "c_share"), shares, strict=True))
        assert judge(one, Runs([recorded(**metrics)])).verdict == verdict


@pytest.mark.parametrize(
    ("form", "published", "changed", "how", "verdict"),
    [
        ("gain", (290, 141), 50, {"tolerance": 0.25}, CONFIRMED),
        ("gain", (290, 141), 80, {"tolerance": 0.25}, REFUTED),
        ("gain", (44, 65), 150, {"tolerance": 0.25}, CONFIRMED),
        ("times", (1.48, 105), 7000, {"tolerance": 2}, CONFIRMED),
        ("times", (1.48, 105), 21000, {"tolerance": 2}, REFUTED),
        ("times", (1.48, 1.69), 95, {"tolerance": 1.25}, INCONCLUSIVE),  # other sign
        ("percent", (4, 7), 95, {"tolerance": 3, "direction": "less"}, CONFIRMED),
        ("percent", (4, 7), 80, {"tolerance": 3, "direction": "less"}, REFUTED),
        ("percent", (2, 6), 103, {"tolerance": 3, "direction": "less"}, REFUTED),  # other sign
        ("percent", (1.9,), 100, {"tolerance": 5, "direction": "more"}, INCONCLUSIVE),
        ("percent", (0,), 110, {"tolerance": 5, "direction": "less"}, REFUTED),
        ("percent", (70,), 5, {"tolerance": 5, "direction": "less", "at_least": True}, CONFIRMED),
    ],
)
def test_ratio_by_its_form(form, published, changed, how, verdict):
    one = claim("ratio", form=form, published=published, **how)
    assert judge(one, times(100, changed, spread=0.0)).verdict == verdict


def test_each_run_of_a_sweep_has_its_own_number_whichever_are_missing():
    shares = {1: 54, 2: 50, 8: 61}  # 3 and 4 were not measured
    base, sweep = {"experiment": "x", "workers": 0}, {"experiment": "x"}
    runs = [recorded(base, [100] * 3)]
    runs += [recorded(sweep | {"workers": n}, [ms] * 3) for n, ms in shares.items()]
    one = claim(
        *("ratio", "statement", {"base": base, "changed": sweep}),
        published=(100, 54, 50, 49, 51, 61),
        form="times",
        tolerance=1.02,
        over={"workers": [1, 2, 3, 4, 8]},
    )
    assert judge(one, Runs(runs)).verdict == CONFIRMED


@pytest.mark.parametrize(
    ("changed", "verdict"), [(90, CONFIRMED), (50, REFUTED), (110, REFUTED), (100, INCONCLUSIVE)]
)
def test_a_slow_start_pays_after_so_many_steps(changed, verdict):
    one = claim("ratio", form="steps", published=(950,), tolerance=2)
    runs = times(100, changed)
    for run, first in zip(runs, (1, 10), strict=True):
        run.metrics["first_step_s"] = first
    found = judge(one, runs)
    assert found.verdict == verdict and ("steps" in found.here) == (changed < 100)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "x"])
def test_what_is_no_number_lies_in_no_range_and_equals_nothing(value):
    runs = Runs([recorded(cast=value)])
    where = {"runs": {"run": BASE}}
    assert judge(claim("range", **where, metrics=["cast"], max=448), runs).verdict == NOT_TESTABLE
    one = claim("equals", **where, metrics=["cast"], values=[448], absent="NaN")
    assert judge(one, runs).verdict == REFUTED
    assert judge(claim(direction="less", metric="cast"), runs).verdict == NOT_TESTABLE


@pytest.mark.parametrize(
    ("value", "verdict"), [(0.33, CONFIRMED), (0.5, INCONCLUSIVE), (0.7, REFUTED)]
)
def test_range_of_a_share_that_depends_on_the_clock(value, verdict):
    one = claim("range", runs={"run": BASE}, metrics=["gpu_utilization"], max=0.5)
    assert judge(one, Runs([recorded(gpu_utilization=value)])).verdict == verdict


def test_equals_within_its_tolerance():
    one = claim("equals", runs={"run": BASE}, metrics=["a", "b"], published=(16.7e6, 65e3))
    runs = Runs([recorded(a=4096**2, b=65536)])
    assert judge(one, runs).verdict == REFUTED
    assert judge(replace(one, how=one.how | {"tolerance": 0.01}), runs).verdict == CONFIRMED


@pytest.mark.parametrize(
    ("failed", "control", "verdict"),
    [(1, 0, CONFIRMED), (1, 1, REFUTED), (0, 0, INCONCLUSIVE), (0, None, REFUTED)],
)
def test_fails_with_and_without_what_is_blamed(failed, control, verdict):
    roles = {"run": BASE} | ({"control": CHANGED} if control is not None else {})
    message = "RuntimeError: overwritten"
    runs = [recorded(failed=failed, message=message), recorded(CHANGED, failed=control or 0)]
    one = claim("fails", runs=roles, words=["runtimeerror"])
    assert judge(one, Runs(runs)).verdict == verdict
    if failed:
        other = replace(one, how={"words": ["shared memory"]})
        assert judge(other, Runs(runs)).verdict == INCONCLUSIVE


def test_contains_an_item_or_is_one():
    one = claim("contains", runs={"run": BASE}, metric="a", items=["sm_120"])
    for value, verdict in (
        (["sm_90", "sm_120"], CONFIRMED),
        ("sm_120", CONFIRMED),
        (["sm_90"], REFUTED),
        ([], NOT_TESTABLE),
    ):
        assert judge(one, Runs([recorded(a=value)])).verdict == verdict


def test_a_number_of_thousands_is_written_in_full():
    texts = [judges.shown(value) for value in (9999.7, 10296.4, -12345.6, 1.2e10, 1978.8)]
    assert texts == ["10,000", "10,296", "-12,346", "1.2e+10", "1,979"]
    assert (
        judges.shown(999.6, digits=3) == "1,000" and judges.shown(1237.6, "step_ms") == "1,238 ms"
    )


@pytest.mark.parametrize(
    ("how", "metrics", "verdict"),
    [
        ({"min": 2, "max": 3}, {"a": 2.5, "b": 2.4}, AGREES),
        ({"min": 2, "max": 3}, {"a": 5, "b": 6}, DISAGREES),
        ({"min": 2, "max": 3}, {"a": 2.5, "b": 6}, INCONCLUSIVE),
        ({"min": 2.5, "margin": 0.2}, {"a": 2.25, "b": 2.25}, INCONCLUSIVE),
        ({"min": 2, "fastest": [4000, 8622]}, {"a": 2.5, "b": 2.5}, INCONCLUSIVE),
        ({"min": 2, "fastest": [4000, 9900]}, {"a": 2.5, "b": 2.5}, AGREES),
        ({"min": 2}, {"a": 2.5}, NOT_TESTABLE),
    ],
)
def test_predictions_agree_under_each_reading_or_hang_on_it(how, metrics, verdict):
    one = claim(
        "predicts",
        "predicted",
        {"run": BASE},
        readings={"padded": "a", "as they are": "b"},
        assumption="that batches are padded",
        published=(3600, 9200),
        **how,
    )
    found = judge(one, Runs([recorded(**metrics)]))
    assert found.verdict == verdict
    hangs = "assumed: that batches are padded" in found.why or "wrong that batches" in found.why
    assert hangs == (verdict == INCONCLUSIVE and "margin" not in how)
    reading = "by each reading" if metrics["a"] == metrics.get("b") else "padded"
    assert verdict == NOT_TESTABLE or f"{metrics['a']:g} {reading}" in found.why


@pytest.mark.parametrize(
    ("changed", "spread", "verdict"),
    [(80, 0, PAYS), (120, 0, COSTS), (100, 0, NO_DIFFERENCE), (100, 0.4, INCONCLUSIVE)],
)
def test_advice_pays_costs_or_makes_no_difference(changed, spread, verdict):
    for direction, after in (("less", changed), ("more", 100 * 100 / changed)):
        one = claim("advice", "advice", direction=direction)
        assert judge(one, times(100, after, spread)).verdict == verdict


def test_settings_are_told_and_reasons_given():
    told = claim("", "setting", {}, reason="It claims no gain.")
    assert judge(told, Runs()).verdict == TOLD
    beyond = judge(replace(told, kind="advice", reason="It takes a cluster."), Runs())
    assert (beyond.verdict, beyond.why) == (NOT_TESTABLE, "It takes a cluster.")


@pytest.mark.parametrize("part", ["cpu", "gpu_id"])
def test_hosts_are_judged_one_by_one(part):
    fast, slow = times(100, 80), times(100, 120)
    other = [replace(run, machine=GPU | {part: "another"}) for run in slow]
    found = judge(claim(direction="less"), Runs([*fast, *other]))
    assert found.verdict == DIFFERS and CONFIRMED in found.here and REFUTED in found.here
    same = [replace(run, machine=GPU | {part: "another"}) for run in fast]
    assert judge(claim(direction="less"), Runs([*fast, *same])).verdict == CONFIRMED
    shaky = [replace(run, machine=GPU | {part: "another"}) for run in times(100, 50, again=110)]
    steady = times(100, 80, again=100)  # one that never measured its noise has no say then
    assert judge(claim(direction="less"), Runs([*steady, *shaky])).verdict == CONFIRMED
    assert judge(claim(direction="less"), Runs([*fast, *shaky])).verdict == INCONCLUSIVE
    assert judge(claim(direction="less"), Runs([fast[0], other[1]])).verdict == NOT_TESTABLE


def test_what_can_not_be_compared_is_not():
    runs = times(100, 80)
    for part, value in (("scale", "tiny"), ("workload", "other"), ("data", "hub")):
        odd = Runs([runs[0], replace(runs[1], **{part: value})])
        assert judge(claim(direction="less"), odd).verdict == NOT_TESTABLE
    cpu = Runs(replace(run, machine={"cpu": "a laptop"}) for run in runs)
    assert judge(claim(direction="less"), cpu).verdict == NOT_TESTABLE
    assert judge(claim(direction="less", needs="any"), cpu).verdict == CONFIRMED
    assert judge(claim(direction="less", needs="12.0"), runs).verdict == NOT_TESTABLE
    assert judge(claim(direction="less", needs="9.0"), runs).verdict == CONFIRMED
    assert judge(claim(direction="less", weights="hub"), runs).verdict == NOT_TESTABLE


def test_no_record_whatever_it_holds_stops_a_judge(reference):
    for place, value in enumerate(["x", [1, "y"], None, math.nan, -1, {"median": "z"}]):
        broken = [copy.copy(run) for run in reference]
        for run in broken:
            run.metrics = dict.fromkeys(run.metrics, value)
            run.samples = dict.fromkeys(run.samples, value if place % 2 else [value] * 4)
        assert len(judges.judge_all(None, Runs(broken))) == len(EVERY)
    assert all(j.verdict in (NOT_TESTABLE, TOLD) for j in judges.judge_all(None, Runs()))
