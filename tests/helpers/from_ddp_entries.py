"""What docs/from-ddp.md says, entry by entry, on two ranks. Each rank prints a line of JSON with what it found.

Run as `from_ddp_entries.py FOLDER`, or as `from_ddp_entries.py uneven` for ranks that make different numbers of steps.
"""
# mypy: disable-error-code="no-untyped-call, attr-defined"

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.swa_utils import AveragedModel

import stormtorch

RANK = int(os.environ["RANK"])
FOUND: dict[str, Any] = {}


def new_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def prepared(model: nn.Module | None = None, lr: float = 0.05) -> tuple[Any, Any]:
    model = new_model() if model is None else model
    return stormtorch.prepare(model, torch.optim.AdamW(model.parameters(), lr=lr))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    given = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + RANK))
    return nn.functional.cross_entropy(model(given), given[:, :4].argmax(1))


def train(model: nn.Module, optimizer: Any, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten().float() for each in model.parameters()])


def same(values: torch.Tensor) -> bool:
    all_ranks = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, values)
    return all(torch.equal(each, values) for each in all_ranks)


def error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def parameters_of_rank_0() -> None:
    model, _ = prepared(new_model(seed=RANK))
    FOUND["rank 0's parameters"] = same(flat(model)) and torch.equal(flat(model), flat(new_model(0)))


def saves(folder: Path) -> None:
    model, optimizer = prepared()
    train(model, optimizer, 4)
    path = folder / "saved.pt"
    if RANK == 0:  # alone, while rank 1 trains on
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    train(model, optimizer, 2, 4)
    with stormtorch.exact(model):
        end = flat(model).clone()
    saved = torch.load(path)
    FOUND["names of the file"] = list(saved["model"]) == list(new_model().state_dict())
    plain = new_model()  # the file continues in a plain script ...
    plain.load_state_dict(saved["model"])
    torch.optim.AdamW(plain.parameters()).load_state_dict(saved["optimizer"])
    other, its_optimizer = prepared(new_model(3))  # ... and in a prepared one
    other.load_state_dict(saved["model"])
    its_optimizer.load_state_dict(saved["optimizer"])
    train(other, its_optimizer, 2, 4)
    with stormtorch.exact(other):
        FOUND["goes on"] = torch.allclose(flat(other), end, atol=1e-6)


def sharded_checkpoint(folder: Path) -> None:
    model, optimizer = prepared()
    train(model, optimizer, 3)
    state = {"model": model.state_dict()}
    dcp.save(state, checkpoint_id=folder / "dcp")
    before = flat(model).clone()
    train(model, optimizer, 3, 3)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder / "dcp")
    model.load_state_dict(state["model"])
    FOUND["torch.distributed.checkpoint"] = torch.equal(flat(model), before)


def averages() -> None:
    model, optimizer = prepared()
    ema = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    start = flat(ema.module).clone()
    train(model, optimizer, 3)
    ema.update_parameters(model)
    train(ema.module, torch.optim.SGD(ema.module.parameters(), lr=0.0), 1)  # a plain model: nothing is exchanged
    FOUND["average moves"] = not torch.equal(flat(ema.module), start)
    by_hand = copy.deepcopy(model)
    with torch.no_grad():
        for mine, theirs in zip(by_hand.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)
    FOUND["copies"] = torch.equal(flat(by_hand), flat(model))


def evaluations() -> None:
    model, optimizer = prepared()
    with stormtorch.faults(loss=0.4, seed=1):
        train(model, optimizer, 12)
        FOUND["drifts"] = not same(flat(model))
        with stormtorch.exact(model):
            FOUND["exact"] = same(flat(model))
            FOUND["exact buffers"] = same(model[1].running_mean.clone())


