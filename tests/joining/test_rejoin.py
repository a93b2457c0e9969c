"""Rejoin: a rank is killed, the others go on, a new process takes over the rank, and all go on together."""

import gc
import json
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OPTIONS, store_of_threads
from torch._C._distributed_c10d import TCPStore  # torch.distributed has it, but its types do not

import warm_scripts
from stormtorch import LOSSY, Options, StormError, connect
from stormtorch.backend.creation import _generation_of_others
from stormtorch.collectives import Group, all_reduce
from stormtorch.joining.rendezvous import newer_card, rejoin, rejoin_in_place
from stormtorch.udp import cards
from stormtorch.udp.udp import UdpTransport

HERE = Path(__file__).parents[1] / "helpers"
KEY = "a job key of any length from sixteen bytes"
# Short, but longer than a busy machine lets a process wait for its turn.
SILENCE_S = 2.0
WAYS: dict[str, dict[str, Any]] = {"plain": {}, "sealed": {"key": KEY}, "torch": {"torch": True}}


class Job:
    """Ranks as processes, and a store that outlives them all."""

    def __init__(self, world: int = 3, key: str = "", torch: bool = False) -> None:
        self.world = world
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
        self._how = {"world": world, "port": self._store.port, "key": key, "torch": torch, "silence_s": SILENCE_S}
        self._ranks: dict[int, warm_scripts.Script] = {}
        self.start(*range(world))

    def start(self, *ranks: int, again: bool = False) -> None:
        """Processes for ranks that have none; returns when they are up."""
        for rank in ranks:
            how = json.dumps(self._how | {"rank": rank, "again": again})
            self._ranks[rank] = warm_scripts.start(
                [str(HERE / "rejoin_rank.py"), how],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        for rank in ranks:
            assert self._hear(rank) == {"up": True}

    def kill(self, rank: int) -> None:
        process = self._ranks.pop(rank)
        process.kill()
        process.wait()

    def tell(self, ranks: Sequence[int], *what: Any) -> dict[int, Any]:
        """Tells ranks to do something together, and returns what they say."""
        for rank in ranks:
            pipe = self._ranks[rank].stdin
            assert pipe is not None
            pipe.write(json.dumps(what) + "\n")
            pipe.flush()
        return {rank: self._hear(rank) for rank in ranks}

    def _hear(self, rank: int) -> Any:
        pipe = self._ranks[rank].stdout
        assert pipe is not None
        line = pipe.readline()
        assert line, f"rank {rank} ended with {self._ranks[rank].wait(5.0)}"
        return json.loads(line)

    def check_whole(self, name: str, incarnations: list[int]) -> None:
        """Exact and lossy collectives of all, on a group that is new to all."""
        for said in self.tell(range(self.world), "exact", name).values():
            assert said == {"right": True, "incarnations": incarnations}
        self.check_lossy(name, range(self.world))

    def check_lossy(self, name: str, ranks: Sequence[int]) -> None:
        """Lossy collectives of these ranks, whether the others live or not: all of one another's comes, and soon."""
        for said in self.tell(ranks, "lossy", name, 4).values():
            for peer, came in said["came"][-1].items():
                assert came > 0.99 if int(peer) in ranks else came == 0.0, said
            assert said["took"][-1] < SILENCE_S / 2, f"the dead are waited for again and again: {said}"

    def close(self) -> None:
        for process in self._ranks.values():
            if process.stdin is not None:
                process.stdin.close()
        for process in self._ranks.values():
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def job(way: str) -> Iterator[Job]:
    made = Job(**WAYS[way])
    try:
        yield made
    finally:
        made.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["plain", pytest.param("sealed", marks=pytest.mark.slow)])
def test_killed_rank_returns_and_is_killed_and_returns_again(job: Job) -> None:
    job.check_whole("epoch 0", [0, 0, 0])
    for incarnation in (1, 2):
        job.kill(2)
        job.check_lossy(f"epoch {incarnation - 1}", [0, 1])
        job.start(2, again=True)
        for said in job.tell([0, 1], "readmit", 2).values():
            assert said == {"incarnation": incarnation, "again": False}
        job.check_whole(f"epoch {incarnation}", [0, 0, incarnation])


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["torch"])
def test_killed_rank_of_a_process_group_is_readmitted_by_itself(job: Job) -> None:
    job.check_whole("epoch 0", [0, 0, 0])
    before = 0
    for turn in (1, 2):
        job.kill(2)
        job.check_lossy(f"epoch {turn - 1}", [0, 1])
        job.start(2, again=True)
        first, second = job.tell([0, 1], "await_return", 2, before).values()
        assert first == second
        before = first["incarnation"]
        job.check_whole(f"epoch {turn}", [0, 0, before])


@pytest.mark.thorough
@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["plain"])
def test_rank_returns_before_anybody_missed_it_and_in_the_middle_of_exchanges(job: Job) -> None:
    job.check_whole("epoch 0", [0, 0, 0])
    job.kill(1)
    job.start(1, again=True)
    for said in job.tell([0, 2], "readmit_in_the_middle", "epoch 0", 1).values():
        assert said["error"] in ("PeerSilent", "PeerFailed"), said
        assert said["culprit"] == 1, said
        assert said["took"] < SILENCE_S * 0.9, "nobody waits for the silence"
    job.check_whole("epoch 1", [0, 1, 0])


