# mypy: disable-error-code="no-untyped-call"
# torch's own backward is untyped.
"""The simulator without loss is plain training, whatever the model, the policy and the way to compute."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

from simulating import Data, outcome, simulated, stacked
from stormtorch import EXACT, LOSSY, BoundedDrift, GradientAveraging, ModelAveraging
from stormtorch.policies.policy import Policy
from stormtorch_lab.simulation import simulate
from stormtorch_lab.simulation.gradients import Gradients
from stormtorch_lab.simulation.parameters.chunks import Chunks
from stormtorch_lab.simulation.setting import Reuse
from training import (
    Llama,
    Loss,
    Optimizer,
    Recurrent,
    adamw,
    assert_close,
    classes,
    images,
    mean_gradients,
    next_word,
    perceptron,
    plain,
    plain_step,
    regression,
    resnet20,
    sgd,
    values,
    vectors,
    words,
)

pytestmark = pytest.mark.pure

STEPS = 4
ONE_BY_ONE, AT_ONCE = "loop", "batched"
REFERENCE: dict[str, Policy] = {
    "bounded drift, exact": BoundedDrift(gradients=EXACT, broadcast=EXACT),
    "bounded drift": BoundedDrift(),
    "by chance": BoundedDrift(weights="horvitz-thompson"),
    "model averaging, exact": ModelAveraging(reliability=EXACT),
    "model averaging": ModelAveraging(reliability=LOSSY),
    "gradient averaging, exact": GradientAveraging(reliability=EXACT),
    "gradient averaging": GradientAveraging(),
}


def plain_sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def few_words(rank: int, step: int) -> torch.Tensor:
    return words(rank, step, count=20)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [plain_sgd, adamw])
@pytest.mark.parametrize("name", [name for name in REFERENCE if "model" not in name])
@pytest.mark.parametrize("workers", [4, 5])
def test_without_loss_training_is_what_one_process_does(name: str, workers: int, make: Any) -> None:
    model = perceptron(inside=100)
    wanted = plain(model, make, STEPS, world=workers)
    for how in (ONE_BY_ONE, AT_ONCE):
        for at_once in (None, 1, 2, 3):
            settings: dict[str, Any] = {"policy": REFERENCE[name], "how": how, "at_once": at_once}
            assert_close(simulated(model, make, STEPS, workers=workers, **settings), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["model averaging, exact", "model averaging"])
@pytest.mark.parametrize("workers", [4, 5])
@pytest.mark.parametrize("how", [ONE_BY_ONE, AT_ONCE])
def test_averaged_models_of_plain_descent_are_descent_along_the_mean(name: str, workers: int, how: str) -> None:
    model = perceptron(inside=100)
    found = simulated(model, plain_sgd, STEPS, workers=workers, policy=REFERENCE[name], how=how, at_once=3)
    assert_close(found, plain(model, plain_sgd, STEPS, world=workers), rtol=1e-5, atol=1e-6)


def test_averaged_models_with_optimizers_of_their_own_are_what_separate_processes_do() -> None:
    model = perceptron(inside=100)
    alone = [copy.deepcopy(model) for _ in range(4)]
    optimizers = [adamw(each) for each in alone]
    for step in range(6):
        for rank, (each, optimizer) in enumerate(zip(alone, optimizers, strict=True)):
            plain_step(each, optimizer, mean_gradients(each, [vectors(rank, step)], regression))
        if step % 2 == 1:
            for copies in zip(*(each.parameters() for each in alone), strict=True):
                mean = torch.stack([own.detach() for own in copies]).mean(0)
                for own in copies:
                    own.data.copy_(mean)
    done, found = outcome(model, adamw, 6, policy=ModelAveraging(every=2))
    assert_close(values(found), values(alone[0]), rtol=1e-5, atol=1e-6)
    assert [row.step for row in done.ledger] == [1, 3, 5]  # those that averaged, as in a training


# --- models -----------------------------------------------------------------------------------------------------------


class WithUnused(nn.Module):
    """A layer that counts, and one that nothing depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = perceptron(), nn.Linear(3, 3)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.used(given)
        return found


