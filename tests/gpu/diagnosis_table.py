"""The table of a diagnosis: what `labutils diagnose` predicts of a fix in a real script, what its
`--try` measures, and what the same change saves that is written into the script by hand.

    python tests/gpu/diagnosis_table.py --results results/mine             on a GPU, in 10 minutes
    python tests/gpu/diagnosis_table.py --results /tmp/x --tiny --only trainer       on a CPU

tests/scripts/hand_edits.yaml names the scripts and their edits. A round visits each script with
every change, tried and by hand, and as it is at both ends, there and back. Rounds go on for as long
as there is time. Of two scripts it is also measured what watching takes. A script's records are
appended after each of its rounds; the newest count, and the table is made of them. So scripts may
be measured in several calls.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from labutils.profiling.machine import machine_facts
from labutils.results import records
from labutils.results.effects import saved
from labutils.results.records import Results, Run, Runs
from labutils.tools.diagnose import Fix, diagnose, trial
from labutils.tools.diagnose.script import Stages, environment_for, watch

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
BASE, AGAIN, TRIED, BY_HAND = "as it is", "as it is again", "tried", "by hand"
STAGES = Stages(warmup=4, timed=8, profiled=3)
WATCHED_BLOCKS = {"gpt": (1, 40), "launches": (4, 1500)}
"""Script -> steps of a block, and how many blocks are timed, half of them watched."""
CLOSE, TESTS = 0.2, 0.05
"""A predicted step may be off by so much. A fix that saves less than the second number, predicted
and by hand, tests no prediction."""
NEAR = 0.05
"""The first-ranked fix saves as much as the best, but for so much."""
CLOCK = """
import json, runpy, sys, time
import torch
from torch.optim import optimizer
from torch.utils.data import dataloader

first, of_block, blocks = (int(word) for word in sys.argv[1:4])
places = [(torch.autograd, "backward"), (dataloader.DataLoader, "__iter__")]
places += [(dataloader._BaseDataLoaderIter, "__next__")]
wrapped = [(*place, getattr(*place)) for place in places]
tables = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
hooks = [(table, key, hook) for table in tables for key, hook in table.items()]
steps, began, found = 0, None, []

def watch(on):
    for owner, name, function in wrapped:
        setattr(owner, name, function if on else function.__wrapped__)
    for table, key, hook in hooks:  # a table is being read, so it keeps its keys
        table[key] = hook if on else lambda *_: None

def step_ended(*_):
    global steps, began
    steps += 1
    if steps < first or (steps - first) % of_block:
        return
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if began:
        found.append(1e3 * (time.perf_counter() - began) / of_block)
    if len(found) == blocks:
        print(json.dumps(found))
        sys.exit()
    watch(len(found) % 4 in (1, 2))  # there and back
    began = time.perf_counter()

