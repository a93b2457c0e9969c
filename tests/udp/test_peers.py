"""Peers that fall silent, leave, fail or rejoin."""

import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from conftest import OPTIONS, local_world

from reference import reduced, same_bits, values
from stormtorch import LOSSY, Options, Reliability
from stormtorch.collectives import Group, Op, all_gather, all_reduce, barrier, receive, send
from stormtorch.errors import ExchangeTimeout, PeerFailed, SizeMismatch, StormError
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.udp.udp import UdpTransport

QUICK = Options(datagram_bytes=1472, silence_s=0.3, timeout_s=20.0, linger_s=0.3)


def outcome_of(work: Callable[[], object]) -> str:
    """The kind of error that `work` raises and what it says."""
    try:
        work()
    except StormError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def compute(transport: Transport, seconds: float) -> None:
    """Lets virtual time pass on a simulated rank: it waits for the last rank of the world, which never sends."""
    clock = Group(transport, [transport.rank, transport.world - 1], name="clock")
    with pytest.raises(ExchangeTimeout):
        receive(clock, torch.empty(1), 1, timeout_s=seconds).wait()


@pytest.mark.thorough
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("reliability", [LOSSY, Reliability(budget=0.1), Reliability(budget=0.0, deadline_s=5.0)])
def test_lossy_exchanges_go_on_without_a_dark_peer_and_heal_when_it_returns(n: int, reliability: Reliability) -> None:
    network = SimulatedNetwork(n + 1, options=QUICK, seed=20)
    dark = range(3, 8)

    def work(transport: Transport) -> list[tuple[float, float, bool]]:
        if transport.rank == n:
            return []
        group, seen = Group(transport, range(n)), []
        for turn in range(15):
            compute(transport, 0.01)  # all have ended the turn before
            if transport.rank == 0:
                network.set_unreachable(1, turn in dark)
            compute(transport, 0.01)  # and no rank has begun this one
            outputs = [torch.full((2_000,), -1.0) for _ in range(n)]
            arrival = all_gather(group, outputs, torch.full((2_000,), float(turn)), reliability=reliability).wait()[0]
            whole = all(bool((output == turn).all()) for output in outputs)
            seen.append((arrival.fraction(peer=1 if group.rank != 1 else 0), arrival.elapsed_s, whole))
        return seen

    for seen in network.run(work)[:n]:
        fractions, times, whole = zip(*seen, strict=True)
        assert all(whole[:3]), "before"
        assert set(fractions[3:8]) == {0.0}, "cut off"
        assert times[3] == pytest.approx(0.3, abs=0.1), "the silence is waited for once"
        assert max(times[4:8]) < 0.05, "and then no longer"
        assert all(whole[-5:]), "healed"


def test_a_rank_that_ran_ahead_while_cut_off_does_not_hold_up_the_others() -> None:
    network = SimulatedNetwork(4, options=QUICK, seed=20)

    def work(transport: Transport) -> float:
        group, longest = Group(transport), 0.0
        for turn in range(20):
            # Cut off, rank 1 waits for no other rank, so it is far ahead when it rejoins.
            if transport.rank == 0:
                network.set_unreachable(1, turn in range(3, 8))
            outputs = [torch.empty(2_000) for _ in range(4)]
            arrival = all_gather(group, outputs, torch.full((2_000,), float(turn)), reliability=LOSSY).wait()[0]
            longest = max(longest, arrival.elapsed_s)
        return longest

    assert max(network.run(work)) < 1.0


@pytest.mark.parametrize("call", ["all_reduce", "receive", "send"])
def test_an_exact_exchange_with_a_dark_peer_says_who_what_how_much_and_which_knob(call: str) -> None:
    network = SimulatedNetwork(3, options=QUICK, seed=21)
    network.set_unreachable(2, True)

    def work(transport: Transport) -> str:
        group, tensor = Group(transport), torch.ones(10_000)
        if call == "all_reduce":
            return outcome_of(all_reduce(group, tensor).wait)
        if transport.rank == 2:
            return ""
        if call == "send":
            return outcome_of(send(group, tensor, 2).wait)
        return outcome_of(receive(group, tensor, 2).wait)

    said = network.run(work)[0]
    assert re.match(rf"PeerSilent: rank 0: {call} .*nothing was received from rank 2 for 0\.3 s", said), said
    assert re.search(r"\b[1-9]\d* bytes missing", said)
    assert "silence_s" in said
    assert network.now_s < 5.0


