"""LoRA of a text-to-image model in the manner of diffusers' train_text_to_image_lora.py: imports in
its order, PyTorch after accelerate; accelerate around everything; pictures decoded as they are
needed. Networks are random and small, with `--tiny` very small.

accelerate launch lora_images.py --accumulation 4
"""

import argparse
import tempfile
from pathlib import Path

# isort: off
import datasets
import numpy
from accelerate import Accelerator
from accelerate.logging import get_logger
import transformers
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import cast_training_params
from peft import LoraConfig
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPTextConfig, CLIPTextModel

logger = get_logger(__name__)
datasets.utils.logging.set_verbosity_error()
transformers.utils.logging.set_verbosity_error()


class Pictures(Dataset):
    def __init__(self, folder, side):
        self.side, noise = side, numpy.random.default_rng(0)
        self.files = [Path(folder) / f"{number}.png" for number in range(2)]
        for file in self.files:
            pixels = noise.integers(0, 256, (2048, 2048, 3), dtype="uint8")
            Image.fromarray(pixels).save(file, compress_level=1)

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        image = Image.open(self.files[index % len(self.files)]).convert("RGB")
        pixels = numpy.array(image.resize((self.side, self.side), Image.Resampling.BILINEAR))
        ids = torch.full((77,), index % 1000)
        return {"pixels": torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1, "ids": ids}


def networks(tiny):
    """UNet, VAE and text encoder."""
    levels = (32,) if tiny else (128, 256, 512)
    down = ["CrossAttnDownBlock2D"] * len(levels)
    up = ["CrossAttnUpBlock2D"] * len(levels)
    words = {"cross_attention_dim": 64, "layers_per_block": 1 if tiny else 2}
    unet = UNet2DConditionModel(64, 4, 4, block_out_channels=levels, down_block_types=down,
                                up_block_types=up, attention_head_dim=8, **words)  # fmt: skip
    ends = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"]}
    vae = AutoencoderKL(block_out_channels=(32, 32, 64, 64), latent_channels=4, **ends)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return unet, vae, CLIPTextModel(CLIPTextConfig(num_attention_heads=2, **size))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()

    half = torch.cuda.is_available()
    accelerator = Accelerator(
        gradient_accumulation_steps=options.accumulation, mixed_precision="fp16" if half else "no"
    )
    torch.manual_seed(0)
    frozen = networks(options.tiny)
    for network in frozen:
        network.requires_grad_(False)
        network.to(accelerator.device, dtype=torch.float16 if half else torch.float32)
    unet, vae, text_encoder = frozen
    unet.add_adapter(LoraConfig(r=4, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    cast_training_params(unet, dtype=torch.float32)
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    noise_schedule = DDPMScheduler()
    with tempfile.TemporaryDirectory() as folder:
        pictures = Pictures(folder, 32 if options.tiny else 512)
        loader = DataLoader(pictures, shuffle=True, batch_size=options.batch, num_workers=0)
        unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
        done = 0
        for batch in loader:
            with accelerator.accumulate(unet):
                latents = vae.encode(batch["pixels"].to(vae.dtype)).latent_dist.sample()
                noise = torch.randn_like(latents)
                times = torch.randint(0, 1000, (len(latents),), device=latents.device)
                noisy = noise_schedule.add_noise(latents, noise, times)
                states = text_encoder(batch["ids"])[0]
                predicted = unet(noisy, times, states, return_dict=False)[0]
                loss = F.mse_loss(predicted.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            done += accelerator.sync_gradients
            if accelerator.sync_gradients:
                print(f"step {done}: loss {loss.item():.4f}", flush=True)
            if done == 60:
                break


if __name__ == "__main__":
    main()
