"""One rank of an elastic training: one command for the first start and for every restart.

The store must outlive the ranks: `python examples/launch/store.py`, or etcd. Then, for each rank R of 3:

    python examples/elastic.py --store tcp://127.0.0.1:29400 --rank R --world 3

Kill one and start it again by the same command: it comes into the running job. A fourth rank joins by the address of
any other, without a store:

    python examples/elastic.py --join 127.0.0.1:29500

docs/launching.md has launchers that do this for you.
"""

import argparse
import os
import time
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, RandomSampler

import stormtorch
from digits import load, make_model
from stormtorch.collectives import Group


def open_store(address: str) -> dist.Store:
    """Opens tcp://host:port, etcd://host:port[,host:port]/job or file:///path."""
    url = urlparse(address)
    if url.scheme == "etcd":
        return stormtorch.EtcdStore(url.netloc, url.path.strip("/") or "stormtorch")
    if url.scheme == "file":
        return dist.FileStore(url.path)
    return dist.TCPStore(url.hostname, url.port, is_master=False)


def enter(arguments: argparse.Namespace) -> Group:
    """Joins the job, or starts it if it is not running."""
    key = os.environ.get("STORM_KEY", "").encode() or None
    options = stormtorch.Options(
        rejoin="auto", port=arguments.port, key=key, interface=arguments.interface, silence_s=arguments.silence
    )
    if arguments.join:
        return stormtorch.join(arguments.join, options)
    return Group(stormtorch.connect(open_store(arguments.store), arguments.rank, arguments.world, options))


def main() -> None:
    """Trains until all ranks together have made enough steps."""
    parser = argparse.ArgumentParser(description="One rank of an elastic training.")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--store", help="tcp://host:port, etcd://host:port/job or file:///path")
    way.add_argument("--join", help="host:port of any rank of a running job; several are divided by commas")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--port", type=int, default=0, help="UDP and TCP port; 0 lets the kernel choose")
    parser.add_argument("--interface", help="name or address of the network interface")
    parser.add_argument("--silence", type=float, default=10.0, help="seconds after which a silent rank counts as lost")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds to sleep in each step, as if the model were larger"
    )
    arguments = parser.parse_args()

    group = enter(arguments)
    train, test = load()
    model = make_model(seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer = stormtorch.prepare(model, optimizer, group=group)
    batches = DataLoader(train, batch_size=32, sampler=RandomSampler(train, num_samples=32 * arguments.steps))
    print(f"rank {group.transport.rank}: begins at step {optimizer.session.steps}", flush=True)
    for pictures, labels in batches:
        if optimizer.session.steps >= arguments.steps:  # a process that came later makes only the steps that are left
            break
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pictures), labels).backward()
        optimizer.step()
        time.sleep(arguments.pause)
    pictures, labels = test.tensors
    with stormtorch.exact(model), torch.no_grad():
        accuracy = (model(pictures).argmax(1) == labels).float().mean().item()
    print(f"rank {group.transport.rank}: {optimizer.session.steps} steps, accuracy {accuracy:.1%}", flush=True)
    group.transport.drain()
    group.transport.close()


if __name__ == "__main__":
    main()
