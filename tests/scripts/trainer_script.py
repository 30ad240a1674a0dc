"""Fine-tuning a small Llama with transformers' Trainer, as its documentation shows it.

python trainer_script.py --pad longest
"""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

PAD = 0


class Texts(Dataset):
    """Texts of 8 to `longest` tokens, most of them short, or `even`: all of them as long."""

    def __init__(self, rows, words, longest, even):
        generator = torch.Generator().manual_seed(0)
        shares = [1 if even else torch.rand((), generator=generator) ** 4 for _ in range(rows)]
        lengths = [int(8 + (longest - 8) * share) for share in shares]
        self.texts = [torch.randint(1, words, (length,), generator=generator) for length in lengths]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return {"input_ids": self.texts[index]}


class Collator:
    def __init__(self, pad, longest):
        self.pad, self.longest = pad, longest

    def __call__(self, rows):
        longest = max(len(row["input_ids"]) for row in rows)
        length = self.longest if self.pad == "max_length" else longest
        ids = torch.full((len(rows), length), PAD)
        for place, row in enumerate(rows):
            ids[place, : len(row["input_ids"])] = row["input_ids"]
        mask = (ids != PAD).long()
        labels = torch.where(mask == 1, ids, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--pad", choices=["longest", "max_length"], default="longest")
    parser.add_argument("--even", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--use_cpu", action="store_true")
    options = parser.parse_args()

    words, width = 1000, options.width
    size = {"hidden_size": width, "intermediate_size": 4 * width}
    size |= {"num_hidden_layers": options.layers, "num_attention_heads": width // 64}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=words, **size))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=60,
            per_device_train_batch_size=options.batch,
            bf16=options.bf16,
            gradient_checkpointing=options.checkpointing,
            use_cpu=options.use_cpu,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        texts = Texts(2048, words, options.length, options.even)
        collator = Collator(options.pad, options.length)
        Trainer(model, arguments, train_dataset=texts, data_collator=collator).train()


if __name__ == "__main__":
    main()
