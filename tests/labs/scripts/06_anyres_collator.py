"""AnyRes: an image's tokens, and a collator that says where each of them belongs, against
transformers' own processor and its way to merge them."""

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlavaNextImageProcessorPil, LlavaNextProcessor, PreTrainedTokenizerFast

TILE, SIDE = 336, 24
GRIDS = [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3)]
WORDS = ("<pad>", "<unk>", "</s>", "Describe", "rust", "healthy", "<image>")


def best_grid(height, width):
    def shown(grid):
        scale = min(TILE * grid[0] / height, TILE * grid[1] / width)
        pixels = min(int(height * scale) * int(width * scale), height * width)
        return pixels, -grid[0] * grid[1]

    return max(GRIDS, key=shown)


def image_tokens(height, width):
    down, across = (SIDE * tiles for tiles in best_grid(height, width))
    scale = min(down / height, across / width)
    down -= 2 * ((down - int(round(height * scale, 7))) // 2)
    across -= 2 * ((across - int(round(width * scale, 7))) // 2)
    return SIDE**2 + down * (across + 1)


tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, "<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer.add_special_tokens(["<pad>", "<unk>", "</s>", "<image>"])
special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
special["extra_special_tokens"] = {"image_token": "<image>"}
sizes = {"size": {"shortest_edge": TILE}, "crop_size": {"height": TILE, "width": TILE}}
points = [[TILE * down, TILE * across] for down, across in GRIDS]
processor = LlavaNextProcessor(
    image_processor=LlavaNextImageProcessorPil(**sizes, image_grid_pinpoints=points),
    tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="right", **special),
    patch_size=TILE // SIDE,
    vision_feature_select_strategy="default",
    num_additional_image_tokens=1,
)


def collate(examples):
    """[(image, answer)] -> what the model takes, with labels at the answers and, for each token,
    which image token of the batch belongs there (-1: text)."""
    images, answers = ([one[part] for one in examples] for part in (0, 1))
    texts = [f"<image> Describe {answer} </s>" for answer in answers]
    batch = processor(text=texts, images=images, return_tensors="pt", padding=True)
    ids, there = batch["input_ids"], batch["input_ids"] == processor.image_token_id
    prompt = there | (ids == WORDS.index("Describe")) | (batch["attention_mask"] == 0)
    batch["labels"] = ids.masked_fill(prompt, -100)
    batch["places"] = torch.where(there, there.flatten().cumsum(0).view_as(ids) - 1, -1)
    return batch


shapes = ((500, 500), (672, 336), (336, 1008), (224, 300))  # width, height
batch = collate([(Image.new("RGB", shape), "rust") for shape in shapes])
counted = (batch["input_ids"] == processor.image_token_id).sum(1).tolist()
assert counted == [image_tokens(height, width) for width, height in shapes]
tiles = max(1 + down * across for down, across in (best_grid(h, w) for w, h in shapes))
assert batch["pixel_values"].shape[1] == tiles
assert (batch["labels"] != -100).sum(1).tolist() == [2] * len(shapes)  # rust </s>

text, image = torch.randn(*batch["input_ids"].shape, 8), torch.randn(sum(counted), 8)
places = batch["places"]
merged = text.masked_scatter(places[..., None] >= 0, image)  # a device has to count them
placed = torch.where(places[..., None] >= 0, image[places.clamp(min=0)], text)
torch.testing.assert_close(placed, merged)
print(f"tokens {counted}, {(batch['attention_mask'] == 1).float().mean():.0%} of the batch useful")
