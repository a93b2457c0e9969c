"""The parameter barrier alone: each module waits for its own parameters, and no others, once, before it runs."""

import copy
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch.collectives import Group, broadcast
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.exchange.waiting import serves_collectives
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.layout import plan
from stormtorch.runtime.session.parameter_barrier import ParameterBarrier

pytestmark = pytest.mark.pure

ONE_EACH = 1.0
"""Bytes after which a bucket is closed: every parameter has a bucket of its own."""


def buckets_of(model: nn.Module, bucket_bytes: float = ONE_EACH) -> list[Bucket]:
    parameters = [each for each in model.parameters() if each.requires_grad]
    layouts = plan([each.numel() for each in parameters], 4, bucket_bytes, 1, whole=False)
    return [Bucket(index, layout, parameters, 0) for index, layout in enumerate(layouts)]


def three_layers() -> nn.Sequential:
    """Six parameters. Buckets are numbered from the end: the first layer's weight is in bucket 5."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))


class Diary:
    """Records which buckets a barrier received, and how often it completed."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.passed = 0
        self.on_receive: Callable[[Bucket], object] = lambda bucket: None

    def receive(self, bucket: Bucket) -> None:
        self.received.append(bucket.index)
        self.on_receive(bucket)

    def pass_by(self) -> None:
        self.passed += 1


def barrier_of(
    model: nn.Module, *, overlap: bool = True, bucket_bytes: float = ONE_EACH
) -> tuple[ParameterBarrier, Diary]:
    diary = Diary()
    return ParameterBarrier(
        model, buckets_of(model, bucket_bytes), diary.receive, diary.pass_by, overlap=overlap
    ), diary


def passage(barrier: ParameterBarrier, diary: Diary) -> tuple[bool, int]:
    """Whether the barrier is open, and how often it completed."""
    return barrier.is_open, diary.passed


# --- which buckets are waited for, and when ---------------------------------------------------------------------------


def test_a_gate_is_open_before_the_first_step() -> None:
    model = three_layers()
    barrier, diary = barrier_of(model)
    assert barrier.is_open
    model(torch.ones(1, 4))
    barrier.open()
    assert diary.received == []
    assert diary.passed == 0


def test_a_layer_waits_for_its_own_parameters_before_it_runs_and_for_no_others() -> None:
    model = three_layers()
    barrier, diary = barrier_of(model)
    barrier.close()
    assert passage(barrier, diary) == (False, 0)
    assert diary.received == []
    model[0](torch.ones(1, 4))
    assert diary.received == [5, 4]
    model[4](torch.ones(1, 5))
    assert diary.received == [5, 4, 1, 0]
    assert passage(barrier, diary) == (False, 0)
    model[2](torch.ones(1, 5))
    assert diary.received == [5, 4, 1, 0, 3, 2]
    assert passage(barrier, diary) == (True, 1)


def test_a_forward_receives_in_the_order_in_which_layers_run() -> None:
    model = three_layers()
    barrier, diary = barrier_of(model)
    barrier.close()
    model(torch.ones(1, 4))
    assert diary.received == [5, 4, 3, 2, 1, 0]


def test_a_layer_computes_with_what_it_waited_for() -> None:
    model = three_layers()
    barrier, diary = barrier_of(model)
    diary.on_receive = lambda bucket: bucket.flat.zero_()
    barrier.close()
    assert torch.equal(model(torch.ones(3, 4)), torch.zeros(3, 2))


def test_every_bucket_is_received_once_per_step() -> None:
    model = three_layers()
    barrier, diary = barrier_of(model)
    for step in range(1, 4):
        barrier.close()
        for _ in range(3):  # as with accumulated gradients
            model(torch.ones(1, 4))
        barrier.open()
        assert sorted(diary.received) == sorted([*range(6)] * step)
        assert diary.passed == step


def test_open_without_indices_waits_for_all_that_is_left_the_first_layer_first() -> None:
    model = three_layers()
    barrier, diary = barrier_of(model)
    barrier.close()
    model[2](torch.ones(1, 5))
    barrier.open()
    assert diary.received == [3, 2, 5, 4, 1, 0]
    assert diary.passed == 1


