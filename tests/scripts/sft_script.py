"""Supervised fine-tuning with TRL's SFTTrainer, as its documentation shows it, of a random model.

python sft_script.py
"""

import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = ["<pad>", "</s>", *(f"w{number}" for number in range(200))]


def main():
    known = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, "</s>"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=known, **special)
    texts = [" ".join(WORDS[2 + row % 100 :][:40]) for row in range(256)]
    size = {"vocab_size": len(WORDS), "num_attention_heads": 4}
    size |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**size))
    with tempfile.TemporaryDirectory() as folder:
        options = {"max_steps": 60, "per_device_train_batch_size": 4, "max_length": 64}
        quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "bf16": False}
        arguments = SFTConfig(folder, use_cpu=True, **options, **quiet)
        data = Dataset.from_dict({"text": texts})
        SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer).train()


if __name__ == "__main__":
    main()
