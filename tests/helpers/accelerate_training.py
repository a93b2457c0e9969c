"""Trains by Accelerate and prepare(), saves and loads with the accelerator. Prints a line of JSON on each rank."""
# mypy: disable-error-code="no-untyped-call, attr-defined"

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stormtorch
from stormtorch.integrations.accelerate import prepare


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    dist.init_process_group("storm", pg_options=stormtorch.Options(datagram_bytes=512))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    torch.manual_seed(accelerator.process_index)
    model: Any = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    loader: Any = DataLoader(data, batch_size=16, shuffle=True)
    loader, model, schedule, optimizer = prepare(accelerator, loader, model, schedule, optimizer)
    losses = []
    session = optimizer.optimizer.session

    def train(epochs: int) -> None:
        for _ in range(epochs):
            for given, labels in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(given), labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    losses.append(float(loss.detach()))

    with stormtorch.faults(loss=0.2, seed=1):
        train(4)
        accelerator.save_state(str(folder))
        with stormtorch.exact(model):
            saved = flat(model).clone()
        train(2)
        accelerator.load_state(str(folder))
        with stormtorch.exact(model):
            loaded = flat(model).clone()
            others = [torch.empty_like(loaded) for _ in range(2)]
            dist.all_gather(others, loaded)
        train(1)
    accelerator.wait_for_everyone()
    report = {
        "rank": dist.get_rank(),
        "wrapped": type(accelerator.unwrap_model(model)).__name__,
        "in_file": sorted(load_file(folder / "model.safetensors")),
        "loaded": bool(torch.equal(saved, loaded)),
        "same": bool(torch.equal(*others)),
        "steps": session.steps,
        "losses": [sum(losses[:4]) / 4, sum(losses[-4:]) / 4],
        "arrived": session.ledger.summary()["arrived"],
    }
    print(json.dumps(report), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
