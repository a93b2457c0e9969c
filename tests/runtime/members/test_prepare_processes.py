# mypy: disable-error-code="no-untyped-call, attr-defined"
# torch's own backward is untyped, and torch.distributed has more than it declares.
"""Prepared models in separate processes over UDP: behaviour that depends on a whole process, and memory costs."""

import gc
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import local_world
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel

import warm_scripts
from stormtorch import BoundedDrift, ModelAveraging, Options, exact, faults, prepare
from stormtorch.collectives import Group, barrier
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.policies.policy import Policy
from stormtorch.runtime.members.served_collectives import ServedCollectives
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.session.session import Session, sessions_of
from stormtorch_lab.jobs.ranks import Member, run_ranks
from training import (
    EXACTLY,
    Llama,
    Optimizer,
    Rank,
    adamw,
    assert_close,
    assert_same,
    next_word,
    on_ranks,
    perceptron,
    plain,
    regression,
    sgd,
    values,
    vectors,
    words,
)

pytestmark = pytest.mark.pure

STEPS = 6


def prepared(
    member: Member, model: nn.Module, make: Callable[[nn.Module], Optimizer] = adamw, policy: Any = EXACTLY
) -> Rank:
    _, optimizer = prepare(model, make(model), policy=policy)
    return Rank(member.rank, member.world, model, optimizer)


# --- cases, run in the same processes, as those take longer to start than any case ------------------------------------


def as_in_one_process(member: Member) -> None:
    rank = prepared(member, perceptron())
    rank.train(STEPS)
    assert_same(rank.values(), plain(perceptron(), adamw, STEPS, world=member.world))


def under_loss(member: Member) -> None:
    with faults(loss=0.2, seed=3):
        torch.manual_seed(0)
        rank = prepared(member, Llama(), policy=BoundedDrift(max_lag=3))
        losses = rank.train(60, objective=next_word, data=lambda rank, step: words(rank, step % 4))
        assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
        mine = torch.cat([each.flatten() for each in rank.values()])
    arrived = rank.optimizer.ledger.summary()["arrived"]
    assert 0.7 < arrived < 0.9, arrived
    theirs = [torch.empty_like(mine) for _ in range(member.world)]
    dist.all_gather(theirs, mine)
    assert all(torch.equal(each, mine) for each in theirs)


def dropout(member: Member) -> None:
    found = []
    for seed in (1, 1, 2):
        model = nn.Sequential(*perceptron(), nn.Dropout(0.5))
        rank = prepared(member, model)
        torch.manual_seed(100 * seed + member.rank)
        losses = rank.train(STEPS, rank=0)  # the same data on all ranks: they differ only by lost packets
        others = [torch.zeros(STEPS) for _ in range(member.world)]
        dist.all_gather(others, torch.tensor(losses))
        assert not torch.equal(others[0], others[1])
        found.append(rank.values())
    assert_same(found[0], found[1])
    assert not torch.equal(found[0][0], found[2][0])


def compiled(member: Member) -> None:
    expected = plain(perceptron(), adamw, STEPS, world=member.world)
    for overlap in (True, False):
        policy = BoundedDrift(gradients=EXACTLY.gradients, broadcast=EXACTLY.broadcast, overlap=overlap, bucket_mb=1e-4)
        before: Any = torch.compile(perceptron(), backend="aot_eager")
        rank = prepared(member, before, policy=policy)
        rank.train(STEPS)
        assert_same(rank.values(), expected)
        assert not sessions_of(before)[0]._parameter_barrier.overlap

        torch.compiler.reset()
        in_place = perceptron()
        in_place.compile(backend="aot_eager")
        rank = prepared(member, in_place, policy=policy)
        rank.train(STEPS)
        assert_same(rank.values(), expected)
        assert not sessions_of(in_place)[0]._parameter_barrier.overlap

        torch.compiler.reset()
        model = perceptron()
        rank = prepared(member, model, policy=policy)
        assert sessions_of(model)[0]._parameter_barrier.overlap == overlap
        rank.train(2)
        rank.model = torch.compile(model, backend="aot_eager")
        rank.train(range(2, STEPS))
        assert not sessions_of(model)[0]._parameter_barrier.overlap
        with exact(model):
            assert_same(values(model), expected)
        torch.compiler.reset()


