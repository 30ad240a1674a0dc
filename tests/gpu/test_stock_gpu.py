"""The stock recipe is honest: as fast and as slow as the public script, which is written out here a
second time.

The loop below follows the description of the public diffusers text-to-image LoRA script (lab 02,
section 1) and calls what that script calls: PEFT's adapter through `add_adapter`, accelerate for
everything else. It shares the networks and the dataset with the stock recipe (whose transforms are
torchvision's bit by bit: test_data), and no code of labutils.training.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from labutils.data.images import Preprocess, captioned_images, collate
from labutils.data.tokenizers import clip_tokenizer
from labutils.recipe import STOCK
from labutils.training import Trainer
from labutils.workloads import open_workload
from labutils.workloads.stable_diffusion import SIZES, _networks

pytestmark = pytest.mark.timeout(600)

IMAGES = 256
RANK = 4
ACCUMULATION = 4
STEPS = 8
ROUNDS = 2
TOLERANCE = 0.15


class Script:
    """The public script up to its loop, and the loop's body until gradients were applied once."""

    def __init__(self, cache_dir: Path, folder: Path, workers: int) -> None:
        from accelerate import Accelerator
        from accelerate.utils import ProjectConfiguration
        from diffusers.optimization import get_scheduler
        from diffusers.training_utils import cast_training_params
        from peft import LoraConfig
        from tqdm import tqdm

        self.accelerator = Accelerator(
            gradient_accumulation_steps=ACCUMULATION,
            mixed_precision="fp16",
            log_with="tensorboard",
            project_config=ProjectConfiguration(str(folder), str(folder / "logs")),
        )
        made = _networks(SIZES["full"], torch.device("cuda"))
        self.unet, self.vae, self.text_encoder = made.unet, made.vae, made.text_encoder
        self.schedule = made.scheduler
        for network in (self.unet, self.vae, self.text_encoder):
            network.requires_grad_(False)
            network.to(self.accelerator.device, dtype=torch.float16)
        targets = ["to_k", "to_q", "to_v", "to_out.0"]
        initial = {"lora_alpha": RANK, "init_lora_weights": "gaussian"}
        self.unet.add_adapter(LoraConfig(r=RANK, target_modules=targets, **initial))
        cast_training_params(self.unet, dtype=torch.float32)
        # An iterator, which the optimizer exhausts: what is clipped later is nothing, as in the
        # script.
        self.trained = filter(lambda parameter: parameter.requires_grad, self.unet.parameters())
        optimizer = torch.optim.AdamW(
            self.trained, lr=1e-4, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8
        )
        loader = torch.utils.data.DataLoader(
            captioned_images(cache_dir, IMAGES).with_transform(Preprocess(clip_tokenizer(), 512)),
            shuffle=True,
            collate_fn=collate,
            batch_size=1,
            num_workers=workers,
        )
        schedule = get_scheduler(
            "constant", optimizer=optimizer, num_warmup_steps=0, num_training_steps=10_000
        )
        self.unet, self.optimizer, self.loader, self.rates = self.accelerator.prepare(
            self.unet, optimizer, loader, schedule
        )
        self.accelerator.init_trackers("text2image-fine-tune")
        self.bar = tqdm(desc="Steps", disable=False)
        self.count, self.total = 0, 0.0
        self.unet.train()
        self.batches: Iterator[dict] = itertools.chain.from_iterable(
            iter(self.loader) for _ in itertools.count()
        )

    def step(self) -> None:
        """Micro-steps until the optimizer has stepped."""
        before = self.count
        while self.count == before:
            self.micro_step(next(self.batches))

    def micro_step(self, batch: dict) -> None:
        accelerator, vae = self.accelerator, self.vae
        with accelerator.accumulate(self.unet):
            latents = vae.encode(batch["pixel_values"].to(dtype=torch.float16)).latent_dist.sample()
            latents = latents * vae.config.scaling_factor
            noise = torch.randn_like(latents)
            timesteps = torch.randint(
                0, self.schedule.config.num_train_timesteps, (1,), device=latents.device
            ).long()
            noisy = self.schedule.add_noise(latents, noise, timesteps)
            states = self.text_encoder(batch["input_ids"], return_dict=False)[0]
            predicted = self.unet(noisy, timesteps, states, return_dict=False)[0]
            loss = F.mse_loss(predicted.float(), noise.float(), reduction="mean")
            self.total += accelerator.gather(loss.repeat(1)).mean().item() / ACCUMULATION
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            self.rates.step()
            self.optimizer.zero_grad()
        if accelerator.sync_gradients:
            self.bar.update(1)
            self.count += 1
            accelerator.log({"train_loss": self.total}, step=self.count)
            self.total = 0.0
        self.bar.set_postfix(step_loss=loss.detach().item(), lr=self.rates.get_last_lr()[0])

    def close(self) -> None:
        self.bar.close()
        self.accelerator.end_training()


def timed(step: Callable[[], None], workers: int) -> list[float]:
    """Milliseconds of each of STEPS steps, once what the workers held ready is used up."""
    for _ in range(2 + 2 * workers // ACCUMULATION):
        step()
    torch.cuda.synchronize()
    marks = [time.perf_counter()]
    for _ in range(STEPS):
        step()
        torch.cuda.synchronize()
        marks.append(time.perf_counter())
    return [1e3 * (after - before) for before, after in itertools.pairwise(marks)]


@pytest.mark.parametrize("workers", [0, 3])
def test_the_stock_recipe_takes_as_long_as_the_script(workers, tmp_path):
    if torch.cuda.get_device_properties(0).total_memory < 20e9:
        pytest.skip("two models of full size don't fit this GPU")
    workload = open_workload("sd15-lora", scale="full", device="cuda")
    script = Script(workload.cache_dir, tmp_path, workers)
    times: dict[str, list[float]] = {"script": [], "stock": []}
    with Trainer(workload, STOCK.but(num_workers=workers)) as trainer:
        for candidate in (script, trainer):
            candidate.step()  # libraries load and kernels are chosen
        for _ in range(ROUNDS):
            times["script"] += timed(script.step, workers)
            times["stock"] += timed(trainer.step, workers)
        trained = sum(p.numel() for p in trainer.parameters)
    script.close()
    assert trained == sum(p.numel() for p in script.unet.parameters() if p.requires_grad) == 797_184
    medians = {name: statistics.median(ms) for name, ms in times.items()}
    print(f"{workers} workers:", {name: f"{ms:.0f} ms" for name, ms in medians.items()})
    assert medians["stock"] == pytest.approx(medians["script"], rel=TOLERANCE), medians
