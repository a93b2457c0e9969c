"""FSDP2 in 8 and 4 bits on real ranks: all ranks compute with the same weights, and learn about what float32 learns."""
# mypy: disable-error-code="attr-defined, no-untyped-call"

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import stormtorch
from stormtorch.backend.hooks import quantised
from stormtorch_lab.jobs.ranks import Member, run_ranks

TEXT = Path(argparse.__file__)  # a text that is long enough, and the same for one Python
RANKS, CONTEXT, STEPS = 3, 8, 80
# Bits of weights and gradients, and the number format that FSDP2 itself gathers and reduces in.
RUNS: dict[str, tuple[Any, Any, torch.dtype | None]] = {
    "plain": (32, 32, None),
    "8 bits": (8, 8, None),
    "4 bits": (4, 4, None),
    "weights of 8, gradients of 4": (8, 4, None),
    "8 bits of a model in bfloat16": (8, 8, torch.bfloat16),
}


def language_model() -> nn.Sequential:
    torch.manual_seed(0)
    # 127 rows are no multiple of three ranks: shards are padded.
    return nn.Sequential(
        nn.Embedding(128, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 127), nn.Tanh(), nn.Linear(127, 128)
    )


def sharded(world: int, mixed: torch.dtype | None = None) -> Any:
    model, mesh = language_model(), dist.init_device_mesh("cpu", (world,))
    policy = MixedPrecisionPolicy(param_dtype=mixed, reduce_dtype=mixed)
    for layer in (model[2], model[4], model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return model


class Gathered:
    """Keeps what all-gathers of weights have brought."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.each: list[torch.Tensor] = []
        inner = quantised.QuantisedAllGather.__call__

        def gather(comm: Any, output_tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            found = inner(comm, output_tensor, *args, **options)
            self.each.append(output_tensor.detach().clone())
            return found

        monkeypatch.setattr(quantised.QuantisedAllGather, "__call__", gather)


def sent_so_far() -> int:
    """Bytes that this rank has sent: as datagrams, or through memory that it shares with others."""
    group: Any = dist.group.WORLD
    health = group.group.transport.health()
    return int(sum(health[name] for name in ("bytes_sent", "shared_bytes_sent", "shelved_bytes_sent")))


def train(member: Member, weights: Any, gradients: Any, mixed: torch.dtype | None) -> dict[str, Any]:
    model = sharded(member.world, mixed)
    stormtorch.quantise(model, weight_bits=weights, gradient_bits=gradients)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.004)
    text = torch.tensor(list(TEXT.read_bytes()[:20_000]), dtype=torch.int64).clamp(max=127)
    windows = text.unfold(0, CONTEXT + 1, 1)
    batches = torch.Generator().manual_seed(1 + member.rank)
    with pytest.MonkeyPatch.context() as patch:
        gathered = Gathered(patch)
        before = sent_so_far()
        for step in range(STEPS):
            chosen = windows[torch.randint(len(windows), (16,), generator=batches)]
            nn.functional.cross_entropy(model(chosen[:, :-1]).float(), chosen[:, -1]).backward()
            if step == 0:
                first = [each.double().sum().item() for each in gathered.each]
            gathered.each.clear()
            optimizer.step()
            optimizer.zero_grad()
        sent = sent_so_far() - before
    with torch.no_grad():
        final = nn.functional.cross_entropy(model(windows[::7, :-1]).float(), windows[::7, -1]).item()
    whole = [each.full_tensor().double().sum().item() for each in model.parameters() if isinstance(each, DTensor)]
    return {"loss": final, "sent": sent, "first": first, "whole": whole}


def all_runs(member: Member) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    dist.init_process_group("storm", store=member.store, rank=member.rank, world_size=member.world)
    found = {name: train(member, *how) for name, how in RUNS.items()}
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def runs() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(all_runs, RANKS, timeout_s=200)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("8 bits", 0.01),
        ("weights of 8, gradients of 4", 0.02),
        ("4 bits", 0.04),
        ("8 bits of a model in bfloat16", 0.02),
    ],
)
def test_it_learns_about_what_float32_learns(runs: list[dict[str, dict[str, Any]]], name: str, near: float) -> None:
    plain = runs[0]["plain"]["loss"]
    assert plain < 3.6  # it has learned: knowing nothing is 4.85
    found = [of_rank[name] for of_rank in runs]
    # All ranks gather the same weights, their own shards included, and hold the same model.
    assert all(each["loss"] == found[0]["loss"] and each["whole"] == found[0]["whole"] for each in found)
    assert all(each["first"] == found[0]["first"] for each in found)
    assert found[0]["loss"] == pytest.approx(plain, rel=near)
    assert found[0]["whole"] != runs[0]["plain"]["whole"]


@pytest.mark.timeout(240)
def test_forward_and_backward_gather_the_same_weights(runs: list[dict[str, dict[str, Any]]]) -> None:
    # The inner layers are gathered again in backward, in the opposite order; the outermost stays as it is.
    gathered = runs[0]["8 bits"]["first"]
    assert len(gathered) > len(set(gathered)) >= 3


@pytest.mark.timeout(240)
def test_few_bits_are_few_bytes(runs: list[dict[str, dict[str, Any]]]) -> None:
    plain, eight, four = (runs[0][name]["sent"] for name in ("plain", "8 bits", "4 bits"))
    assert eight < 0.27 * plain and four < 0.16 * plain


def test_other_backends_models_that_are_not_sharded_and_other_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="fully_shard"):
        stormtorch.quantise(language_model())
    with pytest.raises(ValueError, match="gradient_bits must be 32, 8 or 4"):
        stormtorch.quantise(language_model(), gradient_bits=2)  # type: ignore[arg-type]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = sharded(1)
        with pytest.raises(TypeError, match='needs a group of the backend "storm", got gloo'):
            stormtorch.quantise(model)
        with pytest.raises(TypeError, match='needs a group of the backend "storm", got gloo'):
            quantised.QuantisedAllGather(torch.int8)(torch.empty(2), torch.empty(2), dist.group.WORLD)
    finally:
        dist.destroy_process_group()
