"""Simulations on a GPU: however gradients are computed there, they are the same. Skipped without one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch import EXACT, BoundedDrift, GradientAveraging, ModelAveraging
from stormtorch.network.loss import GilbertElliott
from stormtorch.policies.policy import Policy
from stormtorch_lab import simulate
from stormtorch_lab.simulation import ProgressPoint, Simulated
from stormtorch_lab.simulation.setting import Reuse
from stormtorch_lab.tasks.models.llama import Llama, LlamaSize
from stormtorch_lab.tasks.task import cross_entropy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

WORKERS, STEPS = 6, 5
LOSSLESS = BoundedDrift(gradients=EXACT, broadcast=EXACT)
POLICIES: list[Policy] = [
    BoundedDrift(),
    BoundedDrift(weights="horvitz-thompson", max_lag=3),
    ModelAveraging(),
    GradientAveraging(),
]


def pictures() -> nn.Module:
    """With buffers of its own for every worker."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 40))


def llama() -> nn.Module:
    torch.manual_seed(0)
    return Llama(LlamaSize(layers=2, width=32, heads=2))


def run(model: nn.Module, device: str = "cuda", policy: Policy | None = None, **others: Any) -> Simulated:
    words = isinstance(model, Llama)

    def batches(step: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed(step)
        if words:
            tokens = torch.randint(256, (WORKERS, 2, 17), generator=random)[first:last].to(device)
            return tokens[..., :-1], tokens[..., 1:]
        x = torch.randn(WORKERS, 4, 1, 8, 8, generator=random)[first:last].to(device)
        return x, x[..., 0, 0, 0].abs().mul(10).long().clamp(max=39)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    settings: dict[str, Any] = {"network": GilbertElliott(p=0.3, burst=4), "seed": 3, "clip": 1.0} | others
    return simulate(
        model,
        loss,
        batches,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        workers=WORKERS,
        steps=STEPS,
        device=device,
        policy=policy,
        **settings,
    )


def losses(done: Simulated) -> list[float]:
    return [loss for _, loss in done.curve]


@pytest.mark.parametrize("make", [pictures, llama])
def test_without_loss_a_gpu_finds_what_a_cpu_finds(make: Any) -> None:
    here, there = run(make(), "cpu", LOSSLESS), run(make(), "cuda", LOSSLESS)
    assert there.how == "batched"
    assert losses(there) == pytest.approx(losses(here), rel=1e-3)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("make", [pictures, llama])
def test_all_at_once_recorded_or_one_by_one_are_the_same(make: Any, policy: Policy) -> None:
    one_by_one = run(make(), policy=policy, how="loop", capture=False)
    assert one_by_one.how == "loop"
    for others in (
        {"how": "batched"},
        {"how": "batched", "capture": False},
        {"how": "loop"},
        {"at_once": 3},
        {"at_once": 4},
    ):
        found = run(make(), policy=policy, **others)
        assert losses(found) == pytest.approx(losses(one_by_one), rel=2e-3), others
        assert found.drift == pytest.approx(one_by_one.drift, rel=0.02), others


def test_fused_kernels_say_the_same_and_serve_another_simulation() -> None:
    reuse = Reuse()
    plain = run(llama())
    for _ in range(2):
        assert losses(run(llama(), fuse=True, reuse=reuse)) == pytest.approx(losses(plain), rel=2e-3)


@pytest.mark.parametrize("fuse", [False, True], ids=["not fused", "fused"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_the_same_seed_gives_the_same_bits(policy: Policy, fuse: bool) -> None:
    one, other = (run(llama(), policy=policy, fuse=fuse, deterministic=True) for _ in range(2))
    assert one.curve == other.curve and one.drift == other.drift
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_fewer_bits_are_near(precision: str) -> None:
    exactly = run(llama())
    assert losses(run(llama(), precision=precision)) == pytest.approx(losses(exactly), rel=0.02)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_who_was_interrupted_comes_to_the_same_end(policy: Policy, tmp_path: Path) -> None:
    whole = run(pictures(), policy=policy)

    def stop(spot: ProgressPoint) -> None:
        if spot.step == 3:
            raise KeyboardInterrupt

    place = tmp_path / "state.pt"
    with pytest.raises(KeyboardInterrupt):
        run(pictures(), policy=policy, checkpoint=place, advance=stop)
    assert place.exists()
    assert losses(run(pictures(), policy=policy, checkpoint=place)) == pytest.approx(losses(whole), rel=1e-4)


def test_memory_is_told_and_workers_fit_by_themselves() -> None:
    done = run(llama())
    assert done.at_once == WORKERS
    assert done.peak_bytes is not None and done.peak_bytes > 0
