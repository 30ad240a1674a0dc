"""`labutils report`: whatever results there are, it reads them, says where they come from, and fits
the page.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from claim_runs import article_runs, timed, untimed

from labutils.results import claims, report
from labutils.results.judges import CONFIRMED, NOT_TESTABLE
from labutils.results.records import Results, Run

CLAIMS = claims.claims()
TESTABLE = sum(bool(claim.runs) for claim in CLAIMS.values())
ALL_CONFIRMED = {CONFIRMED: TESTABLE, NOT_TESTABLE: len(CLAIMS) - TESTABLE}
"""The verdicts where every claim that a run can test is confirmed."""


@pytest.fixture(autouse=True)
def no_other_results(tmp_path, monkeypatch):
    """Neither the checkout's own results nor its reference."""
    monkeypatch.setattr(report, "REPOSITORY", tmp_path / "checkout")
    monkeypatch.setattr(report, "REFERENCE", tmp_path / "reference" / "results.jsonl")
    monkeypatch.delenv("LABUTILS_RESULTS", raising=False)


def write(folder: Path, *runs: Run, done: str = "") -> Path:
    kept = Results(folder)
    for run in runs:
        kept.append(run)
    if done:
        kept.done(done)
    return folder


def as_json(capsys: pytest.CaptureFixture[str], results: Path | None) -> dict:
    assert report.main(results, as_json=True) == 0
    return json.loads(capsys.readouterr().out)


def test_every_claim_is_listed_without_any_results(capsys):
    page = as_json(capsys, None)
    assert [claim["id"] for claim in page["claims"]] == list(CLAIMS)
    assert page["verdicts"] == {NOT_TESTABLE: len(CLAIMS)}
    assert page["results"] == page["ladder"] == page["labs_done"] == []


def test_the_article_s_numbers_confirm_everything(tmp_path, capsys):
    write(tmp_path / "reference", *article_runs().values())
    page = as_json(capsys, write(tmp_path / "here", *article_runs().values(), done="04"))
    assert page["verdicts"] == page["reference_verdicts"] == ALL_CONFIRMED
    assert page["labs_done"] == ["04"]
    (total,) = [claim for claim in page["claims"] if claim["id"] == "A1.total.speedup"]
    assert total["published"] == "290 → 98 ms" and total["published_values"] == [290, 98]
    assert total["here"] == total["reference"] == "1160 → 392 ms (2.96x)"


def test_a_torn_line_and_unknown_records_do_no_harm(tmp_path, capsys):
    folder = write(
        tmp_path / "here", *article_runs().values(), untimed("11", "scoreboard"), Run("77", "x")
    )
    with (folder / "results.jsonl").open("a") as file:
        file.write(
            '\n[1, 2]\n{"lab": "04", "status": "prediction", "topic": "t"}\n{"lab": "04", "run": "sto'
        )
    assert as_json(capsys, folder)["verdicts"] == ALL_CONFIRMED
    assert report.main(folder, as_json=False) == 0


def test_broken_records_do_no_harm(tmp_path, capsys):
    folder = write(tmp_path / "here", *article_runs().values())
    with (folder / "results.jsonl").open("a") as file:
        file.write(
            '{"lab": "04", "run": "stock", "metrics": [1]}\n{"lab": "04", "run": "odd", "metrics": {"step_ms": "x"}}\n'
        )
    page = as_json(capsys, folder)
    assert [rung["rung"] for rung in page["ladder"]] == ["stock", "workers", "compile", "pinned"]
    assert report.main(folder, as_json=False) == 0


UNUSABLE = """
hello
{"schema": 99, "lab": "04", "run": "stock"}

{"lab": "04", "run": "stock", "metrics": [1]}
[1, 2]
{"run": "stock"}
{"lab": "04", "run": "sto"""


def test_lines_that_can_not_be_used_are_counted_and_explained(tmp_path, capsys):
    folder = write(tmp_path / "here", timed("04", "stock", 1160), done="04")
    assert as_json(capsys, folder)["passed_over"] == []
    with (folder / "results.jsonl").open("a") as file:
        file.write(UNUSABLE)
    page = as_json(capsys, folder)
    assert [rung["step_ms"] for rung in page["ladder"]] == [1160]
    (told,) = page["passed_over"]
    reasons = "line 4 is not JSON; line 5 has schema 99, and this version reads 1; line 7 has metrics that are no object"
    assert f"{folder / 'results.jsonl'}: 6 of 8 lines can't be used ({reasons}; and 3 more)" in told
    assert f"labutils run LAB --force --results {folder}" in told
    assert report.main(folder, as_json=False) == 0
    assert "Passed over: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[1, 2]", "is no JSON object"),
        ('{"run": "stock"}', "names no lab"),
        ('{"lab": "04", "run": "sto', "is cut off, as by a run that was stopped"),
        ('{"lab": "04", "run": 3}', "has a run that is no text"),
        ('{"lab": "04", "at": ' + "9" * 5000 + "}", "is beyond Python's limits"),
    ],
)
def test_where_no_record_is_left_it_is_wrong_usage(tmp_path, capsys, line, why):
    (tmp_path / "results.jsonl").write_text(line + "\n")
    for named in (tmp_path, tmp_path / "results.jsonl"):
        assert report.main(named, as_json=True) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert f"results.jsonl: 1 of 1 lines can't be used (line 1 {why})" in said.err
        assert "--results results/NAME" in said.err