def frozen() -> nn.Module:
    model = perceptron()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def of_seed(make: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = make()
    return model


MODELS: dict[str, tuple[Any, Loss, Data]] = {
    "with frozen parameters": (frozen, regression, vectors),
    "with tied weights": (Llama, next_word, words),
    "with batch norm": (resnet20, classes, images),
    "with an unused parameter": (WithUnused, regression, vectors),
    "with an LSTM": (Recurrent, next_word, few_words),
}
POLICIES: list[Policy] = [BoundedDrift(), GradientAveraging(), ModelAveraging()]


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["auto", AT_ONCE])  # the first is one by one on a CPU
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("make", [plain_sgd, adamw])
def test_every_kind_of_model_is_trained_as_by_one_process(name: str, how: str, make: Any) -> None:
    if name == "with an LSTM" and how == AT_ONCE:
        pytest.skip("torch cannot compute LSTMs of several replicas at once")
    build, objective, data = MODELS[name]
    model = of_seed(build)
    before = values(model)
    task: dict[str, Any] = {"objective": objective, "data": data}
    wanted = plain(model, make, 3, **task)
    for policy in POLICIES[: 3 if make is plain_sgd else 2]:
        found = simulated(model, make, 3, policy=policy, how=how, at_once=3, **task)
        assert_close(found, wanted, rtol=1e-4, atol=2e-5)
        # What has no gradient must not even decay.
        for parameter, one, other in zip(model.parameters(), found, before, strict=True):
            if not parameter.requires_grad or parameter.shape in ((3, 3), (3,)):
                assert torch.equal(one, other)
    assert all(torch.equal(one, other) for one, other in zip(values(model), before, strict=True))


def test_buffers_are_each_workers_own_and_their_mean_is_judged() -> None:
    model = of_seed(resnet20)
    alone = [copy.deepcopy(model) for _ in range(4)]
    for rank, each in enumerate(alone):
        classes(each, images(rank, 0))
    for how in (ONE_BY_ONE, AT_ONCE):
        _, found = outcome(model, sgd, 1, objective=classes, data=images, how=how, at_once=3)
        for name, own in found.named_buffers():
            wanted = torch.stack([each.get_buffer(name) for each in alone]).float().mean(0)
            torch.testing.assert_close(own.float(), wanted, rtol=1e-4, atol=1e-5)


def test_dropout_is_drawn_for_each_worker() -> None:
    model = nn.Sequential(nn.Linear(8, 100), nn.Dropout(0.5), nn.Linear(100, 6))
    same: Data = lambda rank, step: vectors(0, step)  # noqa: E731
    for how in (ONE_BY_ONE, AT_ONCE):
        done, _ = outcome(model, sgd, 3, data=same, how=how, policy=GradientAveraging(), network=0.3)
        assert done.how == how
        assert done.drift > 0.0
    chunks = Chunks.of(list(model.parameters()), 4, 360)
    together = Gradients(model, regression, chunks, 4, 4, torch.device("cpu"), how="batched")
    together.replicas.fill_(0.1)
    losses = together.compute(torch.stack([vectors(0, 0)] * 4), 0, 4)
    assert len(set(losses.tolist())) == 4