def test_open_with_indices_waits_for_these_alone() -> None:
    barrier, diary = barrier_of(three_layers())
    barrier.close()
    barrier.open([2])
    barrier.open([2, 4])
    assert diary.received == [2, 4]
    assert passage(barrier, diary) == (False, 0)


def test_parameters_that_share_a_bucket_are_waited_for_together() -> None:
    model = three_layers()
    barrier, diary = barrier_of(model, bucket_bytes=1e6)
    barrier.close()
    model[4](torch.ones(1, 5))
    assert diary.received == [0]
    assert passage(barrier, diary) == (True, 1)


def test_a_module_that_reads_its_childrens_parameters_waits_for_those_too() -> None:
    # In evaluation, MultiheadAttention gives out_proj's weight to one kernel and never calls the module out_proj.
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    barrier, diary = barrier_of(model)
    barrier.close()
    given = torch.ones(1, 3, 8)
    with torch.no_grad():
        model(given, given, given)
    assert sorted(diary.received) == [0, 1, 2, 3]
    assert barrier.is_open


def test_parameters_that_no_bucket_has_are_not_waited_for() -> None:
    model = three_layers()
    for parameter in model[2].parameters():
        parameter.requires_grad = False
    barrier, diary = barrier_of(model)
    barrier.close()
    model[2](torch.ones(1, 5))
    assert diary.received == []
    model(torch.ones(1, 4))
    assert diary.received == [3, 2, 1, 0]


# --- without overlap --------------------------------------------------------------------------------------------------


def test_without_overlap_closing_waits_for_all_and_modules_for_nothing() -> None:
    model = three_layers()
    barrier, diary = barrier_of(model, overlap=False)
    barrier.close()
    assert diary.received == [5, 4, 3, 2, 1, 0]
    assert passage(barrier, diary) == (True, 1)
    model(torch.ones(1, 4))
    assert len(diary.received) == 6
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("way", ["wrapped", "in place"])
def test_a_model_that_was_compiled_before_does_not_overlap(way: str) -> None:
    model: Any = three_layers()
    if way == "wrapped":
        model = torch.compile(model, backend="eager")
    else:
        model[0].compile(backend="eager")  # one compiled module is enough
    barrier, diary = barrier_of(model)
    assert not barrier.overlap
    barrier.close()
    assert barrier.is_open and len(diary.received) == 6


def test_compiling_a_prepared_model_waits_for_all_and_ends_the_overlap() -> None:
    model = three_layers()
    barrier, diary = barrier_of(model)
    barrier.close()
    try:
        compiled = torch.compile(model, backend="eager")
        expected = [each.clone() for each in model.parameters()]
        out = compiled(torch.ones(1, 4))
        assert barrier.is_open and sorted(diary.received) == [0, 1, 2, 3, 4, 5]
        assert all(map(torch.equal, expected, model.parameters()))
        barrier.close()
        assert passage(barrier, diary) == (True, 2)
        assert torch.equal(compiled(torch.ones(1, 4)), out)
    finally:
        torch.compiler.reset()


def test_parameters_used_behind_the_gates_back_end_the_overlap_and_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = three_layers()
    barrier, diary = barrier_of(model)
    barrier.close()
    with caplog.at_level(logging.WARNING, "stormtorch"):
        barrier.used(5)
        barrier.used(4)
    assert not barrier.overlap
    (warning,) = caplog.messages
    assert "used before they had arrived" in warning and "overlap=False" in warning
    barrier.open()
    barrier.close()
    assert passage(barrier, diary) == (True, 2)


def test_parameters_used_after_they_arrived_are_nothing_to_tell_of(caplog: pytest.LogCaptureFixture) -> None:
    model = three_layers()
    barrier, _ = barrier_of(model)
    barrier.close()
    model[0](torch.ones(1, 4))
    barrier.used(5)
    barrier.used(4)
    assert barrier.overlap and caplog.messages == []


# --- while it waits ---------------------------------------------------------------------------------------------------


