"""LoRA of a language model of 1.1 billion random parameters with PEFT, in a plain loop, as it is
written for small GPUs: all is computed again in the backward pass. `--tiny` is for a CPU.

python lora_llama.py
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
LARGE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}


def main():
    tiny = "--tiny" in sys.argv
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(**(TINY if tiny else LARGE), attn_implementation="eager", use_cache=False)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = get_peft_model(model, LoraConfig(r=16, target_modules=targets))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    texts = torch.randint(0, config.vocab_size, (512, 64 if tiny else 512))
    loader = DataLoader(texts, batch_size=8, shuffle=True, pin_memory=True)
    model.train()
    for step, ids in zip(range(60), loader, strict=False):
        ids = ids.to(device, non_blocking=True)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
