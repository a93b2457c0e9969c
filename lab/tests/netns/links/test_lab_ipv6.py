"""IPv6-only networks: hosts without IPv4 addresses train, also with additional link-local addresses."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stormtorch.exchange.keys import new_key
from stormtorch_lab.netns import Lab

MakeLab = Callable[..., Lab]
pytestmark = pytest.mark.lab

JOB = """
import torch, torch.distributed as dist, stormtorch

torch.set_num_threads(1)
dist.init_process_group("storm")
sums = torch.full((100_000,), 1.0 + dist.get_rank())
dist.all_reduce(sums)
assert bool((sums == 6.0).all())
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = stormtorch.prepare(model, optimizer)
for _ in range(10):
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
hosts = [card.host for card in optimizer.session.group.transport.cards.values()]
print("hosts", *sorted(hosts), flush=True)
dist.destroy_process_group()
"""


def to_ipv6(network: Lab, *, everywhere: bool) -> None:
    """Removes all IPv4 addresses of the network under test; adds link-local addresses, and global ones on request."""
    for host, holder in enumerate(network.holders):
        commands = [
            f"address add fe80::{host + 1}/64 dev eth0 nodad scope link",
            *[f"address add fd00:5::{host + 1}/64 dev eth0 nodad"] * everywhere,
            f"address delete {network.address(host)}/24 dev eth0",
        ]
        holder.run(["ip", "-batch", "-"], "\n".join(commands))


@pytest.mark.parametrize("everywhere", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["global", "link"])
def test_ranks_of_ipv6_alone_meet_and_train(lab: MakeLab, tmp_path: Path, everywhere: bool) -> None:
    network = lab(3, rate="200mbit", probe=False)
    to_ipv6(network, everywhere=everywhere)
    job = tmp_path / "job.py"
    job.write_text(JOB)
    said: list[str] = []
    environment = {
        "MASTER_ADDR": "fd00:5::1" if everywhere else "fe80::1%eth0",
        "STORM_KEY": new_key(),
        "PATH": os.environ["PATH"],
    }
    statuses = network.run(
        [sys.executable, str(job)], env=environment, timeout_s=90, write=lambda line: said.append(line.text)
    )
    assert statuses == [0, 0, 0], said
    expected = [f"fd00:5::{host}" if everywhere else f"fe80::{host}%eth0" for host in (1, 2, 3)]
    assert [line for line in said if line.startswith("hosts")] == [f"hosts {' '.join(expected)}"] * 3
