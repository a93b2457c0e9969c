"""A prepared model on a GPU, with several ranks on the same one. Skipped without a GPU, as on most machines."""
# mypy: disable-error-code="no-untyped-call"

import copy
from typing import Any

import pytest
import torch
from torch import nn

import stormtorch
from own_policies import Anchored, Blended, Damped
from stormtorch import (
    EXACT,
    BoundedDrift,
    DiLoCo,
    Gossip,
    GradientAveraging,
    ModelAveraging,
    Options,
    Policy,
    SparseDiLoCo,
    StreamingDiLoCo,
)
from stormtorch.collectives import Group
from stormtorch_lab import AREA, MIFA, QSDP, SALF
from stormtorch_lab.jobs.ranks import Member, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
WORLD = 4
LOSSLESS = BoundedDrift(gradients=EXACT, broadcast=EXACT, bucket_mb=0.05)


def new_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.LayerNorm(128), nn.Tanh(), nn.Linear(128, 4)]
    return nn.Sequential(*layers).to("cuda", dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 32, generator=random)
    return x.to("cuda", dtype), x[:, :4].argmax(1).to("cuda")


def train(member: Member, policy: Policy, loss: float, steps: int, how: str = "plain") -> dict[str, Any]:
    torch.cuda.set_device(0)
    options = Options(datagram_bytes=1472, interface="lo")
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    with stormtorch.connect(member.store, member.rank, member.world, options) as transport:
        model = new_model(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        scaler = torch.amp.GradScaler("cuda", enabled=how == "scaled", init_scale=2.0**10)
        personal = [model[5]] if how == "personal" else []  # type: ignore[index]
        model, optimizer = stormtorch.prepare(
            model, optimizer, policy=policy, group=Group(transport), personal=personal
        )
        if how == "pruned":
            stormtorch.prune(model, keep=0.5)
        losses = []
        with stormtorch.faults(loss=loss, seed=2):
            for step in range(steps):
                x, y = batch(member.rank, step, dtype)
                with torch.autocast("cuda", torch.float16, enabled=how == "scaled"):
                    value = nn.functional.cross_entropy(model(x).float(), y)
                scaler.scale(value).backward()
                scaler.unscale_(optimizer)
                # With a deadline, ranks that are late clip again.
                late = getattr(policy, "deadline", None) is not None
                clip = stormtorch.clip_grad_norm_ if late else torch.nn.utils.clip_grad_norm_
                clip(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                losses.append(float(value.detach()))
        with stormtorch.exact(model):
            state = {name: value.detach().cpu().tolist() for name, value in model.state_dict().items()}
        saved = optimizer.state_dict()
        return {"losses": losses, "state": state, "arrived": optimizer.ledger.summary()["arrived"], "saved": len(saved)}  # type: ignore[attr-defined]


def reference(steps: int) -> dict[str, torch.Tensor]:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        total = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank in range(WORLD):
            x, y = batch(rank, step)
            gradients = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
            for each, gradient in zip(total, gradients, strict=True):
                each += gradient
        for parameter, each in zip(model.parameters(), total, strict=True):
            parameter.grad = each / WORLD
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return copy.deepcopy({name: value.cpu() for name, value in model.state_dict().items()})


def test_without_loss_it_equals_one_process() -> None:
    expected = reference(20)
    for result in run_ranks(train, WORLD, (LOSSLESS, 0.0, 20), timeout_s=120):
        for name, value in expected.items():
            torch.testing.assert_close(torch.tensor(result["state"][name]), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("policy", "how"),
    [
        (BoundedDrift(bucket_mb=0.05), "plain"),
        (BoundedDrift(bucket_mb=0.05, wire=torch.bfloat16, max_lag=3), "plain"),
        (BoundedDrift(bucket_mb=0.05, wire=torch.int8, weights="horvitz-thompson"), "plain"),
        (BoundedDrift(bucket_mb=0.05, wire=torch.int4), "plain"),  # type: ignore[attr-defined]
        (BoundedDrift(bucket_mb=0.05), "bfloat16"),
        (BoundedDrift(bucket_mb=0.05), "scaled"),
        (ModelAveraging(bucket_mb=0.05), "plain"),
        (ModelAveraging(bucket_mb=0.05, wire=torch.int8, every=2), "plain"),
        (ModelAveraging(bucket_mb=0.05, overlap=True), "bfloat16"),
        (ModelAveraging(bucket_mb=0.05), "scaled"),
        (GradientAveraging(bucket_mb=0.05), "plain"),
        (GradientAveraging(bucket_mb=0.05, wire=torch.bfloat16), "scaled"),
        (Blended(bucket_mb=0.05), "plain"),
        (Anchored(bucket_mb=0.05, wire=torch.bfloat16), "plain"),
        (Damped(bucket_mb=0.05), "plain"),
    ],
)
def test_under_loss_it_learns_and_replicas_agree_when_exact(policy: Policy, how: str) -> None:
    results = run_ranks(train, WORLD, (policy, 0.1, 120, how), timeout_s=200)
    for result in results:
        assert sum(result["losses"][-20:]) < 0.5 * sum(result["losses"][:20])
        assert 0.85 < result["arrived"] < 0.95
        # Under a policy where each rank applies its own gradients, there is no common value.
        if not isinstance(policy, GradientAveraging):
            assert result["state"] == results[0]["state"]


@pytest.mark.parametrize(
    ("policy", "how"),
    [
        (DiLoCo(every=10, outer_lr=1.0, momentum=0.5, bucket_mb=0.05), "plain"),
        (DiLoCo(every=10, outer_lr=1.0, momentum=0.5, bucket_mb=0.05, delay=3, wire=torch.int4), "plain"),  # type: ignore[attr-defined]
        (StreamingDiLoCo(every=12, fragments=3, delay=2, outer_lr=1.0, momentum=0.5), "plain"),
        (SparseDiLoCo(every=10), "plain"),
        (Gossip(every=5, outer_lr=1.0, momentum=0.0), "plain"),
        (AREA(every=5, at_least=5, pace="together"), "plain"),
        (MIFA(every=5), "bfloat16"),
        (SALF(bucket_mb=0.05), "plain"),
        (QSDP(bucket_mb=0.05), "plain"),
        (QSDP(bucket_mb=0.05, bits=4), "plain"),
        (BoundedDrift(bucket_mb=0.05), "personal"),
        (DiLoCo(every=10, outer_lr=1.0, momentum=0.5), "personal"),
        (BoundedDrift(bucket_mb=0.05), "pruned"),
    ],
)
def test_policies_of_other_files_learn_on_a_gpu(policy: Policy, how: str) -> None:
    results = run_ranks(train, WORLD, (policy, 0.1, 120, how), timeout_s=200)
    for result in results:
        assert sum(result["losses"][-20:]) < 0.7 * sum(result["losses"][:20])
        shared = {name: value for name, value in result["state"].items() if how != "personal" or name[0] != "5"}
        assert shared.items() <= results[0]["state"].items()
        if how == "personal" and result is not results[0]:
            assert result["state"]["5.weight"] != results[0]["state"]["5.weight"]
        if how == "pruned":
            zeros = torch.tensor(result["state"]["2.weight"]) == 0
            assert zeros.float().mean() > 0.4
