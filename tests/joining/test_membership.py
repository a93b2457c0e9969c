"""Membership of a transport: agreed views, positions of sessions, waits for a view and waits that are interrupted."""

import threading
import time

import pytest
import torch
from conftest import local_world

from reference import same_bits
from stormtorch import Options
from stormtorch.collectives import Group, all_reduce, all_to_all, barrier
from stormtorch.errors import Closed, Interrupted
from stormtorch.exchange.simulated import SimulatedNetwork, SimulatedTransport
from stormtorch.udp.udp import UdpTransport

QUICK = Options(datagram_bytes=1472, silence_s=1.0, timeout_s=30.0, linger_s=0.5)


def test_first_view_has_all_ranks_and_nobody_is_frozen() -> None:
    def work(transport: UdpTransport) -> None:
        transport.watch()
        view = transport.view()
        assert view is not None
        assert (view.number, view.members, view.leaving, view.starts) == (1, [(0, 0), (1, 0), (2, 0)], [], [])
        assert transport.inside()
        assert not transport.frozen()
        assert not transport.wait_view(1, 0.05)
        assert transport.wait_view(0, 0.0)
        barrier(Group(transport)).wait()

    local_world(3, work, options=QUICK)


def test_standing_tells_who_hears_whom() -> None:
    def work(transport: UdpTransport) -> None:
        transport.watch()
        give_up_at = time.monotonic() + 10.0
        while time.monotonic() < give_up_at:
            connectivity = transport.connectivity()
            if all(len(connectivity["hears"].get(rank, [])) == 3 for rank in range(3)):
                break
            time.sleep(0.02)
        assert connectivity["hears"] == {rank: [0, 1, 2] for rank in range(3)}
        assert set(connectivity["heard_s"]) == {0, 1, 2}
        assert all(0.0 <= seconds < 5.0 for seconds in connectivity["heard_s"].values())
        assert connectivity["quorum"]
        assert not connectivity["knocking"]
        barrier(Group(transport)).wait()

    local_world(3, work, options=QUICK)


def test_session_moves_on_unless_it_is_unknown_or_knows_another_view() -> None:
    def work(transport: UdpTransport) -> None:
        transport.watch()
        assert not transport.advance(7, 1, 1, 1)
        transport.add_session(7, 0, 1)
        assert transport.advance(7, 1, 1, 1)
        assert not transport.advance(7, 2, 1, 2), "it has looked at another view than the latest"
        assert not transport.advance(7, 2, 1, 0)
        assert transport.advance(7, 2, 1, 1)
        transport.remove_session(7)
        assert not transport.advance(7, 3, 1, 1)
        barrier(Group(transport)).wait()

    local_world(2, work, options=QUICK)


def test_rank_that_leaves_is_in_no_later_view_and_no_exchange_waits_for_it() -> None:
    def work(transport: UdpTransport) -> None:
        transport.watch()
        barrier(Group(transport)).wait()
        if transport.rank == 2:
            return
        tensor = torch.full((50_000,), float(transport.rank + 1))
        pending = all_reduce(Group(transport, name="first", view=1), tensor)
        assert transport.wait_view(1, 10.0)
        pending.wait(10.0)
        view = transport.view()
        assert view is not None
        assert view.number > 1
        assert view.members == [(0, 0), (1, 0)]
        assert same_bits(tensor[:30_000], torch.full((30_000,), 3.0))
        barrier(Group(transport, [0, 1], view=view.number)).wait()

    local_world(3, work, options=QUICK)


@pytest.mark.thorough
def test_rank_that_asks_out_is_leaving_in_the_next_view() -> None:
    def work(transport: UdpTransport) -> None:
        transport.watch()
        barrier(Group(transport)).wait()
        if transport.rank == 1:
            transport.request_leave()
        assert transport.wait_view(1, 10.0)
        view = transport.view()
        assert view is not None
        assert view.members == [(0, 0), (2, 0)]
        assert view.leaving == [(1, 0)]
        assert transport.inside()
        barrier(Group(transport, view=view.number)).wait()

    local_world(3, work, options=QUICK)