class Keeps(nn.Module):
    """A layer that has its parameters in a list, where replacing them does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6)
        self.kept = [self.layer.weight, self.layer.bias]

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(given, *self.kept)


@pytest.mark.parametrize("model", [Keeps(), Recurrent(), perceptron()], ids=["keeps", "lstm", "perceptron"])
def test_all_at_once_is_chosen_only_if_it_gives_the_same_gradients(model: nn.Module) -> None:
    objective, data = (next_word, few_words) if isinstance(model, Recurrent) else (regression, vectors)
    parameters = list(model.parameters())
    chunks = Chunks.of(parameters, 2, 360)
    found = {}
    for how in ("loop", "auto"):
        gradients = Gradients(model, objective, chunks, 2, 2, torch.device("cpu"), how="loop")
        gradients.how = how  # "auto" would not even try on a CPU
        for own, parameter in zip(chunks.views(gradients.replicas), parameters, strict=True):
            own.copy_(parameter.detach().expand_as(own))
        gradients.compute(torch.stack([data(worker, 0) for worker in range(2)]), 0, 2)
        found[how] = gradients.grads
    assert gradients.how == ("batched" if isinstance(model, nn.Sequential) else "loop")
    torch.testing.assert_close(found["auto"], found["loop"])
    assert float(found["auto"].norm()) > 0.0


def test_trying_out_all_at_once_draws_nothing_from_the_trainings_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(8, 100), nn.Dropout(0.5), nn.Linear(100, 6))
    chunks = Chunks.of(list(model.parameters()), 2, 360)
    losses = {}
    for how in ("batched", "auto"):
        gradients = Gradients(model, regression, chunks, 2, 2, torch.device("cpu"), how="batched")
        gradients.how = how
        gradients.replicas.fill_(0.1)
        torch.manual_seed(0)
        losses[how] = gradients.compute(torch.stack([vectors(0, 0)] * 2), 0, 2)
        assert gradients.how == "batched"
    assert torch.equal(losses["auto"], losses["batched"])


def test_the_gpu_that_is_named_is_the_current_one_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []

    class Entered:
        def __init__(self, device: torch.device) -> None:
            current.append(device)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", Entered)
    for device in ("cpu", "cuda:1", torch.device("cuda:2")):
        with pytest.raises(ValueError, match="workers"):
            simulated(perceptron(), sgd, 1, workers=0, device=device)
    assert current == [torch.device("cuda:1"), torch.device("cuda:2")]


def test_how_torch_multiplies_is_afterwards_what_it_was() -> None:
    before = torch.get_float32_matmul_precision()
    simulated(perceptron(), sgd, 1, precision="tf32")
    assert torch.get_float32_matmul_precision() == before


def test_what_is_reused_has_the_next_models_frozen_parameters() -> None:
    reuse = Reuse()
    for seed in range(2):
        model = perceptron(seed=seed)
        model[0].requires_grad_(False)
        found = simulated(model, sgd, 2, reuse=reuse, at_once=4)
        assert_close(found, plain(model, sgd, 2), rtol=1e-5, atol=1e-6)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [BoundedDrift(), GradientAveraging()])
@pytest.mark.parametrize("clip", [0.1, 0.4, 100.0])
def test_a_gradient_that_is_too_long_is_clipped_as_torch_clips_it(policy: Policy, clip: float) -> None:
    model = perceptron()
    alone = copy.deepcopy(model)
    optimizer = sgd(alone)
    for step in range(STEPS):
        gradients = mean_gradients(alone, [vectors(rank, step) for rank in range(4)], regression)
        for parameter, gradient in zip(alone.parameters(), gradients, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(alone.parameters(), clip)
        optimizer.step()
    found = simulated(model, sgd, STEPS, policy=policy, clip=clip, at_once=3)
    assert_close(found, values(alone), rtol=1e-5, atol=1e-6)


def test_models_that_are_averaged_clip_each_its_own_gradient() -> None:
    model = perceptron()
    alone = [copy.deepcopy(model) for _ in range(4)]
    for rank, each in enumerate(alone):
        regression(each, vectors(rank, 0)).backward()
        nn.utils.clip_grad_norm_(each.parameters(), 0.1)
        plain_sgd(each).step()
    wanted = [torch.stack(each).mean(0) for each in zip(*(values(one) for one in alone), strict=True)]
    assert_close(simulated(model, plain_sgd, 1, policy=ModelAveraging(), clip=0.1), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_learning_rate_is_that_of_the_step(policy: Policy) -> None:
    model = perceptron()
    once = simulated(model, plain_sgd, 1, policy=policy)
    assert_close(simulated(model, plain_sgd, 3, policy=policy, rate=lambda step: 0.0 if step else 0.05), once, rtol=0.0)
    before = values(model)
    moved = simulated(model, plain_sgd, 1, policy=policy, rate=lambda step: 0.1)
    for start, slow, fast in zip(before, once, moved, strict=True):
        torch.testing.assert_close(fast - start, 2 * (slow - start), rtol=1e-3, atol=1e-6)


def test_a_policy_may_change_from_step_to_step() -> None:
    exact, lossy = BoundedDrift(gradients=EXACT, broadcast=EXACT), BoundedDrift(lead=0.0)
    done, _ = outcome(perceptron(inside=300), sgd, 8, network=0.4, policy=lambda step: lossy if step < 4 else exact)
    rows = list(done.ledger)
    assert any(row.lag.keys() != {0} for row in rows[:4])
    assert all(row.lag.keys() == {0} and row.arrived == 1.0 for row in rows[4:])
    assert done.drift == 0.0


@pytest.mark.parametrize(
    ("knob", "given"),
    [
        ("workers", {"workers": 0}),
        ("steps", {"steps": 0}),
        ("network", {"network": "lossy"}),
        ("policy", {"policy": "lead"}),
        ("how", {"how": "vmap"}),
        ("precision", {"precision": "float16"}),
        ("clip", {"clip": 0.0}),
        ("at_once", {"at_once": 0}),
        ("evaluate_every", {"evaluate_every": 0}),
        ("redundancy", {"policy": lambda step: BoundedDrift(redundancy=1.0 if step else 0.5)}),
        ("wire", {"policy": lambda step: BoundedDrift(wire=torch.bfloat16 if step else torch.float32)}),
        ("policy", {"policy": lambda step: ModelAveraging() if step else BoundedDrift()}),
    ],
)
def test_a_setting_without_sense_is_refused_by_name(knob: str, given: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"workers": 2, "steps": 2, "evaluate": lambda model: (0.0, 0.0)} | given
    optimizer: Any = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    with pytest.raises(ValueError, match=f"{knob} must "):
        simulate(perceptron(), regression, stacked(vectors), optimizer, **settings)


def test_what_travels_in_fewer_bits_is_rounded_and_the_owners_values_are_not() -> None:
    model = perceptron()
    task: dict[str, Any] = {"objective": regression, "data": vectors}
    half = simulated(model, sgd, STEPS, policy=BoundedDrift(wire=torch.bfloat16), **task)
    whole = simulated(model, sgd, STEPS, policy=BoundedDrift(), **task)
    assert_close(half, whole, rtol=0.0, atol=0.01)
    assert all(not torch.equal(each, each.bfloat16().float()) for each in half)


@pytest.mark.parametrize("how", ["loop", "batched"])
@pytest.mark.parametrize(
    ("problem", "given"),
    [
        ("loss must give a tensor of one number .* got \\(3,\\)", {"loss": lambda model, x: model(x).square().mean(1)}),
        ("loss must give a tensor of one number .* got float", {"loss": lambda model, x: 1.0}),
        ("batches must be tensors with 2 workers .* got \\(5, 3, 4\\)", {"batches": lambda *_: torch.ones(5, 3, 4)}),
        ("batches must be tensors with 2 workers .* got NoneType", {"batches": lambda *_: (torch.ones(2, 3, 4), None)}),
        ("model must have a parameter", {"model": nn.ReLU()}),
        ("model must have float32 parameters to train, but weight is", {"model": nn.Linear(4, 4).double()}),
    ],
)
def test_a_model_loss_or_batch_that_does_not_fit_is_refused_by_name(
    problem: str, given: dict[str, Any], how: Any
) -> None:
    usual: dict[str, Any] = {
        "model": nn.Linear(4, 4),
        "loss": lambda model, x: model(x).square().mean(),
        "batches": lambda step, first, last: torch.ones(last - first, 3, 4),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }
    with pytest.raises(ValueError, match=problem):
        simulate(**usual | given, workers=2, steps=1, how=how)


def test_without_samples_drift_is_unknown_and_no_number_is_made_up() -> None:
    done, _ = outcome(nn.Linear(8, 6), sgd, 2, policy=BoundedDrift(drift_samples=0), network=0.2)
    row = done.ledger[-1]
    assert (row.pair_drift, row.owner_drift, row.update_variance) == (None, None, None)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", [BoundedDrift(), ModelAveraging(), GradientAveraging()])
@pytest.mark.parametrize("how", ["batched", "loop"])
def test_nothing_of_a_simulation_stays_when_it_is_over(policy: Policy, how: str) -> None:
    def tensors() -> int:
        gc.collect()
        return sum(type(each) in (torch.Tensor, nn.Parameter) for each in gc.get_objects())

    simulated(perceptron(), sgd, 2, policy=policy, network=0.3, how=how)  # what torch keeps is there from now on
    before = tensors()
    simulated(perceptron(), sgd, 2, policy=policy, network=0.3, how=how)
    assert tensors() <= before  # fewer, if a thread of an earlier test has let go of some meanwhile
