"""A rank of a training with ElasticSampler, for tests: writes the samples of each step, and its pauses.

python elastic_rank.py --store HOST:PORT --rank R --world N --out FILE, or with --join HOST:PORT instead of a store
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not marked as exported
from torch.utils.data import DataLoader, TensorDataset

import stormtorch
from stormtorch.collectives import Group


def main() -> None:
    """Trains for some epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store")
    parser.add_argument("--join")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    options = stormtorch.Options(rejoin="auto", silence_s=2.0)
    data = TensorDataset(torch.arange(given.samples), torch.randn(given.samples, 8))
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    if given.join:
        group = stormtorch.join(given.join, options)
    else:
        host, port = given.store.split(":")
        store = TCPStore(host, int(port), is_master=False)
        group = Group(stormtorch.connect(store, given.rank, given.world, options))
    model, optimizer = stormtorch.prepare(model, optimizer, group=group)
    sampler = stormtorch.ElasticSampler(data, batch_size=4, seed=3)
    sampler.attach(optimizer)
    loader = DataLoader(data, batch_sampler=sampler)
    transport = group.transport
    log = given.out.open("w", encoding="utf-8", buffering=1)
    address = f"127.0.0.1:{transport.cards[transport.rank].reception}"  # type: ignore[attr-defined]  # over UDP
    log.write(json.dumps({"address": address, "rank": transport.rank}) + "\n")
    last = time.monotonic()
    while sampler.epoch < given.epochs:
        for step in sampler.steps(loader):
            used: list[int] = []
            epoch = sampler.epoch
            for numbers, values in step:
                with sampler.accumulate(model):
                    (model(values).square().mean() * sampler.scale).backward()
                if sampler.scale:
                    used += numbers.tolist()
            optimizer.step()
            optimizer.zero_grad()
            now = time.monotonic()
            log.write(json.dumps({"epoch": epoch, "used": used, "pause": now - last}) + "\n")
            time.sleep(0.02)
            last = time.monotonic()
    log.write(json.dumps({"end": optimizer.session.steps}) + "\n")  # type: ignore[attr-defined]  # given by prepare
    transport.drain()  # type: ignore[attr-defined]  # over UDP
    transport.close()


if __name__ == "__main__":
    main()
