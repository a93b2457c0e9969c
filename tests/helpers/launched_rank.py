"""A rank to be launched, with the options of examples/elastic.py.

It trains nothing: all members of the view agree on the highest step that one of them has reached, again and again.
"""

import argparse
import time
from urllib.parse import urlparse

import torch
from torch._C._distributed_c10d import TCPStore  # torch.distributed has it, but its types do not

import stormtorch
from stormtorch.collectives import Group, Op, all_reduce
from stormtorch.errors import Interrupted
from stormtorch.udp.udp import UdpTransport


def next_step(transport: UdpTransport, step: int) -> int:
    view = transport.view()
    assert view is not None
    if not transport.inside():
        transport.wait_view(view.number, 0.2)
        return step
    transport.install(view)

    def changed() -> bool:
        latest = transport.view()
        return latest is not None and latest.number != view.number

    members = [rank for rank, _ in view.members]
    group = Group(transport, members, name=f"view {view.number}", view=view.number, interrupted=changed)
    highest = torch.tensor([float(step)])
    try:
        all_reduce(group, highest, Op.MAX).wait()
    except Interrupted:
        return step
    return int(highest.item()) + 1


parser = argparse.ArgumentParser()
parser.add_argument("--store")
parser.add_argument("--rank", type=int)
parser.add_argument("--world", type=int)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--silence", type=float, default=2.0)
arguments = parser.parse_args()
torch.set_num_threads(1)
where = urlparse(arguments.store)
options = stormtorch.Options(rejoin="auto", silence_s=arguments.silence, timeout_s=60.0, linger_s=0.5)
store = TCPStore(where.hostname, where.port, is_master=False)
with stormtorch.connect(store, arguments.rank, arguments.world, options) as transport:
    transport.enter()
    transport.watch()
    step = next_step(transport, 0)
    print(f"rank {transport.rank}: begins at step {step - 1}", flush=True)
    while step < arguments.steps:
        step = next_step(transport, step)
        time.sleep(arguments.pause)
    print(f"rank {transport.rank}: {step} steps", flush=True)
