"""Mistakes that need ranks: each rank makes those of one scenario and prints the errors as a line of JSON.

Run as `wrong_inputs.py SCENARIO`, with the environment of torchrun.
"""
# mypy: disable-error-code="no-untyped-call, attr-defined"

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stormtorch

RANK = int(os.environ["RANK"])
WARNINGS: list[str] = []


class _Keep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        WARNINGS.append(record.getMessage())


def attempt(name: str, work: Callable[[], Any]) -> None:
    """Makes a mistake and prints the error, what was logged meanwhile, and how long it took."""
    WARNINGS.clear()
    began, error = time.monotonic(), ""
    try:
        work()
    except BaseException as found:
        error = f"{type(found).__name__}: {found}"
    seconds = time.monotonic() - began
    print(json.dumps({name: {"error": error, "warnings": list(WARNINGS), "seconds": seconds}}), flush=True)


def join_group(timeout_s: float = 30.0, **options: Any) -> None:
    given = stormtorch.Options(interface="lo", linger_s=0.2, **options)
    dist.init_process_group("storm", timeout=timedelta(seconds=timeout_s), pg_options=given)


def new_model(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# --- what all ranks do wrong alike: refused before anything is exchanged ----------------------------------------------


def refusals() -> None:
    attempt("before init_process_group", lambda: stormtorch.prepare(new_model(), sgd(new_model())))
    dist.init_process_group("gloo")
    model = new_model()
    optimizer = sgd(model)
    attempt("on gloo", lambda: stormtorch.prepare(model, optimizer))
    dist.destroy_process_group()
    join_group()
    attempt("wrong order", lambda: stormtorch.prepare(optimizer, model))
    attempt("optimizer of another model", lambda: stormtorch.prepare(new_model(), sgd(new_model())))
    attempt("policy by name", lambda: stormtorch.prepare(new_model(), optimizer, policy="lead"))  # type: ignore[arg-type]
    double = new_model().double()
    attempt("float64", lambda: stormtorch.prepare(double, sgd(double)))
    complex_model = nn.Linear(4, 4, dtype=torch.complex64)
    attempt("complex", lambda: stormtorch.prepare(complex_model, sgd(complex_model)))
    attempt("LBFGS", lambda: stormtorch.prepare(model, torch.optim.LBFGS(model.parameters())))
    table = nn.Embedding(8, 4, sparse=True)
    attempt("SparseAdam", lambda: stormtorch.prepare(table, torch.optim.SparseAdam(table.parameters())))
    frozen = new_model().requires_grad_(False)
    attempt("all frozen", lambda: stormtorch.prepare(frozen, sgd(frozen)))
    wrapped = DistributedDataParallel(new_model())
    attempt("DDP before", lambda: stormtorch.prepare(wrapped, sgd(wrapped)))
    attempt("exact without prepare", lambda: stormtorch.exact(model).__enter__())
    stormtorch.prepare(model, optimizer)
    attempt("prepare twice", lambda: stormtorch.prepare(model, optimizer))
    attempt("another optimizer", lambda: stormtorch.prepare(model, sgd(model)))
    attempt("optimizer made after prepare", lambda: step(model, sgd(model)))
    attempt("DDP after", lambda: DistributedDataParallel(model))
    attempt("model.module", lambda: model.module)
    attempt("add_param_group", lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}))
    attempt("assign", lambda: model.load_state_dict(model.state_dict(), assign=True))


def after_the_end() -> None:
    join_group()
    model = new_model()
    model, optimizer = stormtorch.prepare(model, sgd(model))
    step(model, optimizer)
    dist.destroy_process_group()
    attempt("after destroy_process_group", lambda: step(model, optimizer))


# --- what ranks do differently ----------------------------------------------------------------------------------------


def different_models() -> None:
    join_group()
    model = new_model(8 + RANK)
    attempt("different models", lambda: stormtorch.prepare(model, sgd(model)))


def never_prepared() -> None:
    join_group()
    if RANK == 0:
        time.sleep(2.0)  # rank 1 has ended by then
        model = new_model()
        attempt("never prepared", lambda: stormtorch.prepare(model, sgd(model)))
    dist.destroy_process_group()


def different_optimizers() -> None:
    join_group()
    model = new_model()
    kind: Any = torch.optim.Adam if RANK else torch.optim.SGD
    attempt("different optimizers", lambda: stormtorch.prepare(model, kind(model.parameters(), lr=0.1)))


