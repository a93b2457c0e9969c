"""Ranks that leave: they stay while another rank may save their shards, and no longer."""
# mypy: disable-error-code="no-untyped-call"

import gc
import re
import threading
import time
from typing import Any

import pytest
import torch
from conftest import local_world
from torch import nn

from stormtorch import BoundedDrift, ModelAveraging, Options, prepare
from stormtorch.collectives import Group
from stormtorch.errors import StormError
from stormtorch.policies.policy import Policy
from stormtorch.udp.udp import UdpTransport
from training import perceptron

# A wait for a missing rank lasts this long, so an operation that takes at most half of it has not waited.
SILENCE_S = 20.0
OPTIONS = Options(datagram_bytes=400, silence_s=SILENCE_S, timeout_s=30.0)
LATE_S = 0.8


def trained(transport: UdpTransport, steps: int, policy: Policy | None = None) -> tuple[nn.Module, Any]:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters())
    prepare(model, optimizer, policy=policy, group=Group(transport))
    step(transport, model, optimizer, steps)
    return model, optimizer


def step(transport: UdpTransport, model: nn.Module, optimizer: Any, steps: int) -> None:
    for number in range(steps):
        torch.manual_seed(10 * number + transport.rank)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.thorough
@pytest.mark.parametrize("policy", [BoundedDrift(), ModelAveraging()], ids=["drift", "averaging"])
def test_a_rank_that_leaves_stays_until_another_has_saved(policy: Policy) -> None:
    def work(transport: UdpTransport) -> tuple[Any, Any]:
        model, optimizer = trained(transport, 3, policy)
        if transport.rank != 0:
            return None, None  # closes the transport
        time.sleep(LATE_S)
        return model.state_dict(), optimizer.state_dict()

    (state, of_optimizer), *_ = local_world(3, work, options=OPTIONS)
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert len(of_optimizer["state"]) == len(list(perceptron().parameters()))


def test_a_rank_that_leaves_early_is_not_waited_for_by_those_that_go_on() -> None:
    took: list[float] = []

    def work(transport: UdpTransport) -> int:
        model, optimizer = trained(transport, 3)
        if transport.rank == 1:
            return 0
        begin = time.monotonic()
        step(transport, model, optimizer, 5)
        took.append(time.monotonic() - begin)
        return len(optimizer.ledger)

    assert local_world(3, work, options=OPTIONS) == [8, 0, 8]
    assert max(took) < SILENCE_S / 2


@pytest.mark.parametrize(
    "policy", [ModelAveraging(), ModelAveraging(overlap=True), BoundedDrift()], ids=["averaging", "overlap", "drift"]
)
def test_a_rank_that_leaves_early_does_not_hold_up_any_policy(policy: Policy) -> None:
    def work(transport: UdpTransport) -> float:
        model, optimizer = trained(transport, 3, policy)
        begin = time.monotonic()
        if transport.rank == 0:
            step(transport, model, optimizer, 3)
        transport.drain()
        return time.monotonic() - begin

    assert max(local_world(2, work, options=OPTIONS)) < SILENCE_S / 2


def test_a_rank_that_leaves_early_does_not_hold_up_one_without_gradients() -> None:
    def work(transport: UdpTransport) -> float:
        _, optimizer = trained(transport, 3)
        begin = time.monotonic()
        if transport.rank == 0:
            optimizer.step()  # gradients are exchanged here, because no backward has done so
        transport.drain()
        return time.monotonic() - begin

    assert max(local_world(2, work, options=OPTIONS)) < SILENCE_S / 2


