# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""A standby also replicates the program's changes outside `step`: if a rank dies, its shard keeps the same bits."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stormtorch import EXACT, BoundedDrift, prepare
from stormtorch_lab.jobs.ranks import Member as Process
from stormtorch_lab.jobs.ranks import run_ranks
from training import (
    Optimizer,
    adamw,
    assert_close,
    assert_same,
    mean_gradients,
    perceptron,
    regression,
    sgd,
    values,
    vectors,
)
from views import EXACTLY, Member, all_same, with_members

pytestmark = pytest.mark.pure

WORLD, AT, STEPS = 3, 5, 9


class Counting(torch.optim.Optimizer):
    """Adam that counts steps in an attribute and adds weight decay to the gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        self.t = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as users write it
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.t += 1
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                each.grad.add_(each, alpha=0.1)
                moments = self.state[each]
                first = moments.setdefault("first", torch.zeros_like(each))
                second = moments.setdefault("second", torch.zeros_like(each))
                first.lerp_(each.grad, 0.1)
                second.lerp_(each.grad * each.grad, 0.05)
                unbiased = second / (1 - 0.95**self.t)
                each.sub_(first / (1 - 0.9**self.t) / (unbiased.sqrt() + 1e-8), alpha=group["lr"])


def counting(model: nn.Module) -> Optimizer:
    return Counting(model.parameters())


class Noisy(torch.optim.SGD):
    """SGD with noise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as users write it
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.add_(torch.randn_like(each), alpha=0.1)
        super().step()