optimizer.register_optimizer_step_post_hook(step_ended)
sys.argv = sys.argv[4:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script that is watched, turns the watch off and on, and prints each block's time: in
milliseconds a step, its first block unwatched. One process, since two runs of a script differ by
more than the watch takes."""


class Script:
    """A script of hand_edits.yaml. `runs`: what was run -> its result in each round."""

    def __init__(self, name: str, words: dict[str, Any], scale: str, folder: Path) -> None:
        self.name, self.scale, self.folder = name, scale, folder
        self.text = (SCRIPTS / words["script"]).read_text("utf-8")
        self.arguments, self.edits = words[scale].split(), words["edits"]
        self.fixes: dict[str, Fix] = {}
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self.took_s = 0.0

    def command(self, *edits: str, workers: int = 0) -> list[str]:
        """The script with these edits made."""
        text = self.text
        for was, now in (pair for edit in edits for pair in self.edits[edit].items()):
            assert text.count(was) == 1, f"{self.name}: this must be there once: {was!r}"
            text = text.replace(was, now.replace("WORKERS", str(workers)))
        path = self.folder / f"{'-'.join([self.name, *edits])}.py"
        path.write_text(text, encoding="utf-8")
        return [sys.executable, str(path), *self.arguments]

    def diagnosed(self) -> Run:
        """What is proposed; of a script that does everything right, with all of its edits."""
        right = "right" in self.edits
        diagnosis = diagnose(watch(self.command(*(self.edits if right else ())), STAGES).evidence)
        for edit in () if right else self.edits:
            name, _, form = edit.partition(":")
            fix = diagnosis.fix(name) or Fix(name, 0.0, "nothing calls for it")
            if form in ("", fix.changes.get("precision")):
                self.fixes[edit] = fix
        gains = {fix.name: round(fix.gain, 3) for fix in diagnosis.fixes}
        print(f"{self.name}: {diagnosis.evidence.step_ms:.1f} ms a step, {gains}", flush=True)
        facts = {"proposed": len(diagnosis.worth_it), "step_ms": diagnosis.evidence.step_ms}
        return self.record("diagnosis", facts | {"gains": gains}, {})

    def visit(self, back: bool) -> list[Run]:
        """One round, and the records of all so far."""
        plans: dict[str, tuple[list[str], Any, int]] = {BASE: (self.command(), {}, 0)}
        for edit, fix in self.fixes.items():
            workers = fix.changes.get("num_workers", 0)
            if fix.changes and fix.changes.keys() <= trial.KNOWN:
                plans[f"{fix.name} {TRIED}"] = (self.command(), fix.changes, 0)
            plans[f"{fix.name} {BY_HAND}"] = (self.command(edit, workers=workers), {}, workers)
        plans[AGAIN] = plans[BASE]  # at both ends: a host's speed drifts
        order = [*plans.items()][:: -1 if back else 1]
        for name, (command, changes, workers) in order if self.fixes else []:
            if not any("why" in run for run in self.runs.setdefault(name, [])):
                stages = Stages(STAGES.warmup + trial.PREFETCHED * workers, STAGES.timed)
                run = trial.run(command, changes, stages)
                told = run.get("why") or f"{np.median(run['step_ms']):.1f} ms a step"
                print(f"{self.name}, {name}: {told}", flush=True)
                self.runs[name].append(run)
        return [self.of_fix(fix) for fix in self.fixes.values()]

    def drift(self) -> float:
        """Between the ends of the last visit: how many times as long the script's step was."""
        ends = [_steps(self.runs.get(kind, [])[-1:]) for kind in (BASE, AGAIN)]
        return max(map(np.median, ends)) / min(map(np.median, ends)) if all(ends) else 1.0

    def of_fix(self, fix: Fix) -> Run:
        """The record of one fix: gains with their intervals, and the steps behind them."""
        metrics: dict[str, Any] = {"predicted": fix.gain}
        kinds = {"again": AGAIN, "tried": f"{fix.name} {TRIED}", "by_hand": f"{fix.name} {BY_HAND}"}
        samples, status = {"base_ms": _steps(self.runs[BASE])}, "ok"
        ends = zip(self.runs[BASE], self.runs[AGAIN], strict=False)
        bases = [last | first | {"step_ms": _steps([first, last])} for first, last in ends]
        for kind, name in kinds.items():
            runs = self.runs.get(name, [{"why": "it can't be tried"}])
            samples[f"{kind}_ms"] = _steps(runs)
            found = trial.judged(fix, self.runs[BASE] if name == AGAIN else bases, runs)
            if found.measured is None:
                status = f"error: {found.why}" if kind != "tried" else status
                continue
            metrics |= {kind: found.measured, f"{kind}_low": found.low, f"{kind}_high": found.high}
            metrics[f"{kind}_losses"] = found.losses
        return self.record("fix", metrics, samples, status, fix=fix.name)

    def time_watching(self) -> Run:
        """The record of what watching takes of a step, in one process."""
        settings = vars(Stages(STAGES.warmup, 10**6)) | {"folder": str(self.folder)}
        environment = environment_for(settings | {"keep_going": False})
        numbers = map(str, (STAGES.warmup + 1, *WATCHED_BLOCKS[self.name]))
        python, *words = self.command()
        command = [python, "-c", CLOCK, *numbers, *words]
        said = subprocess.check_output(command, env=environment, text=True)
        found = json.loads(said.splitlines()[-1])
        samples = {"alone_ms": found[::4] + found[3::4], "watched_ms": found[1::4] + found[2::4]}
        gain, low, high = saved(*([[ms] for ms in times] for times in samples.values()))
        metrics = {"overhead": -gain, "overhead_low": -high, "overhead_high": -low}
        return self.record("overhead", metrics, samples)

    def record(self, what: str, metrics: Any, samples: Any, status: str = "ok", **tags: str) -> Run:
        tags = {"experiment": "diagnosis table", "what": what, "script": self.name} | tags
        facts = {"machine": machine_facts(), "versions": records.versions()}
        facts |= {"commit": records.commit(), "at": records.now(), "status": status}
        scale, name = "small" if self.scale == "full" else "tiny", " ".join(tags.values())
        return Run("10", name, scale=scale, metrics=metrics, samples=samples, tags=tags, **facts)


def _steps(runs: list[dict[str, Any]]) -> list[float]:
    return [ms for run in runs for ms in run.get("step_ms", [])]


def _percent(run: Run, name: str) -> str:
    """ "48% (46 to 51)"; "-" where it wasn't measured."""
    if name not in run.metrics:
        return "-"
    ends = [100 * run.metrics[f"{name}_{end}"] for end in ("low", "high")]
    return f"{run.metrics[name]:.0%} ({ends[0]:.0f} to {ends[1]:.0f})"


def told(runs: Runs) -> str:
    """The table, and what it says of the predictions."""
    sound = Runs(run for run in runs if run.ok)
    bases = {run.tags["script"]: run.metric("step_ms") for run in sound.select(what="diagnosis")}
    fixes = [run for run in sound.select(what="fix") if run.tags["script"] in bases]
    rows, offs = [], []
    for run in fixes:
        predicted_ms = bases[run.tags["script"]] * (1 - run.metrics["predicted"])
        by_hand_ms = float(np.median(run.samples["by_hand_ms"]))
        off = by_hand_ms / predicted_ms - 1
        if max(map(run.metric, ("predicted", "by_hand"))) >= TESTS:
            offs.append(abs(off))
        row = {"script": run.tags["script"], "fix": run.tags["fix"]}
        row |= {"predicted": f"{run.metrics['predicted']:.0%}", "--try": _percent(run, "tried")}
        row |= {"by hand": _percent(run, "by_hand"), "base again": _percent(run, "again")}
        row |= {"predicted, ms": f"{predicted_ms:.1f}", "by hand, ms": f"{by_hand_ms:.1f}"}
        rows.append(row | {"off by": f"{off:+.0%}"})
    lines = [pd.DataFrame(rows).to_string(index=False), ""]
    lines += [f"{run.run}: {run.status}" for run in runs if not run.ok]
    close, worst = sum(off <= CLOSE for off in offs), max(offs, default=0)
    lines += [f"{close} of {len(offs)} steps are within {CLOSE:.0%} of the predicted one, the "
              f"worst is {worst:.0%} off (fixes below {TESTS:.0%} are left out)"]  # fmt: skip
    tried = [run for run in fixes if "tried" in run.metrics]
    inside, near = (sum(_agrees(run, noise) for run in tried) for noise in (False, True))
    lines += [f"{inside} of {len(tried)} tries lie within the hand edit's interval, "
              f"{near} within that and the base's own noise"]  # fmt: skip
    for run in sound.select(what="diagnosis"):
        script = run.tags["script"]
        if not run.metrics["proposed"]:
            lines += [f"{script}: nothing proposed"]
            continue
        first = next(iter(run.metrics["gains"]))
        by_hand = {f.tags["fix"]: f.metrics["by_hand"] for f in fixes if f.has(script=script)}
        best = max(by_hand, key=by_hand.__getitem__, default="not measured")
        near = first not in by_hand or by_hand[first] >= by_hand[best] - NEAR
        known = first if first in by_hand else f"{first}, which has no edit"
        said = f"{run.metrics['proposed']} fixes proposed, first {known}; best by hand: {best}"
        lines += [f"{script}: {said}{'' if near else ' (NOT the first)'}"]
    for run in runs.select(what="overhead"):
        lines += [f"watching {run.tags['script']} takes {_percent(run, 'overhead')} of a step"]
    return "\n".join(lines)


def _agrees(run: Run, noisy: bool) -> bool:
    """Whether what was tried lies where the hand edit does; `noisy`: give or take what the base
    does."""
    m = run.metrics
    noise = max(abs(m["again_low"]), abs(m["again_high"])) if noisy else 0.0
    return m["by_hand_low"] - noise <= m["tried"] <= m["by_hand_high"] + noise


def measure(scripts: list[Script], results: Results, rounds: int, seconds: float) -> None:
    """Go round the scripts for as long as there is time. Each is diagnosed right before its first
    visit: a host's speed drifts within minutes. Later rounds begin with those that drifted most."""
    end = time.monotonic() + seconds
    for number in range(rounds):
        for script in sorted(scripts, key=Script.drift, reverse=True):
            began, back = time.monotonic(), bool(number % 2)
            if number and began + script.took_s > end:
                continue
            try:
                if not number:
                    results.append(script.diagnosed())
                    began = time.monotonic()
                for record in [*script.visit(back), script.record("visit", {}, {})]:
                    results.append(record)
                script.took_s = time.monotonic() - began
                if script.name in WATCHED_BLOCKS and not number:
                    results.append(script.time_watching())
            except Exception as error:  # the others' rows are wanted all the same
                scripts.remove(script)
                what = "visit" if script.fixes else "diagnosis"  # which stays, if it was made
                results.append(script.record(what, {}, {}, f"error: {error}"))
                print(f"{script.name}: {error}", flush=True)


def main(words: list[str] | None = None) -> None:
    scripts = yaml.safe_load((SCRIPTS / "hand_edits.yaml").read_text("utf-8"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="+", default=[*scripts], choices=[*scripts])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=7.5)
    options = parser.parse_args(words)
    results = Results(options.results)
    scale = "tiny" if options.tiny else "full"
    with tempfile.TemporaryDirectory() as folder:
        chosen = [Script(name, scripts[name], scale, Path(folder)) for name in options.only]
        measure(chosen, results, options.rounds, 60 * options.minutes)
    table = records.read_runs(results.path).select(experiment="diagnosis table")
    print(told(table.of_newest_host()))


if __name__ == "__main__":
    main()
