# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""Personal parts of virtual workers: each trains its own, as real ranks do that prepare a model with them."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from test_simulation_replay import COUNT, REAL, STEPS, Replayed, Seen, adamw, record, targets
from torch import nn

from simulating import Given, stacked
from stormtorch import EXACT, BoundedDrift, GradientAveraging, ModelAveraging, clip_grad_norm_, exact, prepare
from stormtorch.collectives import Group
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.policies import DiLoCo
from stormtorch.policies.policy import OwnerPolicy, Policy
from stormtorch_lab import simulate
from stormtorch_lab.simulation import ProgressPoint, Simulated, exchanges
from stormtorch_lab.simulation.setting import Reuse
from training import WORLD, Loss, MakeOptimizer, assert_close, assert_same, plain, regression, sgd, values, vectors

pytestmark = pytest.mark.pure


class Net(nn.Module):
    """A body that workers share, and a head with statistics."""

    def __init__(self, *, statistics: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = nn.BatchNorm1d if statistics else nn.LayerNorm
        self.body = nn.Sequential(nn.Linear(8, 12), norm(12), nn.Tanh())
        self.head = nn.Sequential(norm(12), nn.Linear(12, 6))
        self.spare = nn.Parameter(torch.ones(3))  # unused

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(given))
        return out


def head_of(model: Any) -> list[torch.Tensor]:
    return [each.detach().clone() for each in (*model.head.parameters(), *model.head.buffers())]


def body_of(model: Any) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.body.parameters()]


class Workers:
    """A simulation with personal heads, and what each worker's model was when it was judged last."""

    def __init__(self) -> None:
        self.heads: dict[int, list[torch.Tensor]] = {}
        self.bodies: dict[int, list[torch.Tensor]] = {}

    def judge(self, model: nn.Module, worker: int) -> tuple[float, float]:
        self.heads[worker], self.bodies[worker] = head_of(model), body_of(model)
        return float(worker), 1.0

    def __call__(
        self, model: Any, make: MakeOptimizer = sgd, *, loss: Loss = regression, data: Any = vectors, **others: Any
    ) -> Simulated:
        settings: dict[str, Any] = {"workers": WORLD, "steps": STEPS, "personal": [model.head]}
        return simulate(
            model,
            loss,
            stacked(data),
            lambda parameters: make(Given(parameters)),
            evaluate=self.judge,
            **settings | others,
        )


# --- as real ranks ----------------------------------------------------------------------------------------------------


