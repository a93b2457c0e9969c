"""Runs random collectives over shared memory, over datagrams and on hosts with two ranks each, and compares all bits.

    python tests/helpers/soak.py --collectives 100000

Every call is made in each of the worlds, by four rank processes. Worlds on one machine must give the same bits; so must
those on two hosts; and so must all four, except where a large sum is added up in another order on two hosts, or where
the size of datagrams decides how numbers are rounded to int8 and int4.
"""

import argparse
import contextlib
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import soak_program as program
from soak_rank import ABSENT, INCOMPLETE, Runner
from stormtorch import Options
from stormtorch_lab.jobs.ranks import Member, run_ranks
from stormtorch_lab.netns import Lab

RANKS, RANKS_PER_HOST = 4, 2
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class World:
    """How ranks reach each other."""

    name: str
    shared_memory: bool
    hosts: int = 1

    @property
    def neighbours(self) -> int:
        """Number of ranks with which each rank shares memory."""
        if not self.shared_memory:
            return 0
        return (RANKS_PER_HOST if self.hosts > 1 else RANKS) - 1


MEMORY, UDP = World("memory", True), World("udp", False)
MIXED, MIXED_UDP = World("mixed", True, 2), World("mixed-udp", False, 2)
WORLDS = {world.name: world for world in (MEMORY, UDP, MIXED, MIXED_UDP)}


@dataclass
class Results:
    """What the ranks of one world got: one checksum per call and rank."""

    world: World
    by_rank: "list[array[int]]"
    shared_bytes: int
    seconds: float


def _rank(member: Member, world: World, seed: int, calls: int, most_bytes: int) -> "tuple[array[int], int, int]":
    options = Options(interface=member.interface, shared_memory=world.shared_memory, timeout_s=120.0)
    dist.init_process_group(
        "storm",
        store=member.store,
        rank=member.rank,
        world_size=member.world,
        pg_options=options,
        timeout=timedelta(seconds=120.0),
    )
    backend = {each: dist.new_group(list(each)) for each in program.groups(member.world)}
    default: Any = dist.distributed_c10d._get_default_group()
    transport = default.group.transport
    deadline = time.monotonic() + 30.0
    while len(transport.near()) < world.neighbours:
        assert time.monotonic() < deadline, f"shares memory with {transport.near()} only"
        time.sleep(0.001)
    dist.barrier()
    found = array("q", [ABSENT]) * calls

    def keep(call: program.Call, checksum: int) -> None:
        found[call.index] = checksum

    runner = Runner(transport, list(range(member.world)), backend=backend)
    for calls_of_round in program.rounds(seed, calls, member.world, most_bytes=most_bytes):
        runner.run(calls_of_round, keep)
    runner.close()
    dist.barrier()
    shared_bytes, near = transport.health()["shared_bytes_sent"], len(transport.near())
    dist.destroy_process_group()
    return found, shared_bytes, near


@contextlib.contextmanager
def _lab(world: World) -> Iterator[Lab | None]:
    if world.hosts == 1:
        yield None
        return
    with Lab(world.hosts, management=True, probe=False) as lab:
        yield lab


def run(world: World, seed: int, calls: int, *, most_bytes: int = program.MOST_BYTES) -> Results:
    """Runs a program in a world."""
    begin = time.monotonic()
    with _lab(world) as lab:
        by_rank_results = run_ranks(
            _rank,
            RANKS,
            (world, seed, calls, most_bytes),
            timeout_s=TIMEOUT_S,
            lab=lab,
            per_host=RANKS // world.hosts,
        )
    assert all(near == world.neighbours for _, _, near in by_rank_results), (
        f"{world.name}: {by_rank_results[0][2]} neighbours"
    )
    shared_bytes = sum(each[1] for each in by_rank_results)
    assert (shared_bytes > 0) == world.shared_memory, f"{world.name}: {shared_bytes} bytes passed through memory"
    return Results(world, [each[0] for each in by_rank_results], shared_bytes, time.monotonic() - begin)


@dataclass
class Comparison:
    """Differences between two worlds, and how much was compared."""

    differences: list[str]
    compared: int
    incomplete: int
    """Calls that may lose something, and did in one of the worlds."""


def compare(one: Results, other: Results, seed: int, calls: int, *, most_bytes: int = program.MOST_BYTES) -> Comparison:
    """Compares what all ranks got in two worlds, call by call."""
    found = Comparison([], 0, 0)
    same_hosts = one.world.hosts == other.world.hosts
    for call in (call for each in program.rounds(seed, calls, RANKS, most_bytes=most_bytes) for call in each):
        got = [[rank[call.index] for rank in results.by_rank] for results in (one, other)]
        if not same_hosts and (call.order_shows or call.kind in program.ON_GRIDS):
            continue
        if INCOMPLETE in got[0] or INCOMPLETE in got[1]:
            found.incomplete += 1
            continue
        found.compared += 1
        if got[0] != got[1]:
            found.differences.append(f"{one.world.name} {got[0]}, {other.world.name} {got[1]}: {call}")
    return found


def check(seed: int, calls: int, worlds: Sequence[World], *, most_bytes: int = program.MOST_BYTES) -> list[str]:
    """Runs a program in all worlds, compares each with the first two of its kind, and returns what differs."""
    wrong: list[str] = []
    results: list[Results] = []
    for world in worlds:
        got = run(world, seed, calls, most_bytes=most_bytes)
        lost = sum(INCOMPLETE in column for column in zip(*got.by_rank, strict=True))
        if world is MEMORY and lost > 0:
            wrong.append(f"seed {seed}: {lost} calls lost something in memory, which loses nothing")
        line = f"seed {seed}: {world.name} {got.seconds:.1f} s, {got.shared_bytes / 1e6:.0f} MB through memory"
        for before in results:
            comparison = compare(before, got, seed, calls, most_bytes=most_bytes)
            wrong += [f"seed {seed}: {each}" for each in comparison.differences]
            line += f"; {comparison.compared} as {before.world.name}, {len(comparison.differences)} differ"
            line += f", {comparison.incomplete} lost something" if comparison.incomplete else ""
        print(line, flush=True)
        results.append(got)
    return wrong


def main() -> int:
    """Runs all programs; the exit code says whether anything differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collectives", type=int, default=100_000, help="number of calls, in each of the worlds")
    parser.add_argument("--program", type=int, default=10_000, help="calls of one program; each has a seed of its own")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first program")
    parser.add_argument("--worlds", default=",".join(WORLDS), help="worlds, separated by commas")
    arguments = parser.parse_args()
    worlds = [WORLDS[name] for name in arguments.worlds.split(",")]
    begin, done, wrong = time.monotonic(), 0, list[str]()
    for seed in range(arguments.seed, arguments.seed + -(-arguments.collectives // arguments.program)):
        calls = min(arguments.program, arguments.collectives - done)
        wrong += check(seed, calls, worlds)
        done += calls
        print(f"{done} collectives in {len(worlds)} worlds, {time.monotonic() - begin:.0f} s", flush=True)
    for each in wrong[:20]:
        print(each)
    print(f"{done} collectives, {len(wrong)} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