class Shrinking(torch.optim.SGD):
    """SGD that shrinks parameters after the step of its base class."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as users write it
        super().step()
        for group in self.param_groups:
            for each in group["params"]:
                each.mul_(0.95)


def shrinking(model: nn.Module) -> Optimizer:
    torch.optim.SGD([torch.zeros(1)])  # from now on, torch calls hooks in the step of the base class, too
    return Shrinking(model.parameters(), lr=0.05, momentum=0.9)


def noisy(model: nn.Module) -> Optimizer:
    return Noisy(model.parameters(), lr=0.05, momentum=0.9)


def nothing(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class Program:
    """A variant of a training loop; the same functions run on a rank and in a plain process."""

    make: Callable[[nn.Module], Optimizer] = adamw
    before: Callable[[nn.Module, Optimizer], None] = nothing
    """Called before `prepare`."""
    begin: Callable[[nn.Module, Optimizer], None] = nothing
    """Called after `prepare`."""
    after: Callable[[nn.Module, Optimizer, int], None] = nothing
    """Called after every step, with its number."""
    closure: bool = False


def step(program: Program, model: nn.Module, optimizer: Optimizer, number: int, compute: Callable[[], Any]) -> None:
    if program.closure:
        optimizer.step(compute)
    else:
        compute()
        optimizer.step()
    program.after(model, optimizer, number)
    optimizer.zero_grad()


def shrink_data(model: nn.Module, *_: Any) -> None:
    for each in model.parameters():
        each.data.mul_(0.95)


def clamp_data(model: nn.Module, *_: Any) -> None:
    for each in model.parameters():
        each.data.clamp_(-0.1, 0.1)


def copy_data(model: nn.Module, _optimizer: Any, number: int) -> None:
    if number == 2:
        for each in model.parameters():
            each.data.copy_(torch.linspace(-1, 1, each.numel()).view(each.shape))


def assign_data(model: nn.Module, *_: Any) -> None:
    for each in model.parameters():
        each.data = each.data * 0.95


def shrink(model: nn.Module, *_: Any) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(0.95)


def clamp_in_post_hook(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.register_step_post_hook(lambda *_: clamp_data(model))


def clip_in_pre_hook(model: nn.Module, optimizer: Optimizer) -> None:
    def clip(*_: Any) -> None:
        for each in model.parameters():
            if each.grad is not None:
                each.grad.clamp_(-0.01, 0.01)

    optimizer.register_step_pre_hook(clip)


def clip_pieces_in_pre_hook(_model: nn.Module, optimizer: Optimizer) -> None:
    def clip(*_: Any) -> None:
        for group in optimizer.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.clamp_(-0.01, 0.01)

    optimizer.register_step_pre_hook(clip)


def clear_state(_model: nn.Module, optimizer: Optimizer, number: int) -> None:
    if number == 2:
        optimizer.state.clear()


def clear_state_at_last(_model: nn.Module, optimizer: Optimizer, number: int) -> None:
    if number == AT - 1:
        optimizer.state.clear()


PROGRAMS = {
    "p.data.mul_": Program(after=shrink_data),
    "p.data.clamp_": Program(after=clamp_data),
    "p.data.copy_": Program(after=copy_data),
    "p.data = ...": Program(after=assign_data),
    "p.mul_": Program(after=shrink),
    "clamp after a closure": Program(after=clamp_data, closure=True),
    "clamp in a post hook": Program(before=clamp_in_post_hook),
    "clamp in a post hook after a closure": Program(before=clamp_in_post_hook, closure=True),
    "clip in a pre hook": Program(begin=clip_in_pre_hook),
    "clip pieces in a pre hook": Program(begin=clip_pieces_in_pre_hook),
    "number of steps as an attribute": Program(make=counting),
    "decay in p.grad, by closure": Program(make=counting, closure=True),
    "step of a base class": Program(make=shrinking),
    "state.clear()": Program(make=sgd, after=clear_state),
}


def plain(program: Program, dying: dict[int, int], model: nn.Module | None = None) -> list[torch.Tensor]:
    model = copy.deepcopy(perceptron() if model is None else model)
    optimizer = program.make(model)
    program.before(model, optimizer)
    program.begin(model, optimizer)
    for number in range(STEPS):
        parts = [vectors(rank, number) for rank in range(WORLD) if number < dying.get(rank, STEPS)]
        gradients = mean_gradients(model, parts, regression)

        def compute(gradients: list[Any] = gradients) -> None:
            for each, given in zip(model.parameters(), gradients, strict=True):
                each.grad = given

        step(program, model, optimizer, number, compute)
    return values(model)


def trained(
    program: Program, dying: dict[int, int], *, policy: BoundedDrift = EXACTLY, model: nn.Module | None = None
) -> list[tuple[list[torch.Tensor], list[str]]]:
    """Values and events of every survivor."""

    def make(model: nn.Module) -> Optimizer:
        optimizer = program.make(model)
        program.before(model, optimizer)
        return optimizer

    def work(member: Member) -> tuple[list[torch.Tensor], list[str]] | None:
        program.begin(member.model, member.optimizer)
        while (number := member.session.steps) < dying.get(member.rank, STEPS):

            def compute(number: int = number) -> None:
                regression(member.model, vectors(member.rank, number)).backward()

            step(program, member.model, member.optimizer, number, compute)
            if policy is not EXACTLY and number == AT - 1:
                member.values()  # under a lossy policy, a step does not wait for data in flight to standbys
        if member.rank in dying:
            member.die()
            return None
        return member.values(), member.events()

    found = with_members(work, world=WORLD, make=make, policy=policy, model=model)
    return [each for each in found if each is not None]


ANOTHER_DIES = ["p.data.mul_", "clip in a pre hook", "number of steps as an attribute"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("program", "victim"), [*((each, 0) for each in PROGRAMS), *((each, 1) for each in ANOTHER_DIES)]
)
def test_survivors_go_on_as_a_process_that_does_the_same(program: str, victim: int) -> None:
    expected = plain(PROGRAMS[program], {victim: AT})
    for ours, events in trained(PROGRAMS[program], {victim: AT}):
        assert_same(ours, expected)
        assert not any("not equal" in each or "different" in each for each in events), events


@pytest.mark.parametrize("program", ["p.data.clamp_", "p.mul_", "clamp in a post hook"])
def test_lossy_policy_on_a_network_that_loses_nothing_follows_too(program: str) -> None:
    policy = BoundedDrift(bucket_mb=5e-4)
    for ours, _ in trained(PROGRAMS[program], {0: AT}, policy=policy):
        # Owners divide by the number of arrivals, which rounds differently.
        assert_close(ours, plain(PROGRAMS[program], {0: AT}), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("program", ["p.data.clamp_", "clamp in a post hook", "p.data = ..."])
def test_model_in_bfloat16_is_followed_as_it_is_without_a_death(program: str) -> None:
    """The death of a rank that contributes no gradients changes nothing."""

    def run(dying: dict[int, int]) -> list[torch.Tensor]:
        def work(member: Member) -> list[torch.Tensor] | None:
            PROGRAMS[program].begin(member.model, member.optimizer)
            while (number := member.session.steps) < STEPS:
                if member.rank in dying and number == dying[member.rank]:
                    member.die()
                    return None
                regression(member.model, vectors(0, number).bfloat16()).backward()
                member.optimizer.step()
                PROGRAMS[program].after(member.model, member.optimizer, number)
                member.optimizer.zero_grad()
            return member.values()

        def make(model: nn.Module) -> Optimizer:
            optimizer = adamw(model)
            PROGRAMS[program].before(model, optimizer)
            return optimizer

        found = with_members(work, world=WORLD, make=make, model=perceptron().bfloat16())
        return next(each for each in found if each is not None)

    assert_same(run({0: AT}), run({}))


def test_living_owner_gives_what_its_standby_lacks_when_a_rank_goes() -> None:
    """Momentum that is cleared after the last step is gone on every rank, however shards move."""
    program = Program(make=sgd, after=clear_state_at_last)
    for ours, _ in trained(program, {1: AT}):
        assert_same(ours, plain(program, {1: AT}))


def noise(member: Process, out: Path) -> None:
    dist.init_process_group("storm", store=member.store, rank=member.rank, world_size=member.world)
    model = perceptron()
    _, optimizer = prepare(model, noisy(model), policy=BoundedDrift(reliability=EXACT))
    torch.manual_seed(member.rank)
    state = torch.get_rng_state()
    for number in range(STEPS):
        regression(model, vectors(member.rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(torch.get_rng_state(), state), "the program's own random numbers have moved"
    events = [event for row in optimizer.ledger for event in row.events]  # type: ignore[attr-defined]  # `prepare` adds it
    torch.save((values(model), events), out / f"{member.rank}.pt")
    dist.destroy_process_group()


def test_noise_of_an_optimizer_is_the_same_on_owner_and_standby(tmp_path: Path) -> None:
    """In processes: ranks that are threads would share torch's generator."""
    run_ranks(noise, WORLD, (tmp_path,), timeout_s=100)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)]
    assert all_same([each for each, _ in found])
    for _, events in found:
        assert not any("different" in each for each in events), events


