# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     formats: notebooks//ipynb,notebooks/py//py:percent
#     notebook_metadata_filter: kernelspec,jupytext,-papermill,-language_info,-widgets
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 12 · Scoreboard
#
# What became of everything that the four articles claim? This lab trains nothing. It reads the results of the other labs,
# judges every claim by them, and draws conclusions: which method suits this machine, what you tend to misjudge, and what
# to measure next. Run it whenever you like; it works with whatever results there are.
#
# **After this lab you can**
# - say of every claim what was published, what our H200 measured, what this machine measured, and how that gives the verdict;
# - distinguish a claim that is wrong from one that is true on another machine;
# - say how far off your predictions are, in which direction, and for which kind of quantity;
# - choose a method for this machine by measured times and memory;
# - plan the next measurement so that it settles the most claims.
#
# | scale | needs | time |
# |---|---|---|
# | any | any machine, and whatever results of the other labs there are | a quarter of a minute |

# %% tags=["parameters"]
scale: str = "auto"  # tiny (any CPU), small (a GPU of 8 GB), full (the article's own), auto: the largest that fits
weights: str = "random"  # random: exact architecture, random weights; hub: the real ones
data: str = "generated"  # generated files like the real ones; hub: the real dataset
results_dir: str = ""  # folder of results.jsonl; empty: a new one under results/
read: str = ""  # results to read: a folder or a results.jsonl; empty: results_dir's, else each lab's newest under results/
article: str = "all"  # only the claims of one article: A1, A2, ...
lab_number: str = "all"  # only the claims that one lab tests: 00, 01, ...
verdict: str = (
    "all"  # only claims with this verdict here: confirmed, refuted, inconclusive, not testable here
)
memory_gb: float = 0.0  # GPU memory to choose a method for; 0: this machine's GPU, 24 without one
planned_steps: int = 1000  # optimizer steps to choose a method for

# %%
from labutils.course.lab import open_lab

lab = open_lab("12", globals())

# %%
from pathlib import Path

import matplotlib.pyplot as plt

from labutils.course import plots, predictions
from labutils.course.tables import verdict_table
from labutils.labs import lab12_scoreboard
from labutils.results import claims, report
from labutils.results.judges import CONFIRMED, NOT_TESTABLE, REFUTED
from labutils.results.records import REFERENCE, REPOSITORY, Run
from labutils.tools import run

plots.use_style()
titles = {one.number: one.title for one in run.find() if one.number != lab.number}

# %% [markdown]
# ## 1 · What is on record
#
# **Question.** What is known about this machine, and since when?
#
# If this lab is run together with the others, it reads the results in their common folder. Run by itself, it reads each
# lab's newest results under `results/`. Results of one lab are never mixed from two folders. To read one folder only,
# for example in JupyterLab after `make course`, set `read = "results/course"` in the parameters cell.

# %%
place = REPOSITORY / Path(read).expanduser()  # a relative name is one in the checkout
files = report.result_files(place) if read else report.files_beside(lab.results_dir, lab.number)
page = report.read_page(files, REFERENCE)
board = lab12_scoreboard.scoreboard(page.judgements)
lab.table(lab12_scoreboard.on_record(page.here, page.labs_done, titles))
print(
    "Read:",
    ", ".join(f"{path.parent.name}/{path.name}" for path in page.files)
    or "nothing yet; try: labutils run",
)
print(
    "Our H200's record has runs of labs:",
    ", ".join(sorted({one.lab for one in page.reference})) or "none yet",
)

# %% [markdown]
# **Takeaway.** A verdict holds for one machine, one scale and one day. Read these columns before the verdicts.

# %% [markdown]
# ## 2 · All verdicts on one page
#
# **Question.** How many of the claims hold?
#
# | verdict | meaning |
# |---|---|
# | *confirmed* | as claimed, by more than the noise |
# | *refuted* | the other way, by more than the noise |
# | *inconclusive* | the noise is larger than the effect |
# | *pays here*, *makes no difference here*, *costs here* | advice that promises no number, tried on this machine |
# | *the model agrees*, *the model disagrees* | predicted for a card that nobody had, not measured |
# | *differs between hosts* | the same GPU gives another verdict beside another processor |
# | *told* | a setting that is no claim about speed |
# | *not testable here* | this machine, or what has been run on it, can't answer |
#
# What is the noise? A comparison visits its candidates in turns, round after round, and gives a ratio a round. Its effect
# is the median of these ratios, with an interval of 95 % (bootstrap over rounds). If the interval has 1 in it, the verdict
# is *inconclusive*, whatever the medians say.
#
# The H200 could test only claims of the labs that are in its record (the last line of section 1's output).
#
# **Your prediction:** of the claims that our H200 could test, how many percent did it confirm?