def different_policies() -> None:
    join_group()
    model = new_model()
    policy = stormtorch.BoundedDrift(lead=float(RANK))
    attempt("different policies", lambda: stormtorch.prepare(model, sgd(model), policy=policy))


def different_rates() -> None:
    join_group()
    model = new_model()
    attempt("different learning rates", lambda: stormtorch.prepare(model, sgd(model, 0.1 + RANK)))


def different_shapes() -> None:
    join_group()
    attempt("different shapes", lambda: dist.all_reduce(torch.ones(100 + RANK)))


def different_keys() -> None:
    keys = ["0123456789abcdefghij", "abcdefghij0123456789"]
    os.environ["STORM_KEY"] = keys[RANK]
    attempt("different keys", join_group)


def key_on_one_rank() -> None:
    if RANK == 1:
        os.environ["STORM_KEY"] = "0123456789abcdefghij"
    attempt("key on one rank", join_group)


def short_key() -> None:
    if RANK == 1:
        os.environ["STORM_KEY"] = "secret"
    attempt("short key", join_group)


def unknown_interface() -> None:
    def work() -> None:
        if RANK == 1:
            os.environ["STORM_SOCKET_IFNAME"] = "nosuch0"
        dist.init_process_group("storm", timeout=timedelta(seconds=30))

    attempt("unknown interface", work)


def port_in_use() -> None:
    taken = socket.socket(type=socket.SOCK_DGRAM)
    taken.bind(("127.0.0.1", 0))
    attempt("port in use", lambda: join_group(port=taken.getsockname()[1] if RANK == 1 else 0))


def options_of_another_kind() -> None:
    attempt("options", lambda: dist.init_process_group("storm", pg_options={"key": "abc"}))


def another_version() -> None:
    from stormtorch.joining import rendezvous

    if RANK == 1:
        rendezvous.version = lambda distribution_name: "9.9.9"
    attempt("another version", join_group)


def world_size() -> None:
    if RANK == 1:
        os.environ["WORLD_SIZE"] = "3"
    attempt("world size", lambda: join_group(timeout_s=4.0))


def rank_twice() -> None:
    # Of three processes, two say that they are rank 1 of 2; the second comes a little later.
    os.environ["WORLD_SIZE"], os.environ["RANK"] = "2", str(min(RANK, 1))
    time.sleep(1.0 if RANK == 2 else 0.0)
    attempt("rank twice", lambda: join_group(timeout_s=11.0))


def rank_too_high() -> None:
    os.environ["RANK"] = str(5 * RANK)
    attempt("rank too high", lambda: join_group(timeout_s=4.0))


def prepare_on_one_rank() -> None:
    join_group(timeout_s=11.5)
    model = new_model()
    if RANK == 0:
        attempt("prepare on one rank", lambda: stormtorch.prepare(model, sgd(model)))
    else:
        time.sleep(12.0)


def backward_on_one_rank() -> None:
    join_group(timeout_s=11.5)
    model = new_model()
    model, optimizer = stormtorch.prepare(model, sgd(model))
    step(model, optimizer)
    if RANK == 0:
        attempt("backward on one rank", lambda: step(model, optimizer))
    else:
        time.sleep(12.0)


def forked() -> None:
    join_group()
    model = new_model()
    model, optimizer = stormtorch.prepare(model, sgd(model))
    if RANK == 0:
        child = os.fork()
        if child == 0:
            attempt("forked", lambda: step(model, optimizer))
            os._exit(0)
        os.waitpid(child, 0)
    step(model, optimizer)
    dist.destroy_process_group()


def sparse_gradients() -> None:
    join_group()
    table = nn.Embedding(8, 4, sparse=True)
    optimizer = sgd(table)

    def work() -> None:
        stormtorch.prepare(table, optimizer)
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        assert table.weight.grad is None or not table.weight.grad.is_sparse

    attempt("sparse gradients", work)
    dist.destroy_process_group()


def unfrozen() -> None:
    join_group()
    model = new_model()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    stormtorch.prepare(model, optimizer)
    model[0].requires_grad_(True)
    attempt("unfrozen", lambda: step(model, optimizer))


def moved() -> None:
    join_group()
    model = new_model()
    optimizer = sgd(model)
    stormtorch.prepare(model, optimizer)
    model.to(torch.bfloat16)
    attempt("moved", lambda: step(model, optimizer))


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("stormtorch").addHandler(_Keep())
    globals()[sys.argv[1]]()
