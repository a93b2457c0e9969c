# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Optimizers as people write and use them: classes with other bases, their state, compiled steps."""

import abc
import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from stormtorch import prepare
from stormtorch.collectives import Group
from stormtorch.exchange.simulated import SimulatedNetwork, SimulatedTransport
from stormtorch.runtime.members import distributed_checkpoint
from survey_cases import Loop, Subject, judge
from survey_idioms import IDIOMS
from training import perceptron, regression, values, vectors
from views import EXACTLY, OPTIONS

pytestmark = pytest.mark.pure

T = TypeVar("T")
SGD = torch.optim.SGD


class Named(Protocol):
    """A protocol with a name."""

    name: str


class Slots:
    """Has no `__dict__`."""

    __slots__ = ("room",)


class Abstract(abc.ABC, SGD):
    """As all optimizers of pytorch_optimizer."""


class Typed(Generic[T], SGD):
    """Generic before the optimizer."""


class Fulfilling(Named, SGD):
    """A protocol before the optimizer."""

    name = "one"


class Narrow(Slots, SGD):
    """With slots."""


class Below(Abstract):
    """A subclass that uses the step of its base class."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Steps."""
        return super().step(closure)


def trained(
    make: Callable[[nn.Module], torch.optim.Optimizer], use: Callable[[nn.Module, Any], object] = lambda *_: None
) -> dict[int, Any]:
    """Trains three ranks. Returns the parameters of each, and what `use` has returned after two steps."""
    begun, found = perceptron(), dict[int, Any]()

    def body(transport: SimulatedTransport) -> None:
        model = copy.deepcopy(begun)
        optimizer = make(model)
        prepare(model, optimizer, policy=EXACTLY, group=Group(transport))
        for step in range(4):
            regression(model, vectors(transport.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                used = use(model, optimizer)
        found[transport.rank] = values(model), used

    SimulatedNetwork(3, options=OPTIONS).run(body)
    return found


@pytest.mark.parametrize("kind", [Abstract, Typed, Fulfilling, Narrow, Below])
def test_classes_with_other_bases_before_the_optimizer_are_prepared(kind: Any) -> None:
    found = trained(lambda model: kind(model.parameters(), lr=0.05, momentum=0.9))
    expected = trained(lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9))
    for rank, (got, _) in found.items():
        assert all(map(torch.equal, got, expected[rank][0]))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["3 ranks", "one killed"])
@pytest.mark.parametrize(
    "name", ["optimizer.state[p] = {}", "optimizer.state.pop(p)", "optimizer.state = defaultdict(dict)"]
)
def test_state_that_is_set_or_removed_by_parameter_begins_anew(name: str, case: str) -> None:
    assert judge(IDIOMS[name], case) == ("same bits", "")


def test_state_of_a_whole_parameter_can_be_set() -> None:
    def double(model: nn.Module, optimizer: Any) -> None:
        state = optimizer.state_dict()["state"]
        for number, each in enumerate(model.parameters()):
            optimizer.state[each] = {
                name: 2 * value if value.dim() else value.clone() for name, value in state[number].items()
            }
        assert isinstance(pickle.loads(pickle.dumps(optimizer.state)), dict)

    def load(_model: nn.Module, optimizer: Any) -> None:
        whole = optimizer.state_dict()
        for state in whole["state"].values():
            state.update({name: 2 * value for name, value in state.items() if value.dim()})
        optimizer.load_state_dict(whole)

    for one, other in zip(trained(adam, double).values(), trained(adam, load).values(), strict=True):
        assert all(map(torch.equal, one[0], other[0]))


def test_state_of_a_parameter_cannot_be_read_and_the_error_says_what_can() -> None:
    def read(model: nn.Module, optimizer: Any) -> str:
        with pytest.raises(RuntimeError) as found:
            optimizer.state[next(model.parameters())]["exp_avg"]
        with pytest.raises(RuntimeError, match="gathers"):
            optimizer.state.get(next(model.parameters()))
        return str(found.value)

    assert all("optimizer.state_dict() gathers" in words for _, words in trained(adam, read).values())


def test_torch_compile_calls_a_prepared_step_as_it_is() -> None:
    # The plain process may step by torch's compiled code, which rounds differently.
    assert judge(IDIOMS["torch.compile of optimizer.step"], "2 ranks")[0] in ("same bits", "rounding")