# %%
my_confirmed: float | None = None  # for example 90

lab.predict("confirmed by the H200, of those it could test", my_confirmed, "%")

# %%
judged = {
    f"Article {key}": {
        j.claim.id.partition(".")[2]: (j.reference_verdict, j.verdict)
        for j in page.judgements
        if j.claim.article == key
    }
    for key in claims.articles()
}
fig, ax = plt.subplots()
plots.verdicts(ax, judged, sides=("H200", "here"))
plt.show()

# %%
lab.table(lab12_scoreboard.tally(board))
tested = board["reference_verdict"][board["reference"].notna()]
confirmed = 100 * (tested == CONFIRMED).mean() if len(tested) else None

# %% [markdown]
# **Takeaway.** Take a published number as a hypothesis to measure. The articles' authors measured, too, on another
# card, with another host and other versions. *Refuted* means: it doesn't hold on this machine today. Section 4 shows by
# how much.

# %% [markdown]
# ## 3 · One by one
#
# **Question.** What exactly was claimed, what was found, and how does that give the verdict?
#
# In JupyterLab you choose by article, lab and verdict. In a batch run the parameters `article`, `lab_number` and `verdict`
# choose; by default the tables show everything.


# %%
def show_claims(article: str, lab_number: str, verdict: str) -> None:
    """A table for each article of what is chosen."""
    found = lab12_scoreboard.chosen(board, article=article, lab=lab_number, verdict=verdict)
    lab.show(f"{len(found)} of {len(board)} claims")
    for key, source in claims.articles().items():
        if mine := [page.judgements[at] for at in found.index[found["article"] == key]]:
            lab.show(f"**{key}: {source.subject}** ({source.gpu})\n\n" + verdict_table(mine))


choices = lab12_scoreboard.choices(board)
choices["lab_number"] = choices.pop("lab")
if not lab.choose(show_claims, choices):
    show_claims(article, lab_number, verdict)

# %% [markdown]
# **Takeaway.** The reason matters more than the verdict. "Faster, but by less than was claimed" and "slower" are both
# refutations, but you would act on them differently.

# %% [markdown]
# ## 4 · How far off?
#
# **Question.** Which refuted claims are far off, and which missed narrowly?
#
# If what was published and what was found are numbers of one kind, the table gives their ratio. Other claims, for
# example about a cause or an error message, have no ratio; they are at the end of the table.

# %%
for whose, prefix in (("this machine", ""), ("the H200", "reference_")):
    refuted = board[board[f"{prefix}verdict"] == REFUTED]
    columns = ["id", "statement", "published", prefix[:-1] or "here", f"{prefix}off_by"]
    farthest = refuted.sort_values(columns[-1], ascending=False)[columns].head(10)
    farthest.columns = ["claim", "statement", "published", "measured", "off by a factor of"]
    lab.show(f"**Refuted by {whose}**, the farthest off first (ten at most)")
    lab.table(farthest, otherwise="No claim was refuted.")

# %% [markdown]
# ### True there, but not here
#
# **Question.** On which claims do two machines disagree?
#
# Such a claim says something about machines. Ask what differs: the card, the host, the versions or the scale.

# %%
verdicts = board[["reference_verdict", "verdict"]]
both = (verdicts != NOT_TESTABLE).all(axis=1)
differ = board[both & (board["verdict"] != board["reference_verdict"])]
differ = differ[["id", "published", "reference", "reference_verdict", "here", "verdict"]]
differ.columns = ["claim", "published", "H200", "verdict there", "here", "verdict here"]
lab.table(differ, otherwise="On every claim that both could test, they agree.")

# %% [markdown]
# **Takeaway.** When a number is far off, look for the cause: another host, another version, two changes that were taken
# for one. Each claim's lab looks for that cause.

# %% [markdown]
# ## 5 · Your predictions
#
# **Question.** What do you misjudge, by how much, and in which direction?
#
# You learn most from predictions that were wrong. How wrong is given as a factor: half as much and twice as much are
# both off by a factor of 2. If your predictions are too high everywhere, just lower your guesses.
#
# A prediction is *scored by a factor* if it and the measurement are both above 0: others have no ratio. *Leaning* is
# the median of predicted / measured, and says which way you tend to be off.

# %%
scores = predictions.scores_of(page.records)
told = scores.dropna(subset="factor")
if len(told):
    fig, ax = plt.subplots()
    plots.calibration(ax, told, predictions.NEAR)
    plt.show()
waiting = scores["measured"].isna().sum()
lab.show(
    f"{len(scores)} predictions are on record: {len(told)} of them scored by a factor, {waiting} not measured on this machine."
    if len(scores)
    else "No prediction is on record: in each lab, put numbers into the cells *Your prediction*, and run it to its end."
)

