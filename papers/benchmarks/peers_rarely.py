"""Times the rare exchanges of DiLoCo over a slow, long and lossy network: stormtorch, torchft and hivemind.

    python papers/benchmarks/peers_rarely.py --peer stormtorch --json FILE
    python papers/benchmarks/peers_rarely.py --peer torchft --python /tmp/torchft/bin/python

Four hosts of a lab train the same small LLaMA on bytes of the documentation, and exchange every 30 steps; without loss,
all end with the same loss. What an exchange takes is what 30 steps with it take beyond 30 median steps, mean over the
ranks; the first exchange, in which connections are made, does not count.

A peer may need an environment of its own, whose Python `--python` names, for its many dependencies. stormtorch must be
there, too, as the model comes from it:

    pip install torchft==0.2.0        # its DiLoCo, over gloo; the lighthouse runs on host 0
    pip install hivemind==1.1.12      # its averager, a DHT, and p2pd, which is in the wheel for Linux

hivemind has no DiLoCo: its averager takes the mean of outer gradients, and this file makes the outer step. Both peers
get the time that TCP needs under loss, in place of their timeouts of a minute or less.
"""

import argparse
import copy
import importlib.metadata
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stormtorch_lab.tasks.models.llama import Llama, LlamaSize

OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
PATIENCE_S = 600.0
MARK = "exchange seconds "
Step = Callable[[], None]


# --- one rank ---------------------------------------------------------------------------------------------------------


def with_stormtorch(
    model: nn.Module, optimizer: torch.optim.Optimizer, every: int, *, exact: bool
) -> tuple[Step, Step]:
    """Returns an optimizer step under `DiLoCo`, and what ends the training."""
    import stormtorch
    from stormtorch.policies import DiLoCo

    dist.init_process_group("storm")
    reliability = {"reliability": stormtorch.EXACT} if exact else {}
    policy = DiLoCo(every=every, outer_lr=OUTER["lr"], momentum=OUTER["momentum"], **reliability)
    _, prepared = stormtorch.prepare(model, optimizer, policy=policy)
    return prepared.step, dist.destroy_process_group