def test_a_parameter_without_gradient_and_an_empty_group_do_not_matter() -> None:
    def nanochats(model: nn.Module) -> torch.optim.Optimizer:
        lists = list(model.parameters()), [nn.Parameter(torch.ones(4, 4))], list[nn.Parameter]()
        return torch.optim.Adam([{"params": each} for each in lists], lr=0.01)

    for one, other in zip(trained(nanochats).values(), trained(adam).values(), strict=True):
        assert all(map(torch.equal, one[0], other[0]))


class AllAtOnce(torch.optim.Optimizer):
    """Assumes that all parameters have gradients, like optimizers that stack them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Steps."""
        for group in self.param_groups:
            torch._foreach_add_(group["params"], [each.grad for each in group["params"]], alpha=-group["lr"])


def test_an_optimizer_meets_no_parameter_without_gradient_that_is_not_the_programs() -> None:
    found = trained(lambda model: AllAtOnce(model.parameters(), {"lr": 0.05}))
    expected = trained(lambda model: SGD(model.parameters(), lr=0.05))
    for rank, (got, _) in found.items():
        assert all(map(torch.equal, got, expected[rank][0]))


class Coarse(torch.optim.Optimizer):
    """Keeps its momentum in bfloat16, or in eight bits with a scale for each row, like timm and bitsandbytes."""

    def __init__(self, parameters: Any, lr: float, bits: int) -> None:
        super().__init__(parameters, {"lr": lr, "bits": bits})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state.get(each, {})
                if group["bits"] == 16 and "mean" in state:
                    state["mean"] = state["mean"].to(torch.bfloat16)  # torch casts what it loads
                if group["bits"] == 8 and "codes" in state:
                    state["codes"] = state["codes"].to(torch.uint8)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Steps."""
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                if group["bits"] == 16:
                    mean = state.setdefault("mean", torch.zeros_like(each, dtype=torch.bfloat16))
                    mean.lerp_(each.grad.to(torch.bfloat16), 0.1)  # an error if it had become float32
                else:
                    rows = each.grad.reshape(len(each.grad), -1)
                    if not state:
                        state["codes"] = torch.full_like(each, 127, dtype=torch.uint8)
                        state["scales"] = torch.zeros(len(rows))
                    scales = state["scales"].unsqueeze(1)
                    mean = (state["codes"].view(rows.shape).float() - 127) * scales
                    mean.lerp_(rows, 0.1)
                    state["scales"] = mean.abs().amax(1) / 127
                    codes = mean / state["scales"].unsqueeze(1).clamp(min=1e-20)
                    state["codes"].copy_((codes.round() + 127).view_as(each))
                    mean = mean.view_as(each)
                each.add_(mean.float(), alpha=-group["lr"])


def loop(c: Loop, number: int) -> None:
    c.backward(number)
    c.optimizer.step()
    c.optimizer.zero_grad()
    if number == 1:
        c.optimizer.load_state_dict(c.optimizer.state_dict())


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["3 ranks", "one killed", "one joins"])
@pytest.mark.parametrize("bits", [16, 8])
def test_state_of_few_bits_goes_through_loads_and_moves(bits: int, case: str) -> None:
    subject = Subject(f"{bits} bits", lambda model: [Coarse(model.parameters(), 0.1, bits)], loop)
    assert judge(subject, case) == ("same bits", "")


@pytest.mark.parametrize("bits", [16, 8])
def test_a_checkpoint_with_state_of_few_bits_begins_a_job(bits: int) -> None:
    begun = perceptron()
    first = Coarse(begun.parameters(), 0.1, bits)
    regression(begun, vectors(0, 9)).backward()
    first.step()
    first.zero_grad()
    saved = first.state_dict()
    found: dict[int, list[torch.Tensor]] = {}

    def body(transport: SimulatedTransport) -> None:
        model = copy.deepcopy(begun)
        optimizer = Coarse(model.parameters(), 0.1, bits)
        prepare(model, optimizer, policy=EXACTLY, group=Group(transport))
        optimizer.load_state_dict(copy.deepcopy(saved))
        for step in range(3):
            regression(model, vectors(0, step)).backward()  # the same on all ranks
            optimizer.step()
            optimizer.zero_grad()
        found[transport.rank] = values(model)

    SimulatedNetwork(4, options=OPTIONS).run(body)
    for step in range(3):
        regression(begun, vectors(0, step)).backward()
        first.step()
        first.zero_grad()
    for got in found.values():
        assert all(map(torch.equal, got, values(begun)))


class ScheduleFree(torch.optim.Optimizer):
    """Trains with other parameters than it is evaluated with, and switches between them itself."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "train_mode": True, "k": 0})

    @torch.no_grad()
    def _to(self, weight: float, *, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train:
                for each in group["params"]:
                    if "z" in self.state[each]:
                        each.lerp_(self.state[each]["z"], weight)
                group["train_mode"] = train

    def eval(self) -> None:
        """Switches to the mean of the parameters."""
        self._to(1 - 1 / 0.9, train=False)

    def train(self) -> None:
        """Switches to the parameters that are trained."""
        self._to(1 - 0.9, train=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Steps."""
        for group in self.param_groups:
            assert group["train_mode"], "call train() before step()"
            group["k"] += 1
            for each in group["params"]:
                if each.grad is not None:
                    z = self.state[each].setdefault("z", each.clone())
                    each.lerp_(z, 1 / group["k"])
                    each.add_(each.grad, alpha=-group["lr"] * 0.1)
                    z.sub_(each.grad, alpha=group["lr"])


def evaluate(c: Loop, number: int) -> None:
    c.optimizer.train()
    c.backward(number)
    c.optimizer.step()
    c.optimizer.zero_grad()
    c.optimizer.eval()
    with torch.no_grad():
        seen = c.model(vectors(9, 0)).sum()
    if number % 3 == 2:  # training depends on the result of this evaluation
        c.optimizer.train()
        with torch.no_grad():
            next(c.model.parameters()).data.mul_(1 + 0.01 * seen.tanh())


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["2 ranks", "3 ranks", "one killed", "one joins"])
def test_an_optimizer_that_changes_between_modes_changes_all_ranks(case: str) -> None:
    subject = Subject("schedule-free", lambda model: [ScheduleFree(model.parameters(), 0.1)], evaluate)
    assert judge(subject, case) == ("same bits", "")


@pytest.mark.parametrize("flat", [False, True])
def test_torchs_checkpoints_take_and_load_the_whole_optimizer(flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def get(model: nn.Module, optimizer: Any) -> Any:
        return get_optimizer_state_dict(model, optimizer, options=options)

    steps = 3

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(steps):
            regression(model, vectors(0, step)).backward()  # the same on all ranks
            optimizer.step()
            optimizer.zero_grad()

    begun = perceptron()
    first = torch.optim.Adam(begun.parameters(), lr=0.01)
    train(begun, first)
    saved = copy.deepcopy(get(begun, first))
    found: dict[int, tuple[Any, list[torch.Tensor]]] = {}

    def body(transport: SimulatedTransport) -> None:
        model = copy.deepcopy(begun)
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.5)
        prepare(model, optimizer, policy=EXACTLY, group=Group(transport))
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(saved), options=options)
        again = get(model, optimizer)
        assert optimizer.session.steps == 0
        train(model, optimizer)
        found[transport.rank] = again, values(model)

    SimulatedNetwork(3, options=OPTIONS).run(body)
    train(begun, first)
    for again, got in found.values():
        assert same(again, saved)
        torch.testing.assert_close(got, values(begun))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def test_torchs_checkpoints_that_come_after_prepare_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    frame: Any = type("Frame", (), {"f_globals": {"__name__": "torch.distributed.checkpoint.state_dict"}})()
    module: Any = sys.modules["torch.distributed.checkpoint.state_dict"]
    for name in ("_get_optim_state_dict", "_load_optim_state_dict"):
        monkeypatch.setattr(module, name, getattr(module, name))  # so that it is restored afterwards
    monkeypatch.delattr(module, "_storm_taught", raising=False)
    with pytest.raises(RuntimeError, match=r"before prepare\(\), or call this again"):
        distributed_checkpoint.check_patched_before(frame)
    distributed_checkpoint.check_patched_before(frame)
