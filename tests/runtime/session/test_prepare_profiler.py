# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""What torch.profiler shows of a prepared training."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from stormtorch import BoundedDrift, ModelAveraging
from stormtorch.policies.policy import Policy
from training import Rank, on_ranks, sgd

pytestmark = pytest.mark.pure

# Two buckets: 60,000 + 200 numbers of the second layer, 30,000 + 300 of the first.
BUCKET_MB = 0.12


def profiled(policy: Policy) -> list[str]:
    """The names of our events in two steps of one rank, in order. A profiler sees only the thread that started it."""

    def steps(rank: Rank) -> None:
        rank.train(2, objective=lambda model, given: model(given).sum(), data=lambda _rank, _step: torch.ones(4, 100))

    def work(rank: Rank) -> list[str]:
        if rank.rank == 1:
            steps(rank)
            return []
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            steps(rank)
        events = [event for event in seen.events() if event.name.startswith("storm::")]
        return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]

    model = nn.Sequential(nn.Linear(100, 300), nn.Linear(300, 200))
    return on_ranks(model, sgd, work, policy=policy, world=2)[0]


def of_a_step(sizes: list[str]) -> list[str]:
    """Gradients are sent in the order of backward, parameters in the order of forward."""
    numbers = range(len(sizes))
    return [
        *(f"storm::reduce_scatter bucket {number}, {sizes[number]}" for number in numbers),
        *(f"storm::reduce_scatter wait bucket {number}, {sizes[number]}" for number in numbers),
        *(f"storm::all_gather bucket {number}, {sizes[number]}" for number in reversed(numbers)),
    ]


@pytest.mark.parametrize(
    ("wire", "sizes"),
    [(torch.float32, ["0.2 MB", "0.1 MB"]), (torch.bfloat16, ["0.1 MB", "60.6 KB"])],
    ids=["float32", "bfloat16"],
)
def test_both_stages_are_shown_bucket_by_bucket_with_their_bytes(wire: torch.dtype, sizes: list[str]) -> None:
    policy = BoundedDrift(bucket_mb=BUCKET_MB, wire=wire, ownership="elements")
    waits = [f"storm::all_gather wait bucket {number}, {sizes[number]}" for number in (1, 0)]
    assert profiled(policy) == 2 * [*of_a_step(sizes), *waits]


def test_averaging_is_shown_too() -> None:
    names = profiled(ModelAveraging(bucket_mb=BUCKET_MB))
    assert names.count("storm::all_reduce bucket 0, 0.2 MB") == 2
    assert names.count("storm::all_reduce wait bucket 1, 0.1 MB") == 2