class OfItsRank(torch.optim.SGD):
    """An optimizer whose steps depend on the rank on which it runs."""

    rank = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as users write it
        super().step()
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.add_(1e-3 * OfItsRank.ranks[id(self)])

    ranks: ClassVar[dict[int, int]] = {}


def test_standby_that_cannot_repeat_steps_is_said_and_made_equal() -> None:
    def work(member: Member) -> tuple[list[str], list[torch.Tensor], list[torch.Tensor]] | None:
        OfItsRank.ranks[id(member.optimizer)] = member.rank
        member.train(STEPS)
        before = member.values()
        if member.rank == 0:
            member.die()
            return None
        return member.events(), before, member.values()

    def make(model: nn.Module) -> Optimizer:
        optimizer = OfItsRank(model.parameters(), lr=0.01)
        OfItsRank.ranks[id(optimizer)] = 0
        return optimizer

    for found in with_members(work, world=WORLD, make=make):
        if found is not None:
            events, before, after = found
            assert any("could not be repeated here" in each for each in events)
            # It was resynchronised at most some steps ago: otherwise they would be nine steps apart.
            assert max(float((one - other).abs().max()) for one, other in zip(before, after, strict=True)) < 5e-3


def test_shard_that_goes_on_from_an_unequal_standby_is_named() -> None:
    """Only rank 0 clears its optimizer's state after the last step, and dies."""

    def work(member: Member) -> list[str] | None:
        member.train(AT)
        member.optimizer.state.clear()
        if member.rank == 0:
            member.die()
            return None
        member.train(STEPS)
        return member.events()

    for events in with_members(work, world=WORLD, make=sgd):
        if events is not None:
            assert any("the shard of rank 0 goes on from a standby that was not equal to it" in each for each in events)


def test_parameter_that_lost_a_part_of_its_state_begins_anew_as_a_whole() -> None:
    """Two ranks have no standby: half of a parameter's moments are lost, and Adam must not continue from the rest."""
    policy = BoundedDrift(reliability=EXACT, bucket_mb=5e-4)

    def work(member: Member) -> tuple[list[torch.Tensor], list[torch.Tensor], Any] | None:
        member.train(30)
        before = member.values()
        if member.rank == 1:
            member.die()
            return None
        member.train(31)
        return before, member.values(), member.optimizer.state_dict()

    found = with_members(work, world=2, make=lambda model: torch.optim.Adam(model.parameters(), lr=0.01), policy=policy)
    (survivor,) = [each for each in found if each is not None]
    before, after, state = survivor
    cut = [number for number, each in state["state"].items() if float(each["step"]) == 1.0]
    assert cut, "some parameter had lost a part of its state"
    for one, other in zip(before, after, strict=True):
        # An update of a reset Adam has size lr; zero moments next to 30 steps would make it several times larger.
        assert float((one - other).abs().max()) < 0.0101
