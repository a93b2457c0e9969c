"""Trains a LightningModule by StormStrategy, then goes on from its checkpoint. Prints a line of JSON on each rank."""
# mypy: disable-error-code="misc, no-untyped-call, attr-defined"

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stormtorch
from stormtorch.integrations.lightning import StormStrategy

CLIP = 0.01


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        self.seen: list[torch.Tensor] = []
        self.updates: list[float] = []
        self.same: list[bool] = []
        self.losses: list[float] = []

    def flat(self) -> torch.Tensor:
        return torch.cat([each.detach().flatten() for each in self.parameters()])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_batch_start(self, *_: Any) -> None:
        self.before = self.flat()

    def on_train_batch_end(self, *_: Any) -> None:
        self.updates.append(float((self.flat() - self.before).norm()))

    def validation_step(self, batch: list[torch.Tensor], _index: int) -> None:
        mine = self.flat()
        others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(others, mine)
        self.same.append(all(torch.equal(mine, each) for each in others))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def trainer(folder: Path, epochs: int, **more: Any) -> Any:
    checkpoints = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=StormStrategy(
            policy=stormtorch.BoundedDrift(lead=0.0), options=stormtorch.Options(datagram_bytes=512)
        ),
        precision="bf16-mixed",
        gradient_clip_val=CLIP,
        accumulate_grad_batches=2,
        max_epochs=epochs,
        logger=False,
        callbacks=[checkpoints],
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    loaders = DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=64)
    first = Classifier()
    trainer(folder, 2).fit(first, *loaders)
    with stormtorch.exact(first):
        end = first.flat().clone()
    again = Classifier()
    with stormtorch.faults(loss=0.2, seed=1):
        resumed = trainer(folder, 4)
        resumed.fit(again, *loaders, ckpt_path=str(folder / "epoch=1.ckpt"))
    saved = torch.load(folder / "epoch=1.ckpt", weights_only=False)
    loaded = torch.cat([each.flatten() for each in saved["state_dict"].values()])
    session = again.optimizers().optimizer.session
    report = {
        "rank": dist.get_rank(),
        "wrapped": type(resumed.model).__name__,
        "clipped": max(abs(each - CLIP) for each in first.updates[1:8:2]),  # of the first epoch, whose rate is 1
        "held": max(first.updates[0:8:2]),  # steps that only accumulate change nothing
        "same": first.same + again.same,
        "saved": bool(torch.equal(loaded, end)),
        "steps": session.steps,
        "begins": again.losses[0],
        "rate": again.optimizers().param_groups[0]["lr"],
        "arrived": session.ledger.summary()["arrived"],
    }
    print(json.dumps(report), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