def test_a_results_file_without_a_line_is_no_error(tmp_path, capsys):
    assert as_json(capsys, write(tmp_path))["passed_over"] == []


def test_a_folder_in_the_place_of_a_results_file_is_named(tmp_path, capsys):
    place = tmp_path / "results.jsonl"
    place.mkdir()
    assert report.main(tmp_path, as_json=True) == 2
    assert (
        f"{place} is a folder, where the file of that name belongs. Move it away: mv "
        in capsys.readouterr().err
    )
    write(place, timed("04", "stock", 1160))
    assert report.main(tmp_path, as_json=True) == 2
    assert f"Name it: --results {place}" in capsys.readouterr().err
    write(tmp_path / "sets" / "good", timed("04", "stock", 1160))
    (tmp_path / "sets" / "odd" / "results.jsonl").mkdir(parents=True)
    assert [rung["rung"] for rung in as_json(capsys, tmp_path / "sets")["ladder"]] == ["stock"]


@pytest.mark.parametrize("odd", ["x", [1], True, None, {}, float("nan"), 10**400, -1, 0])
def test_odd_numbers_do_no_harm(tmp_path, capsys, odd):
    summary = {"median": 5, "p10": odd, "p90": odd}
    records = [
        {"run": "stock", "metrics": {"step_ms": odd}},
        {"run": "odd", "metrics": {"step_ms": {"median": odd}}},
        {"run": "even", "metrics": {"step_ms": summary, "gpu_busy": odd, "floor_ms": odd}},
        {"run": "recipe", "metrics": {"step_ms": summary}, "recipe": {"micro_batch": odd}},
        {"run": "plain"},
    ]
    (tmp_path / "results.jsonl").write_text(
        "".join(json.dumps({"lab": "04"} | r) + "\n" for r in records)
    )
    beyond_every_float = odd == 10**400  # a record with such a number is passed over whole
    assert (
        "even" in [rung["rung"] for rung in as_json(capsys, tmp_path)["ladder"]]
    ) != beyond_every_float
    assert report.main(tmp_path, as_json=False) == 0


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("~nosuchuser/x", "doesn't know"),
        ("x" * 300, "does not exist"),
        ("loop", "is a link that leads nowhere"),
    ],
)
def test_an_odd_folder_is_one_message(tmp_path, monkeypatch, capsys, place, problem):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    assert report.main(Path(place), as_json=False) == 2
    said = capsys.readouterr().err
    assert problem in said and "--results results/NAME" in said


def test_json_is_plain_ascii(tmp_path, capsys):
    assert report.main(write(tmp_path, *article_runs().values()), as_json=True) == 0
    assert capsys.readouterr().out.isascii()


@pytest.mark.parametrize("make", [False, True])
def test_a_wrong_folder_is_an_error(tmp_path, capsys, make):
    folder = tmp_path / "nothing"
    if make:
        folder.mkdir()
    assert report.main(folder, as_json=True) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert str(folder) in said.err and "labutils run" in said.err
    assert ("does not exist" in said.err) is not make


def test_a_file_or_a_folder_of_folders_will_do(tmp_path, capsys):
    write(tmp_path / "sets" / "a", *article_runs().values())
    by_folder = as_json(capsys, tmp_path / "sets")
    by_file = as_json(capsys, tmp_path / "sets" / "a" / "results.jsonl")
    assert by_folder["claims"] == by_file["claims"]


def test_the_environment_names_the_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LABUTILS_RESULTS", str(write(tmp_path / "named", *article_runs().values())))
    assert as_json(capsys, None)["verdicts"] == ALL_CONFIRMED


def test_of_each_lab_the_newest_file_counts_and_none_is_mixed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "REPOSITORY", tmp_path)
    old = write(
        tmp_path / "results" / "old", timed("03", "workers=0", 1160), timed("04", "stock", 1160)
    )
    new = write(tmp_path / "results" / "new", timed("03", "workers=3", 564))
    import os

    os.utime(old / "results.jsonl", (1, 1))
    os.utime(new / "results.jsonl", (2, 2))
    page = as_json(capsys, None)
    (three,) = [claim for claim in page["claims"] if claim["id"] == "A1.workers.three"]
    assert three["verdict"] == NOT_TESTABLE and "workers=0" in three["why"]
    assert [rung["rung"] for rung in page["ladder"]] == ["stock"]
    assert len(page["results"]) == 2


