"""A rank of a training that tests kill, stop and restart. It reports its steps and its ledger."""
# mypy: disable-error-code="no-untyped-call"

import json
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore  # torch.distributed has it, but its types do not

import stormtorch
from stormtorch import BoundedDrift, Options, StormError
from stormtorch.collectives import Group, hierarchy

# Time for another process to start meanwhile.
PAUSE_S = 0.02


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 128), nn.Tanh(), nn.BatchNorm1d(128), nn.Linear(128, 3))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    truth = torch.randn(20, 3, generator=torch.Generator().manual_seed(7))
    inputs = torch.randn(32, 20, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, (inputs @ truth).argmax(1)


def validation_loss(model: nn.Module) -> float:
    inputs, targets = batch(999, 999)
    model.eval()
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(model(inputs), targets))
    model.train()
    return loss


def report(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def go_deaf(seconds: float) -> None:
    """Drops all received datagrams for a while."""
    deaf = stormtorch.faults(loss=1.0)
    deaf.start()
    time.sleep(seconds)
    deaf.stop()


def join_group(how: dict[str, Any]) -> Group:
    options = Options(datagram_bytes=512, silence_s=how["silence_s"], interface="lo", linger_s=0.5, rejoin="auto")
    if how.get("join"):
        return stormtorch.join(how["join"], options)
    store = TCPStore("127.0.0.1", how["port"], is_master=False, timeout=timedelta(seconds=30))
    return Group(stormtorch.connect(store, how["rank"], how["world"], options))


def train(how: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    group = join_group(how)
    transport: Any = group.transport
    if how.get("machines"):
        # All ranks run on one machine: pretend that they do not, and that the model is large.
        transport.machine_of = lambda rank: how["machines"][rank]
        hierarchy._SMALLEST_BYTES = 0
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    policy = BoundedDrift(give_up_s=how["give_up_s"], max_lag=8, overlap=how.get("overlap", False))
    with stormtorch.faults(loss=how["loss"], seed=1):
        model, optimizer = stormtorch.prepare(model, optimizer, policy=policy, group=group)
        session: Any = optimizer.session  # type: ignore[attr-defined]
        card = transport.cards[transport.rank]
        report(begins_at=session.steps, rank=transport.rank, address=f"{card.host}:{card.reception}")
        deaf_at, deaf_s = how.get("deaf", (None, 0.0))
        while session.steps < how["steps"]:
            inputs, targets = batch(transport.rank, session.steps)
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            report(step=session.steps, by_machines=session._reduction._islands is not None)
            time.sleep(PAUSE_S)
            if session.steps == deaf_at:
                threading.Thread(target=go_deaf, args=(deaf_s,)).start()
            if session.steps == how.get("leave_at"):
                stormtorch.leave()
                report(left=session.steps)
                return
        with stormtorch.exact(model):
            values = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
            loss = validation_loss(model)
    report(
        values=values,
        loss=loss,
        events=[event for row in session.ledger.rows for event in row.events],
        members=session.view.members,
        view=session.view.number,
        by_machines=session._reduction._islands is not None,
    )
    transport.drain()
    transport.close()


if __name__ == "__main__":
    try:
        train(json.loads(sys.argv[1]))
    except StormError as error:
        report(error=str(error), culprit=error.culprit)