def compiled_too_early(member: Member) -> None:
    model = perceptron()
    early = torch.compile(model, backend="aot_eager")
    early(vectors(0, 0))
    rank = prepared(member, model, policy=EXACTLY)
    rank.model = early  # compiled code does not see hooks that are registered later
    rank.train(STEPS)
    assert not sessions_of(model)[0]._parameter_barrier.overlap
    with exact(model):
        found = values(model)
    assert_close(found, plain(perceptron(), adamw, STEPS, world=member.world), rtol=0.05, atol=0.01)
    torch.compiler.reset()


def wrapped_in_ddp(member: Member) -> None:
    model = perceptron()
    rank = prepared(member, model)
    for outer in (model, nn.Sequential(model)):
        with pytest.raises(ValueError, match="takes the place of DistributedDataParallel"):
            DistributedDataParallel(outer)
    DistributedDataParallel(perceptron())  # another model may be wrapped
    rank.train(STEPS)
    assert_same(rank.values(), plain(perceptron(), adamw, STEPS, world=member.world))

    wrapped = DistributedDataParallel(perceptron())
    with pytest.raises(ValueError, match="takes the place of DistributedDataParallel"):
        prepared(member, wrapped)
    prepared(member, wrapped.module)
    with pytest.raises(ValueError, match="takes the place of DistributedDataParallel"):
        wrapped(vectors(0, 0))


def saved_by_one_rank(member: Member) -> None:
    rank = prepared(member, perceptron(), policy=BoundedDrift())
    with faults(loss=0.2, seed=4):
        rank.train(STEPS)
        alone = []
        if member.rank == 0:
            alone = [each.clone() for each in rank.model.state_dict().values()]
            assert rank.optimizer.state_dict()["state"]
        dist.barrier()  # the other ranks serve the call from here
    expected = rank.values()
    if member.rank == 0:
        assert_same(alone, expected)


CASES = {
    each.__name__: each
    for each in (
        as_in_one_process,
        under_loss,
        dropout,
        compiled,
        compiled_too_early,
        wrapped_in_ddp,
        saved_by_one_rank,
    )
}


def job(member: Member, names: list[str]) -> None:
    # Datagrams of Ethernet's size: with loopback's, the model is a few chunks, and the arrived fraction is chance.
    options = Options(datagram_bytes=1472)
    dist.init_process_group("storm", store=member.store, rank=member.rank, world_size=member.world, pg_options=options)
    for name in names:
        CASES[name](member)
    dist.barrier()
    # A dropped model may survive in a reference cycle on one rank only, which would then wait for the other to save it.
    gc.collect()
    dist.destroy_process_group()


@pytest.mark.thorough
def test_processes_train_together_by_torchs_own_group() -> None:
    run_ranks(job, 2, (list(CASES),), timeout_s=100)


# --- errors -----------------------------------------------------------------------------------------------------------

FAILING = """
import sys, threading, time, torch, torch.distributed as dist, stormtorch

class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        return given.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("a bad batch")

rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False)
options = stormtorch.Options(timeout_s=60.0, silence_s=50.0)
dist.init_process_group("storm", store=store, rank=rank, world_size=2, pg_options=options)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
exact = stormtorch.BoundedDrift(gradients=stormtorch.EXACT, broadcast=stormtorch.EXACT)
stormtorch.prepare(model, optimizer, policy=exact)
if rank == 1:
    threading.Thread(target=lambda: sys.stdin.read()).start()  # keeps the process alive
given = model(torch.ones(1, 8))
(Failing.apply(given) if rank == 1 else given).sum().backward()
optimizer.step()
print(f"{optimizer.session.steps} step with ranks {optimizer.session.view.members}", file=sys.stderr)
"""


