"""A classifier with Lightning's Trainer, as its documentation shows one.

python lightning_script.py
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, _):
        pictures, labels = batch
        return nn.functional.cross_entropy(self.model(pictures), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    data = TensorDataset(torch.rand(4096, 64), torch.randint(10, (4096,)))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_steps=60, accelerator="cpu", devices=1, **quiet)
    trainer.fit(Classifier(), DataLoader(data, batch_size=32))
