"""Changes of a built model (`on_model` of a trainer), and what a run of uneven steps costs a token.

run = train(workload, recipe, on_model=prepared_for_kbit)
"""

from __future__ import annotations

import torch
from torch import nn

from labutils.recipe import Recipe
from labutils.results.records import Run, summarise
from labutils.workloads.base import Workload


def prepared_for_kbit(model: nn.Module) -> None:
    """What PEFT's `prepare_model_for_kbit_training` does to precision: every frozen 16-bit
    parameter becomes float32.

    In a model whose large matrices are quantised these are its embeddings, norms, head and vision
    tower: the stream between the blocks is float32 from then on. Parameters are replaced, not
    converted in place, as other models may share them; one that two modules share, by one. (It also
    turns gradient checkpointing on: that is the recipe's `checkpointing`.) A model whose weights
    have no 4 bits stays as it is.
    """
    if model.base_linear != "nf4":
        return
    widened: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dtype in (torch.float16, torch.bfloat16) and not parameter.requires_grad:
                if parameter not in widened:
                    widened[parameter] = nn.Parameter(parameter.detach().float(), False)
                setattr(module, name, widened[parameter])


def with_epoch_rate(run: Run, workload: Workload) -> Run:
    """The run with `useful_tokens_per_s` as of a whole epoch, with its spread; unchanged where it
    failed.

    How much of a few batches is padding varies more than how fast they are computed. So tokens a
    second are timed, step by step, and multiplied with the share of all tokens of an epoch that
    aren't padding, which is known exactly.
    """
    steps = zip(run.samples.get("step_ms", []), run.samples.get("tokens", []), strict=False)
    if rates := [1e3 * tokens / ms for ms, tokens in steps]:
        epoch = workload.work(Recipe(**run.recipe))
        useful = epoch.useful_tokens / epoch.tokens
        run.metrics["useful_tokens"] = useful
        run.metrics["useful_tokens_per_s"] = summarise([useful * rate for rate in rates])
    return run


def with_costs(run: Run) -> Run:
    """The run with `ms_per_1k_tokens`, padding included, and `ms_per_1k_useful_tokens`, step by
    step and summed up; unchanged where it failed.
    """
    for kind in ("tokens", "useful_tokens"):
        steps = zip(run.samples.get("step_ms", []), run.samples.get(kind, []), strict=False)
        if costs := [1e3 * ms / tokens for ms, tokens in steps]:
            run.samples[f"ms_per_1k_{kind}"] = costs
            run.metrics[f"ms_per_1k_{kind}"] = summarise(costs)
    return run
