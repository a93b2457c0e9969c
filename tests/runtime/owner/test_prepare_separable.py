# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""The trial at `prepare` finds optimizers whose updates depend on several parameters, whatever their names."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from joint_optimizers import (
    Around,
    ByTheirNumber,
    ClipsEach,
    ClipsInStep,
    DecaysByTheMean,
    FindsItsRate,
    Gathers,
    KeepsAnObject,
    SharpnessAware,
    Stacked,
)
from stormtorch import EXACT, GradientAveraging, prepare
from stormtorch.runtime.owner.separable import check_separable
from stormtorch_lab.jobs.ranks import Member, run_ranks
from training import Optimizer, Rank, assert_close, on_ranks, perceptron, plain, regression, values, vectors

pytestmark = pytest.mark.pure

JOINT: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    "a norm over all": (ClipsInStep, "looks beyond single parameters.*GradientAveraging"),
    "a mean over all, of small effect": (DecaysByTheMean, "looks beyond single parameters"),
    "their number": (ByTheirNumber, "looks beyond single parameters"),
    "a rate found from all": (FindsItsRate, "computes 'd_numerator'.*several parameters"),
    "gradients elsewhere": (SharpnessAware, "evaluates the model within a step"),
    "an object for each": (KeepsAnObject, "keeps 'projector', of the class Projection.*cannot go to another rank"),
    "one state for several": (Stacked, "give every parameter a parameter group of its own"),
    "within another": (lambda params: Around(ClipsInStep(params), "none"), "looks beyond single parameters"),
}


def network() -> nn.Sequential:
    """With two parameters of one shape, and some that a trial must make smaller."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 6))


@pytest.mark.parametrize("name", JOINT)
def test_optimizer_that_looks_beyond_its_pieces_is_refused(name: str) -> None:
    make, words = JOINT[name]
    with pytest.raises(ValueError, match=words):
        on_ranks(network(), lambda model: make(model.parameters()), lambda rank: None)


def test_it_is_right_under_the_policy_that_the_refusal_names() -> None:
    model = perceptron()

    def work(rank: Rank) -> list[torch.Tensor]:
        rank.train(6)
        return values(rank.model)

    make = lambda model: ClipsInStep(model.parameters())  # noqa: E731
    theirs = plain(model, make, 6)
    for ours in on_ranks(model, make, work, policy=GradientAveraging(reliability=EXACT)):
        assert_close(ours, theirs)


def test_stacked_state_is_right_with_a_group_for_each_parameter() -> None:
    check_separable(Stacked([{"params": [each]} for each in network().parameters()]))


@pytest.mark.parametrize(
    "make",
    [
        ClipsEach,
        lambda params: Around(torch.optim.AdamW(params), "none"),
        lambda params: type("Own", (torch.optim.Adafactor,), {})(params),
    ],
)
def test_optimizer_that_treats_each_parameter_by_itself_is_not_refused(make: Callable[[Any], Optimizer]) -> None:
    model = network()
    optimizer = make(model.parameters())
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step(lambda: 0.0)
    before = copy.deepcopy((values(model), [each.grad for each in model.parameters()], optimizer.state_dict()))
    chance = torch.get_rng_state()
    check_separable(optimizer)
    after = (values(model), [each.grad for each in model.parameters()], optimizer.state_dict())
    assert str(after) == str(before), "a trial touches nothing of the real optimizer"
    assert torch.equal(torch.get_rng_state(), chance), "nor the program's random numbers"


def gathering(member: Member) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("storm", store=member.store, rank=member.rank, world_size=member.world)
    model = perceptron()
    with pytest.raises(ValueError, match=r"Gathers calls a collective within step \(all_?reduce.*one process"):
        prepare(model, Gathers(model.parameters()))
    model, optimizer = prepare(model, Gathers(model.parameters(), begins_at=6))
    for step in range(7):

        def closure() -> torch.Tensor:
            loss = regression(model, vectors(member.rank, step))  # noqa: B023 - it is called here
            loss.backward()
            dist.all_reduce(loss.detach())  # the program's own call, as for the mean of the loss
            return loss

        if step < 6:
            optimizer.step(closure)
            optimizer.zero_grad()
            continue
        with pytest.raises(RuntimeError, match="Gathers has called all_reduce within its step"):
            optimizer.step(closure)
    dist.all_reduce(torch.ones(1))  # the step has ended, though by an exception
    dist.destroy_process_group()


def test_collectives_within_a_step_are_refused_and_those_of_a_program_are_not() -> None:
    run_ranks(gathering, 2, timeout_s=100)


def test_trials_of_two_threads_leave_the_compiler_and_the_random_numbers_as_they_were() -> None:
    began, other_began, ended = threading.Event(), threading.Event(), threading.Event()

    class First(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if not began.is_set():
                began.set()
                other_began.wait(0.5)
            return super().step(closure)

    class Second(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            other_began.set()
            ended.wait(0.5)
            return super().step(closure)

    def first() -> None:
        check_separable(one)
        ended.set()

    def second() -> None:
        began.wait(5.0)
        check_separable(other)

    one = First(nn.Linear(4, 4).parameters(), lr=0.1)
    other = Second(nn.Linear(4, 4).parameters(), lr=0.1)
    stance, numbers = torch._dynamo.eval_frame._stance, torch.get_rng_state()
    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch._dynamo.eval_frame._stance == stance and stance.stance == "default"
    assert torch.equal(torch.get_rng_state(), numbers)