@pytest.mark.thorough
def test_interrupted_wait_ends_soon_and_frees_the_tensors() -> None:
    def work(transport: UdpTransport) -> None:
        if transport.rank == 0:
            stop = threading.Event()
            group = Group(transport, name="stopped", view=1, interrupted=stop.is_set)
            pending = all_reduce(group, torch.zeros(1_000_000))
            threading.Timer(0.3, stop.set).start()
            begun = time.monotonic()
            for _ in range(2):
                with pytest.raises(Interrupted, match=r"rank 0: all_reduce .* was interrupted"):
                    pending.wait()
            assert 0.2 < time.monotonic() - begun < 2.0
            assert not transport._plans
        barrier(Group(transport)).wait()

    local_world(2, work, options=QUICK)


def test_interrupted_exchange_ends_well_where_all_that_it_needs_take_part() -> None:
    waited = [0] * 4
    ended = threading.Barrier(3)

    def work(transport: UdpTransport) -> float:
        transport.watch()
        rank = transport.rank

        def interrupted() -> bool:
            view = transport.view()
            assert view is not None
            waited[rank] += view.number > 1
            return view.number > 1

        # Only ranks 0 and 1 exchange much data, for a second. Rank 3 ends the exchange at once, and leaves.
        sizes = [1_250_000 if rank + peer == 1 else 1 for peer in range(4)]
        rooms = [torch.zeros(size) for size in sizes]
        group = Group(transport, view=1, interrupted=interrupted)
        arrivals = all_to_all(group, rooms, [torch.ones(size) for size in sizes]).wait()
        assert all(room.eq(1.0).all() for room in rooms)
        if rank == 3:
            transport.close()
        else:
            ended.wait(30.0)
        return arrivals[0].arrived

    assert local_world(4, work, options=Options(datagram_bytes=1472, rate="40mbit")) == [1.0] * 4
    assert min(waited[:2]) > 5


def test_closing_wakes_whoever_waits_for_a_view() -> None:
    def work(transport: UdpTransport) -> None:
        transport.watch()
        barrier(Group(transport)).wait()
        if transport.rank == 0:
            threading.Timer(0.2, transport.close).start()
            with pytest.raises(Closed, match="rank 0: wait_view"):
                transport.wait_view(99, 20.0)

    local_world(2, work, options=QUICK)


@pytest.mark.pure
def test_simulated_rank_waits_for_a_view_in_virtual_time() -> None:
    network = SimulatedNetwork(3, options=QUICK)

    def work(transport: SimulatedTransport) -> float:
        transport.watch()
        begun_s = network.now_s
        assert not transport.wait_view(1, 5.0)
        assert 5.0 <= network.now_s - begun_s < 5.5
        network.set_unreachable(2, True)
        found = transport.wait_view(1, 20.0)
        assert found == (transport.rank != 2)
        return network.now_s - begun_s

    first, second, _ = network.run(work)
    assert first < 9.0
    assert second < 9.0


@pytest.mark.pure
def test_one_bad_link_leaves_one_of_its_ends_out() -> None:
    network = SimulatedNetwork(4, options=QUICK)

    def work(transport: SimulatedTransport) -> list[tuple[int, int]]:
        transport.watch()
        assert not transport.wait_view(1, 1.0)
        network.set_link(1, 3, True)
        network.set_link(3, 1, True)
        assert transport.wait_view(1, 20.0)
        view = transport.view()
        assert view is not None
        return view.members

    assert network.run(work) == [[(0, 0), (1, 0), (2, 0)]] * 4


@pytest.mark.pure
def test_two_runs_of_one_seed_agree_on_the_same_views_at_the_same_time() -> None:
    def once() -> list[tuple[int, float]]:
        network = SimulatedNetwork(4, options=QUICK, loss=0.2, seed=5)

        def work(transport: SimulatedTransport) -> tuple[int, float]:
            transport.watch()
            transport.add_session(1, 0, 1)
            assert not transport.wait_view(1, 1.0)
            network.set_unreachable(3, True)
            transport.wait_view(1, 10.0)
            view = transport.view()
            assert view is not None
            return view.number, network.now_s

        return network.run(work)

    assert once() == once()
