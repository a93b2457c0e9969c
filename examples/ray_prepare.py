"""Ray Train with prepare(), with two workers on this machine.

Run it with `python examples/ray_prepare.py`.
"""

import ray
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader

import stormtorch
from digits import load, make_model, report


def work() -> None:
    """Trains on one worker."""
    train, test = load()
    context = ray.train.get_context()
    model = prepare_model(make_model(seed=context.get_world_rank()), parallel_strategy=None)  # to the device, no DDP
    loader = prepare_data_loader(DataLoader(train, batch_size=32, shuffle=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer = stormtorch.prepare(model, optimizer)
    for epoch in range(10):
        loader.sampler.set_epoch(epoch)
        for pictures, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(pictures), labels).backward()
            optimizer.step()
    with stormtorch.exact(model):
        report(model, test)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    TorchTrainer(
        work,
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="storm"),
    ).fit()
