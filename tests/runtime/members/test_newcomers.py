# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""A joining or rejoining process continues like the other ranks, including the optimizer's auxiliary state."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from returning import with_a_rank_that_returns
from stormtorch import EXACT, BoundedDrift, GradientAveraging, prepare
from stormtorch.collectives import Group
from stormtorch.exchange.exchange import Transport
from stormtorch.runtime.members.auxiliary_state import AuxiliaryState
from survey_cases import Loop, Subject, judge
from survey_idioms import IDIOMS
from survey_optimizers import step
from training import Optimizer, perceptron
from views import EXACTLY

EVERYWHERE = GradientAveraging(reliability=EXACT, give_up_s=20.0)


class Counting(torch.optim.SGD):
    """Steps become shorter with a count that a subclass stores in some place."""

    def count(self) -> float:
        """Counts a step."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Steps."""
        length = 0.2 / self.count()
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.add_(each.grad, alpha=-length)


class InAttribute(Counting):
    """Counts in an attribute, as many user optimizers do."""

    t = 0

    def count(self) -> float:
        """Counts a step."""
        self.t += 1
        return self.t


class InState(Counting):
    """Counts in `state`, as MADGRAD does."""

    def count(self) -> float:
        """Counts a step."""
        state: dict[Any, Any] = self.state
        if "k" not in state:
            state["k"] = torch.tensor([0])
        state["k"] += 1
        return float(state["k"])


class Clock:
    """Counts."""

    def __init__(self) -> None:
        self.ticks = [0]


class InObject(Counting):
    """Counts in an object, as momentum schedules do."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.clock = Clock()

    def count(self) -> float:
        """Counts a step."""
        self.clock.ticks[0] += 1
        return self.clock.ticks[0]


class InSet(Counting):
    """Has state that cannot be sent."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.seen: set[int] = set()

    def count(self) -> float:
        """Counts a step."""
        self.seen.add(len(self.seen))
        return len(self.seen)


class InTensors(torch.optim.SGD):
    """Keeps momentum in a separate dictionary."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.momentum: dict[Any, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Steps."""
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    kept = self.momentum.setdefault(each, torch.zeros_like(each))
                    each.sub_(kept.mul_(0.9).add_(each.grad), alpha=0.05)


def subject(kind: Any, policy: Any) -> Subject:
    def make(model: nn.Module) -> Sequence[Optimizer]:
        return [kind(model.parameters(), lr=0.1)]

    return Subject(kind.__name__, make, step, policy=policy)


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["one joins", "one returns"])
@pytest.mark.parametrize("kind", [InAttribute, InState, InObject])
def test_counts_come_to_a_new_process(kind: Any, case: str) -> None:
    assert judge(subject(kind, EXACTLY), case) == ("same bits", "")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [InAttribute, InState, InObject])
def test_counts_come_to_a_new_process_where_every_rank_has_all(kind: Any) -> None:
    assert judge(subject(kind, EVERYWHERE), "one joins") == ("same bits", "")


@pytest.mark.thorough
def test_tensors_by_parameter_come_to_a_new_process_where_every_rank_has_all() -> None:
    assert judge(subject(InTensors, EVERYWHERE), "one joins") == ("same bits", "")


@pytest.mark.thorough
@pytest.mark.parametrize("policy", [EXACTLY, EVERYWHERE], ids=["owners", "everywhere"])
def test_what_cannot_be_sent_is_named(policy: Any) -> None:
    verdict, words = judge(subject(InSet, policy), "one joins")
    assert verdict == "documented"
    assert "InSet keeps 'seen' beside the state of parameters, which cannot be sent" in words


@pytest.mark.pure
@pytest.mark.parametrize("case", ["3 ranks", "one killed"])
@pytest.mark.parametrize("kind", [InAttribute, InState, InObject])
def test_counts_are_counted_once_where_a_standby_repeats_steps(kind: Any, case: str) -> None:
    assert judge(subject(kind, EXACTLY), case) == ("same bits", "")


def test_a_new_process_is_told_what_only_its_program_can_know() -> None:
    verdict, words = judge(IDIOMS["Lookahead by hand"], "one joins")
    assert verdict == "documented"
    assert "what the program itself keeps, as schedulers, averages or slow weights, comes along only by" in words


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["one joins", "one returns"])
def test_parameters_that_the_others_have_frozen_are_frozen_in_a_new_process(case: str) -> None:
    def freeze_once(c: Loop, number: int) -> None:
        if number == 0:  # a new process never makes this step
            next(c.model.parameters()).requires_grad_(False)
        step(c, number)

    def make(model: nn.Module) -> Sequence[Optimizer]:
        return [torch.optim.SGD(model.parameters(), lr=0.05)]

    assert judge(Subject("frozen", make, freeze_once), case) == ("same bits", "")