def test_exact_exchanges_work_again_when_the_dark_peer_has_returned() -> None:
    network = SimulatedNetwork(2, options=QUICK, seed=22)

    def work(transport: Transport) -> tuple[str, torch.Tensor]:
        group = Group(transport)
        if transport.rank == 0:
            network.set_unreachable(1, True)
        said = outcome_of(barrier(group).wait)
        if transport.rank == 0:
            network.set_unreachable(1, False)
        tensor = values(transport.rank, 20_000)
        for _ in range(3):
            # The ranks gave up at different times and may still find each other silent.
            if outcome_of(barrier(group).wait) == "no error":
                break
        all_reduce(group, tensor).wait()
        return said, tensor

    for said, tensor in network.run(work):
        assert said.startswith("PeerSilent")
        assert same_bits(tensor, reduced([values(rank, 20_000) for rank in range(2)], Op.SUM))


@pytest.mark.thorough
def test_a_slow_but_living_peer_is_not_silent() -> None:
    def work(transport: UdpTransport) -> None:
        if transport.rank == 1:
            time.sleep(1.2)
        barrier(Group(transport)).wait()

    local_world(2, work, options=replace(OPTIONS, silence_s=0.3))


@pytest.mark.parametrize("call", ["receive", "send", "all_reduce"])
@pytest.mark.parametrize("early", [True, False])
def test_whoever_needs_a_peer_that_closed_early_is_told_so(call: str, early: bool) -> None:
    def work(transport: UdpTransport) -> str:
        if transport.rank == 1:
            time.sleep(0.0 if early else 0.3)
            return ""
        time.sleep(0.3 if early else 0.0)
        # More than may leave before its receiver is ready: less would wait at the peer, and sending it would be done.
        group, tensor = Group(transport), torch.ones(200_000)
        if call == "all_reduce":
            return outcome_of(all_reduce(group, tensor).wait)
        return outcome_of(send(group, tensor, 1).wait if call == "send" else receive(group, tensor, 1).wait)

    said = local_world(2, work)[0]
    assert re.match(rf"PeerLeft: rank 0: {call} .*rank 1 closed its transport", said), said
    assert re.search(r"\b[1-9]\d* bytes missing", said)


def test_lossy_exchanges_go_on_without_a_peer_that_left() -> None:
    def work(transport: UdpTransport) -> list[float]:
        if transport.rank == 2:
            return []
        time.sleep(0.2)
        group, arrived = Group(transport), []
        for _ in range(3):
            tensor = torch.full((5_000,), float(transport.rank))
            arrival = all_reduce(group, tensor, Op.AVG, reliability=LOSSY).wait()[0]
            arrived += [arrival.fraction(peer=1 - transport.rank), arrival.fraction(peer=2)]
        return arrived

    assert local_world(3, work)[:2] == [[1.0, 0.0] * 3] * 2


def test_an_exchange_that_not_everyone_calls_times_out_and_says_for_whom_it_waited() -> None:
    over = threading.Event()

    def work(transport: UdpTransport) -> tuple[str, float]:
        group, began = Group(transport), time.monotonic()
        if transport.rank == 1:
            over.wait(20.0)
            return "", 0.0
        said = outcome_of(all_reduce(group, torch.ones(9), timeout_s=0.4).wait)
        over.set()
        return said, time.monotonic() - began

    said, took = local_world(2, work)[0]
    assert re.match(r"ExchangeTimeout: rank 0: all_reduce .*Timed out after 0\.4 s, waiting for rank 1, 36 bytes", said)
    assert "timeout_s" in said
    assert 0.35 < took < 10.0
    assert issubclass(ExchangeTimeout, TimeoutError)


def test_a_wait_that_timed_out_can_be_repeated_and_an_error_stays_an_error() -> None:
    def work(transport: UdpTransport) -> list[str]:
        group, tensor = Group(transport), torch.zeros(100)
        if transport.rank == 1:
            time.sleep(0.6)
            send(group, torch.ones(100), 0).wait()
            time.sleep(0.6)
            return []
        pending = receive(group, tensor, 1)
        said = [outcome_of(lambda: pending.wait(0.1))]
        pending.wait()
        assert tensor.tolist() == [1.0] * 100
        never = receive(group, tensor, 1, timeout_s=0.2)
        return said + [outcome_of(lambda: never.wait(5.0)) for _ in range(2)]

    early, first, again = local_world(2, work)[0]
    assert re.match(r"ExchangeTimeout: rank 0: receive is not done after 0\.1 s", early)
    assert re.match(r"ExchangeTimeout: rank 0: receive .*waiting for rank 1, 400 bytes", first)
    assert again == first