def test_the_gate_is_not_open_while_the_last_bucket_arrives() -> None:
    barrier, diary = barrier_of(three_layers(), bucket_bytes=1e6)
    seen = []
    diary.on_receive = lambda bucket: seen.append(barrier.is_open)
    barrier.close()
    barrier.open()
    assert seen == [False]
    assert barrier.is_open


def test_a_rank_takes_part_in_what_others_begin_while_a_module_waits() -> None:
    model = three_layers()
    barrier, diary = barrier_of(model)
    seen = []
    diary.on_receive = lambda bucket: seen.append(serves_collectives())
    barrier.close()
    model(torch.ones(1, 4))
    assert seen == [True] * 6
    assert not serves_collectives()


def test_waiting_is_added_up_until_the_gate_closes_again() -> None:
    model = three_layers()
    barrier, diary = barrier_of(model)
    diary.on_receive = lambda bucket: time.sleep(0.01)
    barrier.close()
    model[0](torch.ones(1, 4))
    one_layer = barrier.waited_s
    assert one_layer >= 0.02
    barrier.open()
    assert barrier.waited_s >= one_layer + 0.04
    barrier.close()
    assert barrier.waited_s == 0.0


def test_an_error_of_a_bucket_goes_to_the_caller_and_the_others_can_still_be_waited_for() -> None:
    model = three_layers()
    barrier, diary = barrier_of(model)

    def fail(bucket: Bucket) -> None:
        raise RuntimeError(f"bucket {bucket.index}")

    barrier.close()
    diary.on_receive = fail
    with pytest.raises(RuntimeError, match="bucket 5"):
        model(torch.ones(1, 4))
    assert passage(barrier, diary) == (False, 0)
    diary.on_receive = lambda bucket: None
    barrier.open()
    assert diary.received == [5, 4, 3, 2, 1, 0]  # the failed exchange has ended, so it is not waited for again
    assert passage(barrier, diary) == (True, 1)


def test_after_an_error_of_the_last_bucket_nothing_is_on_its_way() -> None:
    barrier, diary = barrier_of(three_layers(), bucket_bytes=1e6)

    def fail(bucket: Bucket) -> None:
        raise RuntimeError("lost")

    diary.on_receive = fail
    barrier.close()
    with pytest.raises(RuntimeError, match="lost"):
        barrier.open()
    assert passage(barrier, diary) == (True, 0)


def test_a_copy_of_the_model_waits_as_the_model_does_and_copies_nothing_of_the_gate() -> None:
    model = three_layers()
    diary = Diary()
    lock = threading.Lock()  # which cannot be copied, nor can sockets

    def receive(bucket: Bucket) -> None:
        with lock:
            diary.receive(bucket)

    barrier = ParameterBarrier(model, buckets_of(model), receive, diary.pass_by, overlap=True)
    barrier.close()
    copied = copy.deepcopy(model)
    copied(torch.ones(1, 4))
    assert barrier.is_open and len(diary.received) == 6


# --- on a network -----------------------------------------------------------------------------------------------------


def test_a_forward_sees_what_another_rank_sent_however_late_it_comes() -> None:
    # Made before the ranks begin: they are threads, and torch's random numbers are the process's.
    models = []
    for rank in range(3):
        torch.manual_seed(rank)
        models.append(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)))

    def body(transport: Transport) -> torch.Tensor:
        model = models[transport.rank]
        buckets = buckets_of(model)
        group = Group(transport)
        coming = [broadcast(group, bucket.flat, 0) for bucket in buckets]

        def receive(bucket: Bucket) -> None:
            coming[bucket.index].wait()

        barrier = ParameterBarrier(model, buckets, receive, lambda: None, overlap=True)
        barrier.close()
        out: torch.Tensor = model(torch.ones(1, 4))
        assert barrier.is_open
        return out.detach()

    first, *others = SimulatedNetwork(3, delay_s=0.3, loss=0.3, seed=1).run(body)
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))(torch.ones(1, 4))
    torch.testing.assert_close(first, expected.detach())
    assert all(torch.equal(each, first) for each in others)
