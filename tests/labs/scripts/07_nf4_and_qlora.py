"""NF4 by hand, bit for bit as bitsandbytes has it; then QLoRA on a real Qwen3 in small."""

import tempfile

import torch
from bitsandbytes import functional as bnb
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config, Qwen3ForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# 16 levels: quantiles of a normal distribution, eight above zero and seven below
above, below = (torch.linspace(0.9677083, 0.5, n + 1)[:-1].double() for n in (8, 7))
below, above = -torch.special.ndtri(below), torch.special.ndtri(above).flip(0)
levels = torch.cat([below, torch.zeros(1), above]).float()
levels = levels / levels[-1]

W = 0.02 * torch.randn(256, 128)
blocks = W.view(-1, 64)
absmax = blocks.abs().amax(1, keepdim=True)
codes = torch.bucketize(blocks * absmax.reciprocal(), (levels[1:] + levels[:-1]) / 2)
packed = codes[:, ::2].to(torch.uint8) << 4 | codes[:, 1::2].to(torch.uint8)
restored = (levels[codes] * absmax).view_as(W)

library, state = bnb.quantize_4bit(W, quant_type="nf4", compress_statistics=False)
assert torch.equal(packed.flatten(), library.flatten())
assert torch.equal(restored, bnb.dequantize_4bit(library, state))

# a checkpoint, as the hub has one
folder = tempfile.mkdtemp()
sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32}
sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256}
Qwen3ForCausalLM(Qwen3Config(**sizes)).to(torch.bfloat16).save_pretrained(folder)

four_bits = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
model = AutoModelForCausalLM.from_pretrained(
    folder, quantization_config=four_bits, dtype=torch.bfloat16, device_map=DEVICE
)
model = prepare_model_for_kbit_training(
    model, gradient_checkpointing_kwargs={"use_reentrant": False}
)
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")).train()

frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
tokens, losses = torch.randint(256, (4, 32), device=DEVICE), []
for _ in range(10):
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step(), optimizer.zero_grad()
    losses.append(loss.item())

assert losses[-1] < losses[0] - 0.1, losses
assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
count = sum(p.numel() for p in trained)
print(f"on {DEVICE}: {count:,} trained, loss {losses[0]:.2f} to {losses[-1]:.2f}")