# %%
for by in ("kind", "lab") if len(told) else ():
    table = predictions.summaries(told, by)
    table["lean"] = table["lean"].map(predictions.lean_in_words)
    lab.table(table.rename(columns={"off": "median factor off", "near": "within a factor of 2"}))

# %% [markdown]
# **Takeaway.** Look for the kind of quantity with the largest factor, and for a direction. And always predict *before* you
# measure: afterwards everything seems to have been obvious.

# %% [markdown]
# ## 6 · What to use on this machine
#
# **Question.** Which method finishes first on this machine?
#
# This is lab 06's advisor again. It compares every method that was measured by its first step, its later steps, its peak
# memory and its loss. Without a GPU there are no times of this machine to compare, so the times are those of the machine
# named below.

# %%
whose, options = lab12_scoreboard.options_at_hand(page.here, page.reference)
room = memory_gb or lab.machine.get("gpu_memory_gb", 24.0)
lab.show(f"LLaVA-NeXT at batch 1, for **{room:g} GB** and **{planned_steps:,} steps**, by {whose}:")
for tolerance, meaning in ((None, "Any loss will do"), (0.05, "The loss may be 5 % above BF16's")):
    lab.show(f"*{meaning}:*\n\n" + lab12_scoreboard.advice(options, room, planned_steps, tolerance))

# %% [markdown]
# **Takeaway.** The advice changes with the plan. Ask again with `-p planned_steps 100`, or with the memory of a card that you
# consider buying (`-p memory_gb 80`).

# %% [markdown]
# ## 7 · What to try next
#
# **Question.** Which measurement would settle the most claims?

# %%
on_gpu = lab.device == "cuda"
steps = lab12_scoreboard.next_steps(board, page.labs_done, titles, on_gpu)
lab.show("\n".join(f"- {step}" for step in steps))
untested = board[board["verdict"] == NOT_TESTABLE].groupby("why")["id"]
reasons = untested.agg(claims="size", which=lambda ids: ", ".join(ids[:6])).reset_index()
lab.table(
    reasons.sort_values("claims", ascending=False).rename(columns={"why": "not testable here"}),
    otherwise="Every claim is tested here.",
)

# %% [markdown]
# **Takeaway.** Each untested claim costs some minutes or another machine. Begin with what settles most for its price.

# %%
counts = {
    word.replace(" ", "_"): sum(j.verdict == word for j in page.judgements)
    for word in plots.VERDICT_MARKS
}
if len(told):
    (whole,) = predictions.summaries(told).to_dict("records")
    counts |= {"predictions": whole["predictions"], "median_factor_off": whole["off"]}
    counts["lean"] = whole["lean"]
lab.keep(Run("12", "scoreboard", metrics=counts, tags={"experiment": "scoreboard"}));

# %% [markdown]
# ## Exercises
#
# Exercises, the easiest first. Each cell checks itself. `lab.solution("12.1")` shows how the first can be solved.

# %%
import torch
from torch.nn.functional import cross_entropy

from labutils.course.exercises import check, faster_than
from labutils.results.claims import Claim
from labutils.results.judges import judge
from labutils.results.records import Runs, summarise

# %% [markdown]
# **1.** An article claims that B is faster than A. You find that B takes 0.96 of A's time, the interval being 0.92 to 1.01.
# What is the verdict, by the rule of section 2?

# %% tags=["exercise"]
my_verdict = None  # "confirmed", "refuted", "inconclusive" or "not testable here"
print(check("12.1", my_verdict))

# %% [markdown]
# **2.** Somebody predicted 10, 4 and 30 where 5, 8 and 10 were measured. What is the median of the factors by which the
# predictions are off? And what is the median of predicted / measured? Answer with a pair.

# %% tags=["exercise"]
my_medians = None  # two numbers, for example (1.5, 0.7)
print(check("12.2", my_medians))

# %% [markdown]
# **3.** Write a claim as data: in lab 03, the run with pinned memory takes less time than the run with three workers. The
# comment below has the beginning. `"B1"` is an article that we invented, and `"2.1"` its section; leave them. `runs` gives
# the tags of the two runs, `base` and `changed`; the judge is `compare`, and `how` names the direction, `less` or `more`.
# For an example look at `A1.workers.more-is-worse` in `labutils/results/claims/a1.yaml`; it has the same form. The check
# shows your claim to three machines.

# %%
PINNED = {"experiment": "copies", "memory": "pinned", "copy": "async"}
THREE_WORKERS = {"experiment": "workers", "workers": 3}


