"""Language and multimodal models at work: a micro-batch's loss and gradients, a run's losses."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from recipes_at_work import adapter_gradients, perturb
from torch import Tensor, nn
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from labutils.recipe import Recipe
from labutils.training import Trainer
from labutils.workloads.base import Batch
from labutils.workloads.decoder_workload import DecoderWorkload


def batch_of(workload: DecoderWorkload, recipe: Recipe, chosen: Iterable[int]) -> Batch:
    """The micro-batch of the examples with the numbers `chosen`, on the workload's device."""
    rows = workload.dataset(None, recipe)
    batch = workload.collate(recipe)([rows[index] for index in chosen])
    return {name: tensor.to(workload.device) for name, tensor in batch.items()}


def outcome(
    workload: DecoderWorkload, recipe: Recipe, chosen: Iterable[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    """`outcome_of` the micro-batch of the examples with the numbers `chosen`."""
    return outcome_of(workload, recipe, batch_of(workload, recipe, chosen))


def outcome_of(
    workload: DecoderWorkload, recipe: Recipe, batch: Batch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and the LoRA matrices' gradients of one micro-batch; no matrix B is zero."""
    model = workload.build(recipe)
    network: nn.Module = model.network
    perturb(network, 0.2)
    with torch.autocast("cuda", torch.bfloat16, enabled=recipe.precision == "bf16"):
        loss = workload.loss(model, batch, workload.draw(model, batch))
    loss.backward()
    return loss.detach(), adapter_gradients(network)


def frozen_experts(width: int, inner: int, count: int, std: float = 1.0) -> nn.Module:
    """gpt-oss's experts in transformers' own loop, with normal numbers for weights."""
    config = GptOssConfig(num_local_experts=count, hidden_size=width, intermediate_size=inner)
    config._experts_implementation = "eager"
    experts = GptOssExperts(config)
    torch.manual_seed(0)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=std)
    return experts.requires_grad_(False)


def losses_of(workload: DecoderWorkload, recipe: Recipe, steps: int) -> list[float]:
    """The losses of the first `steps` optimizer steps."""
    with Trainer(workload, recipe) as trainer:
        trainer.run(steps)
        trainer.driver.log.flush()
        return list(trainer.losses)