class Distance(nn.Module):
    """Gradients of the shared part depend on the personal part of the same worker, and the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ParameterList([torch.zeros(COUNT)])
        self.head = nn.Module()
        self.head.register_parameter("turn", nn.Parameter(torch.zeros(3)))
        self.head.register_buffer("mean", torch.zeros(()))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        numbers, turn, mean = self.body[0], self.head.get_parameter("turn"), self.head.get_buffer("mean")
        if self.training:
            mean.lerp_(given[:50].mean(), 0.5)
        near = (numbers - given).square() + ((2.0 + turn[0]) * numbers).sin()
        found: torch.Tensor = near.sum() / COUNT + (turn - given[:3] - mean).square().sum()
        return found


def distance(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = 50.0 * model(given)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    "policy",
    [
        BoundedDrift(guard=None, overlap=False),
        BoundedDrift(weights="horvitz-thompson", guard=None, overlap=False),
        ModelAveraging(every=3),
        GradientAveraging(),
        DiLoCo(every=2, outer_lr=0.8, momentum=0.5),
    ],
    ids=["lead", "horvitz-thompson", "models", "gradients", "diloco"],
)
def test_what_real_ranks_met_gives_the_same_personal_parts(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(transport: Transport) -> tuple[Seen, list[torch.Tensor], list[torch.Tensor]]:
        model: Any = Distance()
        optimizer: Any = adamw(model)
        prepare(model, optimizer, policy=policy, personal=[model.head], group=Group(transport))
        seen, session = Seen(), optimizer.session
        if isinstance(policy, OwnerPolicy):
            record(session._reduction.links, seen.up)
            record(session._broadcast.links, seen.down)
        else:
            record(session._averages.up, seen.up)
            record(session._averages.down, seen.down)
        for step in range(STEPS):
            distance(model, targets(transport.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        session.wait()
        with exact(model):
            return seen, head_of(model), body_of(model)

    real = SimulatedNetwork(WORLD, seed=3, loss=0.4, **REAL).run(work)
    monkeypatch.setattr(exchanges, "Masks", functools.partial(Replayed, [seen for seen, _, _ in real]))
    ours = Workers()
    ours(Distance(), adamw, loss=distance, data=targets, policy=policy, network=0.5, at_once=3)
    for worker, (_, head, body) in enumerate(real):
        assert_close(ours.heads[worker], head, rtol=1e-3, atol=2e-4)
        assert_close(ours.bodies[worker], body, rtol=1e-3, atol=2e-4)
        assert not torch.allclose(head[0], real[worker - 1][1][0], atol=0.01)


EXACTLY: dict[str, Policy] = {
    "drift": BoundedDrift(reliability=EXACT),
    "models": ModelAveraging(reliability=EXACT),
    "gradients": GradientAveraging(reliability=EXACT),
}


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("policy", EXACTLY.values(), ids=EXACTLY)
def test_workers_without_loss_train_as_real_ranks_do(policy: Policy, clip: float | None) -> None:
    models = [Net() for _ in range(WORLD)]  # here, as ranks are threads, which share torch's random numbers

    def work(transport: Transport) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = models[transport.rank]
        optimizer = sgd(model)
        prepare(model, optimizer, policy=policy, personal=[model.head], group=Group(transport))
        for step in range(STEPS):
            regression(model, vectors(transport.rank, step)).backward()
            if clip is not None:
                clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        with exact(model):
            return head_of(model), body_of(model)

    ours = Workers()
    found = ours(Net(), policy=policy, clip=clip)
    for worker, (head, body) in enumerate(SimulatedNetwork(WORLD, seed=1).run(work)):
        assert_close(ours.heads[worker], head)
        assert_close(ours.bodies[worker], body)
        assert not torch.allclose(head[2], ours.heads[(worker + 1) % WORLD][2], atol=1e-3)
        assert_same(ours.bodies[worker], ours.bodies[0])
    assert found.validations[-1] == (STEPS, 1.5, 1.0)  # the mean over workers 0 to 3


# --- alone ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [BoundedDrift(), GradientAveraging()], ids=["drift", "gradients"])
def test_with_a_frozen_personal_part_workers_train_as_plain_torch_does(policy: Policy) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))
    model[2].requires_grad_(False)
    judged: list[list[torch.Tensor]] = []

    def judge(found: nn.Module, worker: int) -> tuple[float, float]:
        judged.append(values(found))
        return 0.0, 0.0

    simulate(
        model,
        regression,
        stacked(vectors),
        lambda parameters: adamw(Given(parameters)),
        workers=WORLD,
        steps=STEPS,
        policy=policy,
        personal=[model[2]],
        evaluate=judge,
    )
    for ours in judged[-WORLD:]:
        assert_close(ours, plain(model, adamw, STEPS))


@pytest.mark.parametrize("policy", [BoundedDrift(), ModelAveraging(every=2)], ids=["drift", "models"])
def test_a_simulation_goes_on_with_each_workers_own_part_and_optimizer_state(policy: Policy, tmp_path: Path) -> None:
    def stop(spot: ProgressPoint) -> None:
        if spot.step == 5:
            raise KeyboardInterrupt

    whole, parted = Workers(), Workers()
    settings: dict[str, Any] = {"policy": policy, "network": 0.3, "clip": 1.0}
    whole(Net(), adamw, **settings)
    with pytest.raises(KeyboardInterrupt):
        parted(Net(), adamw, **settings, checkpoint=tmp_path / "state", advance=stop)
    model = Net()
    with pytest.raises(ValueError, match="belongs to another simulation: its elements is"):
        parted(model, adamw, **settings | {"personal": [model.head[1]]}, checkpoint=tmp_path / "state")
    parted(model, adamw, **settings, checkpoint=tmp_path / "state")
    for worker in range(WORLD):
        assert_same(parted.heads[worker], whole.heads[worker])


@pytest.mark.parametrize("policy", [BoundedDrift(), ModelAveraging()], ids=["drift", "models"])
def test_computed_at_once_or_one_by_one_personal_parts_end_alike(policy: Policy) -> None:
    model = Net(statistics=False)
    loop, batched = Workers(), Workers()
    loop(model, adamw, policy=policy, network=0.2, how="loop")
    found = batched(model, adamw, policy=policy, network=0.2, how="batched", at_once=3)
    assert found.how == "batched"
    for worker in range(WORLD):
        assert_close(batched.heads[worker], loop.heads[worker])
        assert not torch.allclose(loop.heads[worker][2], loop.heads[(worker + 1) % WORLD][2], atol=1e-3)


def test_a_simulation_that_reuses_another_begins_with_the_models_parts() -> None:
    model, reuse = Net(), Reuse()
    before = copy.deepcopy(model.state_dict())
    first, second, other = Workers(), Workers(), Workers()
    first(model, adamw, reuse=reuse)
    second(model, adamw, reuse=reuse)
    for worker in range(WORLD):
        assert_same(second.heads[worker], first.heads[worker])
    other(model, adamw, reuse=reuse, personal=[model.spare])  # as if heads travelled
    assert_same(other.heads[0][:4], other.heads[1][:4])
    assert_same(list(model.state_dict().values()), list(before.values()))


def test_a_simulation_that_reuses_another_may_have_other_personal_parts_of_the_same_shape() -> None:
    def ends(place: int, reuse: Reuse | None) -> list[list[torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        found: dict[int, list[torch.Tensor]] = {}

        def judge(model: nn.Module, worker: int) -> tuple[float, float]:
            found[worker] = values(model)
            return 0.0, 0.0

        def loss(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
            return (model(given) - given.sin()).square().mean()  # type: ignore[no-any-return]

        settings: dict[str, Any] = {"workers": WORLD, "steps": STEPS, "personal": [model[place]], "reuse": reuse}
        simulate(model, loss, stacked(vectors), lambda own: adamw(Given(own)), evaluate=judge, **settings)
        return list(found.values())

    reuse = Reuse()
    ends(0, reuse)
    for ours, theirs in zip(ends(2, reuse), ends(2, None), strict=True):
        assert_same(ours, theirs)


def test_personal_parameters_that_a_loss_does_not_use_stay_as_they_are() -> None:
    model = Net()
    found: list[torch.Tensor] = []

    def judge(model: nn.Module, worker: int) -> tuple[float, float]:
        found.append(model.get_parameter("spare").detach().clone())
        return 0.0, 0.0

    decays = {"personal": [model.head, model.spare], "workers": 2, "steps": 3, "evaluate": judge}
    simulate(model, regression, stacked(vectors), lambda own: torch.optim.AdamW(own, weight_decay=0.5), **decays)  # type: ignore[arg-type]
    assert_same(found, [torch.ones(3)] * len(found))


def test_slow_workers_move_their_parts_only_when_they_step() -> None:
    workers = Workers()
    model = Net()
    workers(model, policy=ModelAveraging(every=2), works=lambda _: [True, False, True, True])
    assert_same(workers.heads[1][:4], head_of(model)[:4])
    assert not torch.equal(workers.heads[2][2], head_of(model)[2])


def test_what_cannot_be_personal_is_refused() -> None:
    model = Net()
    with pytest.raises(TypeError, match=r"personal\[0\] must be a module or a parameter, got str"):
        Workers()(model, personal=["head"])
    with pytest.raises(ValueError, match=r"personal\[1\] is not part of the model"):
        Workers()(model, personal=[model.head, nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="model must have a parameter with requires_grad that is not personal"):
        Workers()(model, personal=[model])