def a_machine(before_ms: float, after_ms: float) -> Runs:
    """Runs with samples around these times, from a machine with a GPU."""
    runs = []
    for tags, ms in ((THREE_WORKERS, before_ms), (PINNED, after_ms)):
        steps = [ms * share for share in (0.97, 0.99, 1, 1.01, 1.03)]
        runs.append(
            Run(
                *("03", str(tags)),
                scale="full",
                tags=tags,
                metrics={"step_ms": summarise(steps)},
                samples={"step_ms": steps},
                machine={"gpu": "a GPU"},
            )
        )
    return Runs(runs)


# %% tags=["exercise"]
# Claim("B1.pin", "B1", "2.1", "statement", "Pinned memory shortens the step.", "03", judge=..., runs=..., how=...)
my_claim = None


def check_claim(claim) -> str:
    if claim is None:
        return "Exercise 3: no answer yet. Fill in the dots of the Claim in the comment: judge is a word, runs and how are dicts."
    if not isinstance(claim, Claim):
        return f"Exercise 3: not yet. A {type(claim).__name__} is no Claim."
    for before, after, right in (
        (100, 80, "confirmed"),
        (100, 120, "refuted"),
        (100, 99, "inconclusive"),
    ):
        found = judge(claim, a_machine(before, after))
        if found.verdict != right:
            return f"Exercise 3: not yet. From {before} to {after} ms it is {found.verdict}, not {right}. {found.why}"
    return "Exercise 3: right. The files in `labutils/results/claims/` consist of such entries, one for each statement."


print(check_claim(my_claim))

# %% [markdown]
# **4. Make it faster**, with everything that you have learned. `stock_step` has a frozen encoder, an adapter and a head
# of 4,096 words. It takes four micro-batches, in which one position in eight is to be learned: equally many in each.
# Write `my_step`: the same loss and the same gradients, at least four times as fast.

# %%
torch.manual_seed(0)
WIDTH, WORDS = 128, 4096
encoder = torch.nn.Sequential(
    torch.nn.Linear(WIDTH, 512), torch.nn.GELU(), torch.nn.Linear(512, WIDTH)
).to(lab.device)
encoder.requires_grad_(False)
W, words = (torch.randn(rows, WIDTH, device=lab.device) / WIDTH**0.5 for rows in (WIDTH, WORDS))
A, B = (torch.randn(shape, device=lab.device) / WIDTH**0.5 for shape in ((8, WIDTH), (WIDTH, 8)))
adapter = (A.requires_grad_(), B.requires_grad_())


def stock_step(inputs, labels):
    """inputs [4, 128, WIDTH], labels [4, 128] (-100: nothing to learn) -> the mean loss, and the gradients of A and B"""
    A.grad = B.grad = None
    seen = 0.0
    for x, wanted in zip(inputs, labels, strict=True):
        hidden = torch.stack([encoder(row) for row in x])
        merged = W + B @ A
        loss = cross_entropy(hidden @ merged.T @ words.T, wanted, ignore_index=-100)
        (loss / len(inputs)).backward()
        seen += loss.item()
    return {
        "loss": seen / len(inputs),
        "A's gradient": A.grad.clone(),
        "B's gradient": B.grad.clone(),
    }


# %% tags=["exercise"]
def my_step(inputs, labels):
    return stock_step(inputs, labels)  # your code instead


def micro_batches(seed: int) -> tuple:
    torch.manual_seed(seed)
    labels = torch.randint(WORDS, (4, 128), device=lab.device)
    labels[:, torch.arange(128) % 8 != 0] = -100
    return torch.randn(4, 128, WIDTH, device=lab.device), labels


print(faster_than(4, stock_step, my_step, micro_batches, times=4, tolerance=1e-3))


# %% [markdown]
# ## What you did
# - You saw of every claim what was published, what the H200 and this machine measured, and how that gives the verdict.
# - You distinguished what is wrong from what is true elsewhere, and narrow misses from wide ones.
# - You know how far off your predictions are, in which direction, and for which kind of quantity.
# - You chose a method for this machine by measured numbers.
# - You know what to measure next, and what it would settle.
#
# ## Where this comes from, and what to read on
# - Hoefler and Belli, *Scientific Benchmarking of Parallel Computing Systems: Twelve Ways to Tell the Masses When Reporting
#   Performance Results* (SC 2015, [doi:10.1145/2807591.2807644](https://doi.org/10.1145/2807591.2807644)).
# - Georges, Buytaert and Eeckhout, *Statistically Rigorous Java Performance Evaluation* (OOPSLA 2007): when a difference of
#   two timings means something; it isn't about Java.
# - Pineau et al., *Improving Reproducibility in Machine Learning Research* (2020,
#   [arXiv:2003.12206](https://arxiv.org/abs/2003.12206)).
# - Tetlock and Gardner, *Superforecasting: The Art and Science of Prediction* (2015): how one gets better at predicting.
# - The course's [glossary](../docs/glossary.md).

# %%
lab.done({"confirmed by the H200, of those it could test": confirmed})
