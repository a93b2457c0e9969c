# mypy: disable-error-code="no-untyped-call"
"""A rank of a training that others may kill and start again. It tells its steps, and then what its ledger says."""

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
from stormtorch.collectives import Group
from stormtorch.transport.rendezvous import connect, rejoin

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


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def go_deaf(seconds: float) -> None:
    """Nothing arrives here for a while."""
    deaf = stormtorch.faults(loss=1.0)
    deaf.start()
    time.sleep(seconds)
    deaf.stop()


def train(how: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank, world = how["rank"], how["world"]
    store = TCPStore("127.0.0.1", how["port"], is_master=False, timeout=timedelta(seconds=30))
    options = Options(datagram_bytes=512, silence_s=how["silence_s"], interface="lo", linger_s=0.5)
    transport = (rejoin if how["again"] else connect)(store, rank, world, options)
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    policy = BoundedDrift(give_up_s=how["give_up_s"], max_lag=8)
    with stormtorch.faults(loss=how["loss"], seed=1):
        model, optimizer = stormtorch.prepare(model, optimizer, policy=policy, group=Group(transport))
        session: Any = optimizer.session  # type: ignore[attr-defined]
        tell(begins_at=session.steps)
        deaf_at, deaf_s = how.get("deaf", (None, 0.0))
        while session.steps < how["steps"]:
            inputs, targets = batch(rank, session.steps)
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            tell(step=session.steps)
            time.sleep(PAUSE_S)
            if session.steps == deaf_at:
                threading.Thread(target=go_deaf, args=(deaf_s,)).start()
        with stormtorch.exact(model):
            values = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
            loss = validation_loss(model)
    events = [[row.step, event] for row in session.ledger.rows for event in row.events]
    oldest = session.ledger.summary()["most_lag"]
    tell(
        values=values,
        loss=loss,
        events=events,
        missing=sorted({r for x in session.ledger for r in x.missing}),
        lag=oldest,
    )
    store.add("ended", 1)
    transport.close()


if __name__ == "__main__":
    try:
        train(json.loads(sys.argv[1]))
    except StormError as error:
        tell(error=str(error), culprit=error.culprit)
