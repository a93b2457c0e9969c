"""Lightning on two processes, which Lightning starts itself.

Run it with `python examples/lightning_ddp.py`.
"""

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from digits import load, make_model, report


class Classifier(lightning.LightningModule):
    """A Lightning module like any other."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model(seed=0)

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        """Computes the loss of a batch."""
        pictures, labels = batch
        return torch.nn.functional.cross_entropy(self.model(pictures), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Makes the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    train, test = load()
    classifier = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="storm"),  # the only line about stormtorch
        max_epochs=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(classifier, DataLoader(train, batch_size=32, shuffle=True))  # Lightning splits it among the ranks
    report(classifier.model, test)
    dist.destroy_process_group()