@pytest.mark.thorough
@pytest.mark.parametrize("late", [0, 1, None])
@pytest.mark.parametrize("sizes", [(10, 12), (100_000, 100_001)])
def test_tensors_of_different_sizes_are_an_error_on_both_sides_at_once(
    late: int | None, sizes: tuple[int, int]
) -> None:
    def work(transport: UdpTransport) -> tuple[str, float]:
        if transport.rank == late:
            time.sleep(0.3)
        began = time.monotonic()
        tensor = torch.ones(sizes[transport.rank])
        said = outcome_of(all_gather(Group(transport), [tensor, tensor.clone()], tensor).wait)
        took = time.monotonic() - began
        time.sleep(0.5)
        return said, took

    both = local_world(2, work, options=replace(OPTIONS, silence_s=20.0))
    assert sum("SizeMismatch" in said for said, _ in both) >= 1
    for rank, (said, took) in enumerate(both):
        theirs, ours = 4 * sizes[1 - rank], 4 * sizes[rank]
        mismatch = f"SizeMismatch: rank {rank}: .*rank {1 - rank} sends {theirs} bytes where {ours} are"
        assert re.match(rf"({mismatch})|(PeerFailed: rank {rank}: .*rank {1 - rank} )", said), said
        assert took < 10.0, "it was waited for silence"
    assert issubclass(SizeMismatch, StormError)
    assert issubclass(PeerFailed, StormError)


def test_every_rank_names_the_dark_one_whoever_told_of_it() -> None:
    network = SimulatedNetwork(6, options=QUICK, seed=23)
    network.set_unreachable(2, True)

    def work(transport: Transport) -> tuple[str, int | None]:
        if transport.rank == 5:
            return "", None
        compute(transport, 0.01 * (1 + transport.rank))  # the first to begin is the first to notice
        try:
            all_reduce(Group(transport, range(5)), torch.ones(500_000)).wait()
        except StormError as error:
            return f"{type(error).__name__}: {error}", error.culprit
        return "no error", None

    said = network.run(work)
    told = "PeerFailed: rank {}: all_reduce .*rank [0134] aborted it because nothing was received from rank 2, "
    found = "PeerSilent: rank {}: all_reduce .*nothing was received from rank 2 for 0.3 s, "
    for rank in (0, 1, 3, 4):
        assert re.match(f"({told})|({found})".format(rank, rank), said[rank][0]), said[rank]
        assert said[rank][1] == 2
    assert sum("PeerFailed" in text for text, _ in said) == 3, said


@pytest.mark.thorough
@pytest.mark.parametrize("why", ["cancelled", "left", "late"])
def test_whoever_is_told_of_an_error_is_told_its_cause(why: str) -> None:
    def work(transport: UdpTransport) -> str:
        group, tensor = Group(transport), torch.ones(200_000)
        if transport.rank == 1:
            time.sleep(0.2 if why == "left" else 1.0)
            return ""
        pending = all_reduce(group, tensor, timeout_s=0.4 if why == "late" and transport.rank == 0 else 20.0)
        if why == "cancelled" and transport.rank == 0:
            time.sleep(0.2)
            pending._exchange.cancel()  # type: ignore[union-attr]
        said = outcome_of(pending.wait)
        time.sleep(1.0)
        return said

    said = local_world(3, work)
    patterns = {
        "cancelled": ("Closed: rank 0: .*was cancelled", "rank 0 aborted it because rank 0 cancelled it"),
        "left": ("rank 1 closed its transport", "rank 1 closed its transport"),
        "late": (
            r"Timed out after 0\.4 s, waiting for rank 1",
            "PeerFailed: .*rank 0 aborted it because it timed out, waiting for rank 1",
        ),
    }[why]
    assert re.search(patterns[0], said[0]), said
    assert re.search(patterns[1], said[2]), said
