"""Lightning with prepare(), on two processes that Lightning starts itself.

Run it with `python examples/lightning_prepare.py`.
"""

import lightning
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import stormtorch
from digits import load, make_model, report
from stormtorch.integrations.lightning import StormStrategy


class Classifier(lightning.LightningModule):
    """A Lightning module like any other."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model(seed=0)

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        """Computes the loss of a batch."""
        pictures, labels = batch
        return torch.nn.functional.cross_entropy(self.model(pictures), labels)

    def validation_step(self, batch: list[torch.Tensor], _index: int) -> None:
        """Logs the accuracy on a batch, with the same parameters on all ranks."""
        pictures, labels = batch
        accuracy = (self.model(pictures).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Makes the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    train, test = load()
    classifier = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=StormStrategy(policy=stormtorch.BoundedDrift()),  # in place of DDPStrategy
        precision="bf16-mixed",
        gradient_clip_val=1.0,  # by the norm over all ranks
        max_epochs=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(classifier, DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=64))
    with stormtorch.exact(classifier):
        report(classifier.model, test)
    dist.destroy_process_group()