def with_torchft(model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> tuple[Step, Step]:
    """Returns an optimizer step under torchft's DiLoCo, and what ends the training."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, patience = own_address(), timedelta(seconds=PATIENCE_S)
    port = int(os.environ["MASTER_PORT"]) + 1
    own_port = port + 1 + rank
    lighthouse = LighthouseServer(bind=f"[::]:{port}", min_replicas=ranks, join_timeout_ms=60_000) if not rank else None
    # A replica of one rank has a store of its own, at which all others meet if it is the first.
    kept = [dist.TCPStore(host, own_port, is_master=True, wait_for_workers=False)]
    outer = torch.optim.SGD(model.parameters(), **OUTER)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=patience),
        load_state_dict=lambda state: restore(state, model, optimizer, outer),
        state_dict=lambda: {"model": model.state_dict(), "inner": optimizer.state_dict(), "outer": outer.state_dict()},
        min_replica_size=ranks,
        use_async_quorum=False,
        timeout=patience,
        quorum_timeout=patience,
        connect_timeout=patience,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=own_port,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{port}",
        replica_id=f"rank{rank}_",
        hostname=host,
        # All have the same seed, so nothing has to be handed over before the first step.
        init_sync=False,
    )
    training = DiLoCo(manager, [model], optimizer, outer, sync_every=every)
    training.__enter__()

    def step() -> None:
        before = manager.current_step()
        optimizer.step()
        if training._local_step == 0 and manager.current_step() == before:
            raise SystemExit("torchft has discarded an exchange")

    def end() -> None:
        manager.shutdown(wait=False)
        kept.clear()
        if lighthouse is not None:
            time.sleep(5.0)  # others may still ask
            lighthouse.shutdown()

    return step, end


def restore(state: Any, model: nn.Module, inner: torch.optim.Optimizer, outer: torch.optim.Optimizer) -> None:
    """Loads what torchft hands to a replica that has fallen behind."""
    for part, saved in zip((model, inner, outer), (state["model"], state["inner"], state["outer"]), strict=True):
        part.load_state_dict(saved)


def with_hivemind(model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> tuple[Step, Step]:
    """Returns an optimizer step after which outer gradients are averaged by hivemind, and what ends the training."""
    import hivemind
    from hivemind.averaging import DecentralizedAverager

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, is_master=not rank)
    # Each is told of all before it: libp2p does not pass on addresses of the lab's range, which is for benchmarks.
    known = [store.get(f"peer {other}").decode() for other in range(rank)]
    dht = hivemind.DHT(start=True, initial_peers=known, host_maddrs=[f"/ip4/{own_address()}/tcp/0"])
    store.set(f"peer {rank}", str(dht.get_visible_maddrs()[0]))
    anchors = [each.detach().clone() for each in model.parameters()]
    shared = copy.deepcopy(anchors)
    outer = torch.optim.SGD(model.parameters(), **OUTER)
    averager = DecentralizedAverager(
        averaged_tensors=shared,
        dht=dht,
        start=True,
        prefix="outer",
        target_group_size=ranks,
        min_group_size=ranks,
        min_matchmaking_time=5.0,
        request_timeout=4.0,
        next_chunk_timeout=PATIENCE_S,
        allreduce_timeout=PATIENCE_S,
    )
    steps = 0

    @torch.no_grad()
    def step() -> None:
        nonlocal steps
        optimizer.step()
        steps += 1
        if steps % every:
            return
        with averager.get_tensors() as tensors:
            for tensor, anchor, own in zip(tensors, anchors, model.parameters(), strict=True):
                tensor.copy_(anchor - own)
        if len(averager.step(timeout=PATIENCE_S) or ()) != ranks:
            raise SystemExit("hivemind has averaged in a smaller group")
        with averager.get_tensors() as tensors:
            for tensor, anchor, own in zip(tensors, anchors, model.parameters(), strict=True):
                own.copy_(anchor)
                own.grad = tensor.clone()
        outer.step()
        for anchor, own in zip(anchors, model.parameters(), strict=True):
            anchor.copy_(own)

    def end() -> None:
        store.add("ended", 1)
        while store.add("ended", 0) < ranks:
            time.sleep(0.2)
        if not rank:
            time.sleep(2.0)  # others may still ask the store
        averager.shutdown()
        dht.shutdown()

    return step, end


def own_address() -> str:
    """Returns the address by which other hosts reach this one."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing
        return str(asked.getsockname()[0])


PEERS: dict[str, Callable[[nn.Module, torch.optim.Optimizer, int], tuple[Step, Step]]] = {
    "stormtorch": lambda *given: with_stormtorch(*given, exact=False),
    "stormtorch-exact": lambda *given: with_stormtorch(*given, exact=True),
    "torchft": with_torchft,
    "hivemind": with_hivemind,
}


def train(arguments: argparse.Namespace) -> None:
    """Trains as one rank, and prints what each exchange has added to the steps around it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(LlamaSize(layers=4, width=128, heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step, end = PEERS[arguments.peer](model, optimizer, arguments.every)
    documents = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    text = torch.frombuffer(bytearray(b"".join(each.read_bytes() for each in documents)), dtype=torch.uint8).long()
    random = torch.Generator().manual_seed(int(os.environ["RANK"]))
    marks, loss = [], torch.zeros(())
    # One more cycle than exchanges: the first has connections to make, and is not counted.
    for _ in range(arguments.every * (arguments.exchanges + 1) + 1):
        marks.append(time.monotonic())
        starts = torch.randint(len(text) - 65, (4,), generator=random).tolist()
        batch = torch.stack([text[start : start + 65] for start in starts])
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        step()
        if len(marks) % arguments.every == 0:
            print(f"step {len(marks)}: {time.monotonic() - marks[-1]:.1f} s", file=sys.stderr, flush=True)
    plain_s = statistics.median(later - earlier for earlier, later in itertools.pairwise(marks))
    cycles = [marks[place + arguments.every] - marks[place] for place in range(0, len(marks) - 1, arguments.every)]
    added = [max(each - arguments.every * plain_s, 0.0) for each in cycles]
    version = importlib.metadata.version(arguments.peer.partition("-")[0])
    told = {"exchanges": added[1:], "step": plain_s, "loss": float(loss.detach()), "version": version}
    print(MARK + json.dumps(told), flush=True)
    end()


# --- all of them ------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Has four hosts of a lab train, and returns what their exchanges took."""
    from stormtorch_lab.jobs.surroundings import surroundings
    from stormtorch_lab.netns import Lab

    found: list[Any] = []

    def hear(line: Any) -> None:
        text = str(line.text)
        if text.startswith(MARK):
            found.append(json.loads(text.removeprefix(MARK)))
        else:
            print(f"h{line.host}", text, file=sys.stderr)

    words = [arguments.python, str(Path(__file__).resolve()), "--rank", "--peer", arguments.peer]
    words += ["--every", str(arguments.every), "--exchanges", str(arguments.exchanges)]
    asked = {"rate": arguments.rate, "delay": arguments.delay, "loss": arguments.loss, "tcp": arguments.tcp}
    around = surroundings()
    with Lab(hosts=arguments.hosts, **asked) as lab:
        env = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        statuses = lab.run(words, env=env, write=hear, timeout_s=arguments.timeout)
        measured = lab.measured()
    if any(statuses) or len(found) != arguments.hosts:
        raise SystemExit(f"{arguments.peer} has not finished: exit statuses {statuses}")
    each = [statistics.mean(ranks) for ranks in zip(*(rank["exchanges"] for rank in found), strict=True)]
    return {
        "peer": arguments.peer,
        "peer_version": found[0]["version"],
        "hosts": arguments.hosts,
        "every": arguments.every,
        **asked,
        "measured_loss": measured.loss,
        "exchange_s": statistics.median(each),
        "exchanges_s": each,
        "step_s": statistics.mean(rank["step"] for rank in found),
        "loss_at_end": statistics.mean(rank["loss"] for rank in found),
        **around,
    }


def keep(path: Path, result: dict[str, Any]) -> None:
    """Puts a result into a file, in place of an earlier one of the same peer."""
    known = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
    others = [each for each in known if each["peer"] != result["peer"]]
    path.write_text(json.dumps({"results": [*others, result]}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=list(PEERS), default="stormtorch", help="who exchanges (stormtorch)")
    parser.add_argument("--python", default=sys.executable, help="Python of the peer's environment (this one)")
    parser.add_argument("--hosts", type=int, default=4, help="hosts of the lab (4)")
    parser.add_argument("--every", type=int, default=30, help="steps between two exchanges (30)")
    parser.add_argument("--exchanges", type=int, default=3, help="exchanges to time, after a first one (3)")
    parser.add_argument("--rate", default="20mbit", help="rate of each host's line (20mbit)")
    parser.add_argument("--delay", default="50ms", help="one-way delay (50ms)")
    parser.add_argument("--loss", type=float, default=0.05, help="fraction of packets lost (0.05)")
    parser.add_argument("--tcp", help="TCP's congestion control on the hosts (the machine's)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds after which the ranks are ended (900)")
    parser.add_argument("--json", type=Path, help="file for what was measured, beside other peers' results that it has")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        train(given)
    else:
        result = measure(given)
        print(json.dumps(result, indent=1))
        if given.json:
            keep(given.json, result)
