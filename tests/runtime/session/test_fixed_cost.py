# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""The fixed cost of a step, however small the model: counted, as times on a busy machine are too noisy."""

import contextlib
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from conftest import local_world
from torch import nn

import stormtorch
from stormtorch.collectives import Group, barrier
from stormtorch.errors import Closed
from stormtorch.exchange.exchange import Plan
from stormtorch.runtime.prepare import prepare
from stormtorch.udp.udp import UdpExchange, UdpTransport

SOURCE = str(Path(stormtorch.__file__).parent)
STEPS = 60


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.functional.cross_entropy(model(torch.ones(4, 64)), torch.ones(4, dtype=torch.long)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("ranks", "most_exchanges", "most_calls", "most_operations"),
    [(2, 3, 700, 160), (3, 5, 1000, 245)],
    ids=["without a standby", "with one"],
)
def test_a_step_makes_few_exchanges_few_calls_and_few_operations(
    ranks: int, most_exchanges: int, most_calls: int, most_operations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: dict[int, int] = dict.fromkeys(range(ranks), 0)
    post = UdpTransport.post

    def counted(transport: UdpTransport, plan: Plan) -> UdpExchange:
        posted[transport.rank] += 1
        return post(transport, plan)

    monkeypatch.setattr(UdpTransport, "post", counted)

    def work(transport: UdpTransport) -> list[int]:
        model = nn.Linear(64, 10)
        optimizer = torch.optim.AdamW(model.parameters())
        prepare(model, optimizer, group=Group(transport))
        calls = operations = 0

        def count(frame: FrameType, event: str, what: Any) -> None:
            nonlocal calls, operations
            if frame.f_code.co_filename.startswith(SOURCE):
                calls += event == "call"
                operations += event == "c_call" and isinstance(getattr(what, "__self__", None), torch.Tensor)
                operations += event == "c_call" and (getattr(what, "__module__", None) or "").startswith("torch")

        found: list[tuple[int, int, int]] = []
        for _ in range(STEPS):
            before, calls, operations = posted[transport.rank], 0, 0
            sys.setprofile(count)
            step(model, optimizer)
            sys.setprofile(None)
            found.append((posted[transport.rank] - before, calls, operations))
        # Some steps do more: the first, those that compare standbys, and any that waits long on a busy machine.
        return [min(each) for each in zip(*found, strict=True)]

    for exchanges, calls, operations in local_world(ranks, work):
        assert exchanges <= most_exchanges
        assert calls <= most_calls
        assert operations <= most_operations


def test_who_waits_for_a_view_sleeps_through_exchanges() -> None:
    def switches(thread: threading.Thread) -> int:
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        return int(status.split("voluntary_ctxt_switches:")[1].split()[0])

    def work(transport: UdpTransport) -> int:
        group = Group(transport)

        def wait() -> None:
            with contextlib.suppress(Closed):  # the test is over
                transport.wait_view(1 << 30, 30.0)

        waiting = threading.Thread(target=wait, daemon=True)
        transport.watch()
        waiting.start()
        barrier(group).wait()
        before = switches(waiting)
        for _ in range(200):
            barrier(group).wait()
        return switches(waiting) - before

    assert max(local_world(2, work)) < 50