def ladder_of(*runs: Run) -> list[report.Rung]:
    return report.ladder({(run.lab, run.run): run for run in runs})


def in_lane(run: Run, lane: str) -> Run:
    run.lane = lane
    return run


def test_the_ladder_goes_lane_by_lane_with_speedups_over_stock():
    merged = in_lane(timed("04", "merged", 40), "same mathematics")
    merged.recipe = {"micro_batch": 4, "accumulation": 1}
    graph = in_lane(timed("04", "graph", 100, gpu_busy=0.97, floor_ms=15), "same work")
    rungs = ladder_of(
        merged,
        timed("04", "stock", 1000),
        graph,
        timed("04", "workers", 500),
        timed("03", "stock", 1),
    )
    assert [(r.rung, r.lane) for r in rungs] == [
        ("stock", "article"),
        ("workers", "article"),
        ("graph", "same work"),
        ("merged", "same mathematics"),
    ]
    assert [r.speedup for r in rungs] == pytest.approx([1, 2, 10, 25])
    assert (rungs[2].gpu_busy, rungs[2].floor_ms) == (0.97, 15)
    assert rungs[0].p10 < 1000 < rungs[0].p90


def test_the_ladder_leaves_out_failures_and_other_amounts_of_work():
    control = timed("04", "reduce-overhead, accumulation=1", 30)
    control.recipe = {"micro_batch": 1, "accumulation": 1}
    failed = timed("04", "max-autotune", 1)
    failed.status = "error: RuntimeError"
    rungs = ladder_of(
        timed("04", "stock", 1000), control, failed, untimed("04", "reduce-overhead", failed=1)
    )
    assert [r.rung for r in rungs] == ["stock"]


def test_without_a_stock_run_there_is_no_speedup():
    assert [r.speedup for r in ladder_of(timed("04", "compile", 10))] == [None]


def test_a_piped_page_is_a_hundred_columns_wide_and_complete(tmp_path, capsys):
    write(tmp_path / "reference", *article_runs().values())
    assert report.main(write(tmp_path / "here", *article_runs().values()), as_json=False) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= report.WIDTH
    for id in CLAIMS:
        assert id in said
    for text in (
        "published",
        "verdict",
        "2.96x",
        "The ladder on the reference machine",
    ):
        assert text in said
    assert f"Here: {TESTABLE} confirmed" in said
    assert "…" not in said and "\x1b" not in said


@pytest.mark.parametrize("ms", [2_296.0, 1_000.0])
def test_a_ladder_is_shown_once_where_the_report_is_of_the_reference_itself(ms, tmp_path, capsys):
    theirs = write(tmp_path / "reference", timed("04", "stock", 2_296.0))
    ours = theirs if ms == 2_296.0 else write(tmp_path / "here", timed("04", "stock", ms))
    assert report.main(ours, as_json=False) == 0
    said = capsys.readouterr().out
    assert said.count("The ladder on the reference machine") == 1
    assert said.count("The ladder here") == (ours != theirs)


@pytest.mark.parametrize(
    ("gpus", "header"), [(["NVIDIA H200"], "H200"), (["NVIDIA H200", "B200"], "reference")]
)
def test_the_reference_is_called_by_its_machine_where_it_is_one(gpus, header, tmp_path, capsys):
    runs = list(article_runs().values())
    for number, run in enumerate(runs):
        run.machine = {"gpu": gpus[number % len(gpus)]}
    write(tmp_path / "reference", *runs)
    assert report.main(None, as_json=False) == 0
    head = next(line for line in capsys.readouterr().out.splitlines() if "published" in line)
    assert [cell.strip() for cell in head.split("┃")][1:4] == ["claim", "published", header]


def test_words_are_not_broken_in_cells(tmp_path, capsys):
    """The article's own words, and the verdict that is longest in one word."""
    runs = article_runs() | {("04", "pinned"): timed("04", "pinned", 4 * 101, spread=0.02)}
    assert report.main(write(tmp_path / "here", *runs.values()), as_json=False) == 0
    cells = [
        cell.split()
        for line in capsys.readouterr().out.splitlines()
        for cell in line.split("│")[1:]
    ]
    said = {word for cell in cells for word in cell}
    assert {"inconclusive", "synchronisation", "utilisation"} <= said


def test_brackets_in_names_are_text_and_no_markup(tmp_path, capsys):
    run = timed("04", "stock [bold]x[/bold]", 100)
    assert report.main(write(tmp_path / "here", run), as_json=False) == 0
    assert "stock [bold]x[/bold]" in capsys.readouterr().out


def test_a_clean_clone_shows_why_the_reference_was_judged_so(tmp_path, capsys):
    write(tmp_path / "reference", *article_runs().values())
    assert report.main(None, as_json=False) == 0
    said = capsys.readouterr().out
    assert "Why, on the reference machine" in said and "2.96x here against 2.96x published" in said
    assert f"Reference: {TESTABLE} confirmed" in said and "No results of this machine yet" in said