@pytest.mark.thorough
def test_a_rank_that_leaves_stays_for_one_that_waits_for_the_last_parameters() -> None:
    def work(transport: UdpTransport) -> Any:
        model, optimizer = trained(transport, 2, BoundedDrift(overlap=True))
        torch.manual_seed(transport.rank)
        model(torch.randn(4, 8)).square().mean().backward()
        if transport.rank == 2:
            time.sleep(LATE_S)
        optimizer.step()
        if transport.rank == 1:
            return None  # without the late data of rank 2, which the other ranks wait for
        optimizer.session.wait()
        return optimizer.state_dict() if transport.rank == 0 else None

    found, *_ = local_world(3, work, options=OPTIONS)
    assert len(found["state"]) == len(list(perceptron().parameters()))


@pytest.mark.thorough
def test_what_has_left_before_with_its_state_is_named_by_who_goes_on_alone() -> None:
    def work(transport: UdpTransport) -> list[str]:
        model, optimizer = trained(transport, 3)
        if transport.rank == 1:
            transport.close()
            return []
        time.sleep(LATE_S)
        assert model.state_dict().keys() == perceptron().state_dict().keys()
        # Two ranks have no standbys: each would hold everything.
        assert 0 < len(optimizer.state_dict()["state"]) <= len(list(perceptron().parameters()))
        step(transport, model, optimizer, 1)
        assert len(optimizer.state_dict()["state"]) == len(list(perceptron().parameters()))
        return [event for row in optimizer.ledger for event in row.events]

    gone, lost = local_world(2, work, options=OPTIONS)[0]
    assert gone == "view 2 begins at step 3 with 1 rank; rank 1 is gone"
    assert lost.startswith("the shard of rank 1 had no standby left") and lost.endswith("is reset")


def test_a_model_that_one_rank_has_not_quite_dropped_does_not_hold_up_the_end() -> None:
    held: dict[int, Any] = {}
    dropped = threading.Barrier(2)

    def work(transport: UdpTransport) -> float:
        held[transport.rank] = trained(transport, 2)
        other = trained(transport, 2)
        dropped.wait()
        if transport.rank == 1:
            del held[1]
            gc.collect()
            gc.disable()
        dropped.wait()
        held.pop(0, None)  # only the garbage collector frees what a rank drops
        began = time.monotonic()
        transport.drain()
        del other
        return time.monotonic() - began

    try:
        assert max(local_world(2, work, options=OPTIONS)) < SILENCE_S / 4
    finally:
        gc.enable()


@pytest.mark.thorough
def test_a_rank_that_leaves_last_does_not_wait_for_a_majority_that_is_gone() -> None:
    took: list[float] = []
    gone = threading.Event()

    def work(transport: UdpTransport) -> None:
        model, optimizer = trained(transport, 2)
        if transport.rank == 0:
            transport.close()  # without leaving the session, as if it had never had the model
            gone.set()
            return
        gone.wait(30.0)
        began = time.monotonic()
        transport.drain()
        took.append(time.monotonic() - began)
        del model, optimizer

    local_world(2, work, options=Options(datagram_bytes=400, silence_s=1.5, timeout_s=60.0))
    assert took[0] < 10.0


def test_a_rank_that_begins_a_view_which_the_others_leave_gives_up_and_says_so() -> None:
    begun = threading.Barrier(3)

    def work(transport: UdpTransport) -> float:
        _, optimizer = trained(transport, 2, BoundedDrift(give_up_s=1.0))
        optimizer.session.wait()
        if transport.rank == 3:
            transport.close()
            return 0.0
        assert transport.wait_view(1, 10.0)
        begun.wait()
        if transport.rank != 0:
            time.sleep(0.2)
            transport.close()
            return 0.0
        began = time.monotonic()
        try:
            optimizer.session.change()
        except StormError as error:
            assert re.search(r"rank 0: has waited . s \(give_up_s\) .*there is no majority", str(error))
            assert time.monotonic() - began > 1.0
        else:  # they left one after the other, and each time the remaining ranks had agreed on a view without them
            assert tuple(optimizer.session.view.members) == (0,)
        return time.monotonic() - began

    assert local_world(4, work, options=OPTIONS)[0] < OPTIONS.timeout_s / 2