# --- what is found ----------------------------------------------------------------------------------------------------


def stepped(optimizer: Any, change: Callable[[Any], object]) -> AuxiliaryState:
    auxiliary_state = AuxiliaryState(optimizer, [each for group in optimizer.param_groups for each in group["params"]])
    auxiliary_state.before_step()
    change(optimizer)
    auxiliary_state.after_step()
    return auxiliary_state


def sgd() -> Any:
    return torch.optim.SGD(perceptron().parameters(), lr=0.1)


@pytest.mark.pure
def test_only_what_a_step_changes_travels() -> None:
    giver, taker = sgd(), sgd()
    giver.rank, giver.t, giver.means = 0, 1, {"loss": torch.zeros(()), "all": [1.0, None]}
    taker.rank, taker.t = 1, 0

    def change(optimizer: Any) -> None:
        optimizer.t += 1
        optimizer.means["loss"].fill_(0.1)
        optimizer.late = True

    message = stepped(giver, change).reported(whole=False)
    assert AuxiliaryState(taker, []).take(message) == []
    assert (taker.rank, taker.t, taker.late) == (1, 2, True)
    assert taker.means == {"loss": torch.tensor(0.1), "all": [1.0, None]}


@pytest.mark.pure
def test_who_has_taken_numbers_gives_them_to_the_next() -> None:
    first, second, third = sgd(), sgd(), sgd()
    known = AuxiliaryState(second, [])
    known.take(stepped(first, lambda each: setattr(each, "begun", True)).reported(whole=False))
    AuxiliaryState(third, []).take(known.reported(whole=False))
    assert third.begun


@pytest.mark.pure
def test_large_tensors_travel_only_where_every_rank_has_all() -> None:
    auxiliary_state = stepped(sgd(), lambda each: setattr(each, "room", torch.ones(5)))
    taker = sgd()
    assert AuxiliaryState(taker, []).take(auxiliary_state.reported(whole=False)) == ["room"]
    assert AuxiliaryState(taker, []).take(auxiliary_state.reported(whole=True)) == []
    assert taker.room.sum() == 5.0


@pytest.mark.pure
def test_nothing_of_the_object_itself_can_be_replaced_from_outside() -> None:
    giver, taker = sgd(), sgd()
    auxiliary_state = stepped(giver, lambda each: None)
    auxiliary_state._changed = {(("name", "param_groups"),): None, (("name", "__class__"),): None}
    auxiliary_state._values = lambda: dict.fromkeys(auxiliary_state._changed, 5)  # type: ignore[method-assign]
    assert AuxiliaryState(taker, []).take(auxiliary_state.reported(whole=False)) == ["param_groups", "__class__"]
    assert type(taker) is torch.optim.SGD and len(taker.param_groups) == 1


def given(what: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Arguments of `prepare`, of which one differs from the job's."""
    model = perceptron(inside=16 if what == "model" else 24)
    if what == "frozen":
        next(model.parameters()).requires_grad_(False)
    kind = torch.optim.Adagrad if what == "optimizer" else torch.optim.SGD
    return model, kind(model.parameters(), lr=0.05), BoundedDrift(max_lag=4 if what == "policy" else None)


@pytest.mark.parametrize("what", ["model", "frozen", "optimizer", "policy", "averaging policy"])
def test_newcomer_with_something_else_is_refused_and_the_others_go_on(what: str) -> None:
    """Regression: once only the first processes were compared; later ones trained other models or died obscurely."""

    def begin(transport: Transport, _again: bool = False, what: str = "", **more: Any) -> tuple[Any, Any]:
        model, optimizer, policy = given(what)
        chosen = GradientAveraging(**more) if averaging else policy
        return prepare(model, optimizer, policy=chosen, group=Group(transport))

    def step(model: Any, optimizer: Any) -> None:
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def in_vain(transport: Transport) -> None:
        named = {"frozen": "model", "averaging policy": "policy"}.get(what, what)
        with pytest.raises(ValueError, match=f"rank 2 joins a running job with another {named} than the job's"):
            step(*(begin(transport, reliability=EXACT) if averaging else begin(transport, what=what)))

    averaging = what == "averaging policy"
    found = with_a_rank_that_returns(begin, step, lambda model: next(model.parameters()).sum().item(), before=in_vain)
    assert len(set(found)) == 1