def unused() -> None:
    model = nn.ModuleDict({"used": nn.Linear(8, 4), "unused": nn.Linear(8, 4), "sometimes": nn.Linear(8, 4)})
    model, optimizer = stormtorch.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    for _ in range(3):
        given = torch.randn(4, 8)
        out = model["used"](given)
        if RANK == 0:
            out = out + model["sometimes"](given)
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with stormtorch.exact(model):
        moved = {name: not torch.equal(each, before[name]) for name, each in model.named_parameters()}
        FOUND["unused"] = [moved["used.weight"], moved["unused.weight"], moved["sometimes.weight"], same(flat(model))]


def accumulation() -> None:
    found = []
    for way in ("no_sync", "attribute", "neither"):
        model, optimizer = prepared(nn.Sequential(nn.Linear(8, 4)))
        model.load_state_dict({"0.weight": torch.ones(4, 8) * 0.1, "0.bias": torch.zeros(4)})
        for step in range(4):
            if way == "no_sync" and step % 2 == 0:
                with model.no_sync():
                    (loss_of(model, step) / 2).backward()
                continue
            if way == "attribute":
                model.require_backward_grad_sync = step % 2 == 1
            (loss_of(model, step) / 2).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        found.append(flat(model))
    FOUND["accumulation"] = [torch.allclose(each, found[0], atol=1e-6) for each in found]


def mixed_precision() -> None:
    model, optimizer = prepared()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, step)
        if step == 1 and RANK == 1:
            loss = loss * float("inf")  # overflows on one rank: all leave the step out
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    FOUND["scaler"] = [scaler.get_scale(), bool(flat(model).isfinite().all()), optimizer.session.steps]
    narrow, its_optimizer = prepared(new_model().bfloat16())
    for step in range(3):
        given = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
        narrow(given).float().square().mean().backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
    masters = [each["master"].dtype for each in its_optimizer.state_dict()["state"].values()]
    FOUND["masters"] = str(masters[0])


def compiled() -> None:
    for name, order in (("before", True), ("after", False)):
        model: Any = new_model()
        if order:
            model = torch.compile(model, backend="aot_eager")
        model, optimizer = prepared(model)
        run: Any = model if order else torch.compile(model, backend="aot_eager")
        before = flat(model).clone()
        train(run, optimizer, 2)
        FOUND[f"compiled {name}"] = not torch.equal(flat(model), before) and same(flat(model))
        torch.compiler.reset()


def refused() -> None:
    model, _ = prepared()
    FOUND["join"] = error_of(lambda: Join([model]))
    FOUND["model.join"] = error_of(lambda: model.join())
    FOUND["comm hook"] = error_of(lambda: model.register_comm_hook(None, None))
    plain = new_model()
    zero = ZeroRedundancyOptimizer(plain.parameters(), torch.optim.AdamW, lr=0.1)
    FOUND["zero"] = error_of(lambda: stormtorch.prepare(plain, zero))
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(new_model())
    synced, its_optimizer = prepared(synced)
    FOUND["SyncBatchNorm on a CPU"] = error_of(lambda: train(synced, its_optimizer, 1))


def logs() -> None:
    model, optimizer = prepared()
    loss = loss_of(model, 0)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    by_hand = torch.stack([each.grad.norm() for each in model.parameters()]).norm()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    FOUND["norm"] = [same(norm.clone()), same(by_hand.clone())]
    FOUND["mean loss"] = same(mean)
    FOUND["ledger"] = sorted(optimizer.ledger.summary())[:3]


def uneven() -> None:
    model, optimizer = prepared()
    train(model, optimizer, 3 if RANK == 1 else 6)
    FOUND["uneven"] = optimizer.session.steps
    FOUND["members"] = len(optimizer.session.view.members)


def entries(folder: Path) -> None:
    parameters_of_rank_0()
    saves(folder)
    sharded_checkpoint(folder)
    averages()
    evaluations()
    unused()
    accumulation()
    mixed_precision()
    compiled()
    refused()
    logs()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("storm", pg_options=stormtorch.Options(interface="lo", datagram_bytes=512, linger_s=0.5))
    if sys.argv[1] == "uneven":
        uneven()
    else:
        entries(Path(sys.argv[1]))
    print(json.dumps(FOUND), flush=True)
    dist.destroy_process_group()