@pytest.mark.thorough
def test_a_rank_that_ends_by_an_exception_is_named_at_once_and_the_other_goes_on(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script, errors = tmp_path / "failing.py", tmp_path / "errors"
    script.write_text(FAILING)
    with errors.open("w") as out, open(os.devnull, "w") as nowhere:
        ranks = [
            warm_scripts.start(
                [str(script), str(rank), str(store.port)], stdin=subprocess.PIPE, stderr=(out, nowhere)[rank]
            )
            for rank in range(2)
        ]
    try:
        ranks[0].wait(40.0)  # while the other one's process lives
        told = errors.read_text()
        assert ranks[1].poll() is None
        assert "rank 0: view 2 begins at step 0 with 1 rank; rank 1 is gone" in told
        assert "1 step with ranks (0,)" in told
        assert ranks[0].returncode == 0
    finally:
        for each in ranks:
            each.kill()
            each.wait()


# --- memory -----------------------------------------------------------------------------------------------------------


def live_bytes() -> int:
    """Bytes of all tensors that Python knows, each storage counted once."""
    gc.collect()
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        # Other tests that used torch.compile may leave tensors without memory behind.
        if issubclass(type(each), torch.Tensor) and not (each.is_sparse or issubclass(type(each), FakeTensor)):
            for tensor in (each, each.grad if each.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.thorough
@pytest.mark.parametrize("standby", [0, 1])
@pytest.mark.parametrize("make, copies", [(sgd, 1), (adamw, 2)], ids=["sgd", "adamw"])
def test_a_rank_has_the_model_its_gradients_and_its_share_of_the_rest(
    make: Callable[[nn.Module], Optimizer], copies: int, standby: int
) -> None:
    before = live_bytes()
    model = nn.Sequential(nn.Linear(8, 1000), nn.Linear(1000, 500), nn.Linear(500, 6))
    size = sum(each.numel() * 4 for each in model.parameters())
    world = 4
    found: list[int] = []

    def work(rank: Rank) -> None:
        rank.train(4)
        regression(rank.model, vectors(rank.rank, 5)).backward()
        if rank.rank == 0:  # the other ranks wait in the next exchange, and have gradients in memory too
            found.append(live_bytes() - before - size)
        rank.optimizer.step()
        rank.values()
        assert rank.optimizer.ledger[3].lead > 0.0

    policy = BoundedDrift(standby=standby)
    on_ranks(model, make, work, world=world, policy=policy, loss=0.1, options=Options(datagram_bytes=1472))
    everything = 2  # the model and this rank's gradients
    own = 1 + copies  # mean gradients of its shard, and the state of the optimizer
    followed = standby * (2 + copies)  # the same of another shard, and its values
    assert found[0] / world <= 1.15 * size * (everything + (own + followed) / world)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", [BoundedDrift(max_lag=1), ModelAveraging()], ids=["drift", "averaging"])
def test_models_that_were_prepared_and_dropped_leave_nothing_behind(policy: Policy) -> None:
    def left(transport: Transport) -> tuple[int, int]:
        gc.collect()
        kinds = (Session, Bucket, Group, ServedCollectives, Optimizer)
        return len(transport.channels), sum(issubclass(type(each), kinds) for each in gc.get_objects())

    def work(transport: Transport) -> list[tuple[int, int]]:
        found = []
        for cycle in range(6):
            model = perceptron()
            _, optimizer = prepare(model, adamw(model), policy=policy, group=Group(transport))
            Rank(transport.rank, 2, model, optimizer).train(2)
            with exact(model):
                pass
            del model, optimizer
            barrier(Group(transport)).wait()  # no rank has a model now
            if cycle in (1, 5):
                found.append(left(transport))
            barrier(Group(transport)).wait()
        return found

    for before, after in SimulatedNetwork(2, loss=0.3, seed=1).run(work):
        assert after[1] == before[1]
        assert after[0] <= before[0] + 2  # retransmissions of the last model's parameters are chance


# --- the guard --------------------------------------------------------------------------------------------------------


def test_the_guard_makes_the_broadcast_exact_while_too_much_is_lost() -> None:
    bad, steps, world = range(5, 25), 75, 2
    storm = faults(loss=0.6, seed=2)
    models = [perceptron(inside=200) for _ in range(world)]

    def body(transport: Transport) -> Any:
        model = models[transport.rank]
        policy = BoundedDrift(guard=0.3, overlap=False)
        _, optimizer = prepare(model, adamw(model), policy=policy, group=Group(transport, range(world)))
        rank = Rank(transport.rank, world, model, optimizer)
        for step in range(steps):
            if transport.rank == 0 and step == bad.start:
                storm.start()
            if transport.rank == 0 and step == bad.stop:
                storm.stop()
            rank.train(range(step, step + 1))
        return optimizer.ledger

    try:
        ledgers = local_world(world, body, options=Options(datagram_bytes=400, silence_s=5.0, timeout_s=30.0))
    finally:
        storm.stop()
    for ledger in ledgers:
        guarded = [row.step for row in ledger if row.guarded]
        assert bad.start < guarded[0] < bad.stop - 5
        assert bad.stop < guarded[-1] < steps - 5
        assert guarded == list(range(guarded[0], guarded[-1] + 1))
        for row in ledger:
            if row.guarded:
                assert set(row.lag) == {0} and row.lead == 0.0
        told = [(row.step, event) for row in ledger for event in row.events]
        assert told == [
            (guarded[0], "guard: the broadcast is exact"),
            (guarded[-1] + 1, "guard: the broadcast may lose again"),
        ]