@pytest.mark.thorough
@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["sealed"])
def test_ranks_return_while_another_is_dead(job: Job) -> None:
    job.check_whole("epoch 0", [0, 0, 0])
    job.kill(2)
    job.kill(0)
    job.tell([1], "lossy", "epoch 0", 2)
    job.start(0, again=True)
    job.tell([1], "readmit", 0)
    job.check_lossy("epoch 1", [0, 1])
    job.start(2, again=True)
    job.tell([0, 1], "readmit", 2)
    job.check_whole("epoch 2", [1, 0, 1])


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["sealed"])
def test_two_ranks_return_at_once(job: Job) -> None:
    job.kill(0)
    job.kill(1)
    job.start(0, 1, again=True)
    job.tell([2], "readmit", 0)
    job.tell([2], "readmit", 1)
    # Whether one of the two was in time to see the other's new card is open.
    for rank in (0, 1):
        job.tell([rank], "readmit_if_unknown", 1 - rank, 1)
    job.check_whole("epoch 1", [1, 1, 0])


def connected(n: int, options: Options = OPTIONS) -> tuple[Any, list[UdpTransport]]:
    """Transports of all ranks, and their store."""
    store = store_of_threads(3.0)
    made: dict[int, UdpTransport] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: made.update({rank: connect(store, rank, n, options)}))
        for rank in range(n)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    return store, [made[rank] for rank in range(n)]


def test_nobody_has_returned_until_a_card_says_so_and_a_gap_does_no_harm() -> None:
    store, transports = connected(2)
    try:
        assert newer_card(store, 1, 0) is None
        assert transports[0].store is store and transports[0].prefix == "storm"
        # It died between taking its number and publishing its card.
        assert cards.next_incarnation(store, "storm", 1) == 1
        assert newer_card(store, 1, 0) is None
        with rejoin(store, 1, 2, OPTIONS) as back:
            card = newer_card(store, 1, 0)
            assert card is not None and card.incarnation == back.incarnation(1) == 2
            assert back.incarnation(0) == transports[0].incarnation(1) == 0
            assert back.chunk_bytes == transports[0].chunk_bytes and back.trip_bytes == transports[0].trip_bytes
            transports[0].readmit(1, card)
            assert transports[0].incarnation(1) == 2
            assert newer_card(store, 1, 2) is None
            with pytest.raises(ValueError, match="incarnation 2 of rank 1 is not newer than 2"):
                transports[0].readmit(1, card)
            with pytest.raises(ValueError, match="another rank"):
                transports[0].readmit(0, card)
    finally:
        for transport in transports:
            transport.close(0.0)


@pytest.mark.thorough
def test_what_was_under_way_before_a_rank_came_back_is_over_and_takes_nothing_of_what_follows() -> None:
    _, transports = connected(2, Options(silence_s=0.5, linger_s=0.1))
    try:
        before = [all_reduce(Group(transports[1], name="before"), torch.ones(8), reliability=LOSSY) for _ in range(2)]
        rejoin_in_place(transports[1])
        after = [all_reduce(Group(transports[1], name="after"), torch.ones(8), reliability=LOSSY) for _ in range(2)]
        time.sleep(1.0)
        assert before[0].done()
        with pytest.raises(StormError, match="rejoined"):
            before[0].wait()
        del before
        gc.collect()
        all_reduce(Group(transports[1], name="more"), torch.ones(8), reliability=LOSSY)
        for each in after:
            each.wait(5.0)
    finally:
        for transport in transports:
            transport.close(0.0)


@pytest.mark.thorough
def test_what_was_agreed_on_at_the_start_still_holds() -> None:
    store, transports = connected(2, Options(datagram_bytes=1472, linger_s=0.1))
    try:
        with rejoin(store, 1, 2, Options(datagram_bytes=9000, eager_bytes=4096)) as back:
            assert back.chunk_bytes == transports[0].chunk_bytes
        transports[1].close()  # while it lives, no other process takes over its rank
        with connect(store, 1, 2, Options(rejoin=True)) as again:
            assert again.incarnation(1) > 1
            assert again.chunk_bytes == transports[0].chunk_bytes
        with pytest.raises(ValueError, match="different keys"):
            rejoin(store, 1, 2, Options(key=KEY.encode()))
        with pytest.raises(ValueError, match=r"rank must lie in \[0, world\)"):
            rejoin(store, 2, 2)
    finally:
        for transport in transports:
            transport.close(0.0)


def test_a_job_is_rejoined_in_the_generation_that_the_others_are_in() -> None:
    store = store_of_threads(0.3)
    with pytest.raises(ValueError, match="no job to rejoin"):
        _generation_of_others(store, 1, 3)
    store.add("generation/0", 2)
    store.add("generation/1", 5)  # our own: processes that never got as far as to join
    assert _generation_of_others(store, 1, 3) == 2
    assert _generation_of_others(store, 1, 3) == 2, "looking changes nothing"


def test_without_a_job_there_is_nothing_to_rejoin() -> None:
    with pytest.raises(Exception, match=r"storm/cookie|[Tt]imeout|timed out"):
        rejoin(store_of_threads(0.3), 1, 2)


def test_process_that_returns_has_the_lane_of_low_priority_that_the_job_has() -> None:
    store, transports = connected(2, replace(OPTIONS, priority="both", linger_s=0.1))
    try:
        transports[1].close()
        with rejoin(store, 1, 2, OPTIONS) as back:
            assert back.lanes == transports[0].lanes == 2
            card = newer_card(store, 1, 0)
            assert card is not None and transports[0].fits(card)
            transports[0].readmit(1, card)
            tensors = [torch.ones(50_000) for _ in range(2)]
            low = [Group(each, name="again", priority="low") for each in (transports[0], back)]
            for pending in [all_reduce(group, tensor) for group, tensor in zip(low, tensors, strict=True)]:
                pending.wait(10.0)
            assert all(tensor.eq(2.0).all() for tensor in tensors)
            assert back.lane_bytes_sent()[1] > 100_000
    finally:
        for transport in transports:
            transport.close(0.0)
