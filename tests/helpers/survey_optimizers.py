"""All optimizers that run on a CPU: torch's, and those of timm and pytorch_optimizer where these are installed."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from survey_cases import Loop, Subject
from training import Optimizer

Make = Callable[[nn.Module], Sequence[Optimizer]]
TORCH: dict[str, dict[str, Any]] = {
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 0.01},
    "Adagrad": {"lr": 0.01},
    "Adam": {"lr": 0.003},
    "Adam (amsgrad)": {"lr": 0.003, "amsgrad": True},
    "Adam (foreach)": {"lr": 0.003, "foreach": True},
    "Adam (fused)": {"lr": 0.003, "fused": True},
    "AdamW": {"lr": 0.003},
    "Adamax": {"lr": 0.003},
    "ASGD": {"lr": 0.01},
    "LBFGS": {"lr": 0.1},
    "Muon": {"lr": 0.02},
    "NAdam": {"lr": 0.003},
    "RAdam": {"lr": 0.003},
    "RMSprop": {"lr": 0.003, "momentum": 0.5},
    "Rprop": {"lr": 0.003},
    "SGD": {"lr": 0.05},
    "SGD (Nesterov)": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "SparseAdam": {"lr": 0.003},
}


def matrices() -> nn.Module:
    """A model of matrices alone, for optimizers that take nothing else."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24, bias=False), nn.Tanh(), nn.Linear(24, 6, bias=False))


def step(c: Loop, number: int) -> None:
    """The loop that everybody writes."""
    c.backward(number)
    c.optimizer.step()
    c.optimizer.zero_grad()


def _of_torch(name: str) -> Subject:
    kind = getattr(torch.optim, name.partition(" ")[0])

    def make(model: nn.Module) -> list[Optimizer]:
        return [kind(model.parameters(), **TORCH[name])]

    if name in ("LBFGS",):
        return Subject(name, make, _by_closure)
    return Subject(name, make, step, matrices) if name == "Muon" else Subject(name, make, step)


def _by_closure(c: Loop, number: int) -> None:
    def compute() -> torch.Tensor:
        c.optimizer.zero_grad()
        c.backward(number)
        return torch.ones(())

    c.optimizer.step(compute)


def _timm() -> Any:
    """timm's optimizers without timm's models, which need torchvision."""
    if "timm" not in sys.modules:
        spec = importlib.util.find_spec("timm")
        assert spec is not None and spec.submodule_search_locations
        package, models = types.ModuleType("timm"), types.ModuleType("timm.models")
        package.__path__ = [spec.submodule_search_locations[0]]
        models.group_parameters = None  # type: ignore[attr-defined]
        sys.modules["timm"], sys.modules["timm.models"] = package, models
    return importlib.import_module("timm.optim")


def _of_timm(name: str) -> Subject:
    def make(model: nn.Module) -> list[Optimizer]:
        return [_timm().create_optimizer_v2(list(model.parameters()), opt=name, lr=0.003)]

    return Subject(name, make, step)


def _of_pytorch_optimizer(name: str) -> Subject:
    def make(model: nn.Module) -> list[Optimizer]:
        library = importlib.import_module("pytorch_optimizer")
        given = model if name in ("adalomo", "adammini", "lomo") else model.parameters()
        return [library.load_optimizer(name)(given, lr=0.003)]

    return Subject(name, make, _by_closure if name in ("alig", "bsam") else step)


def libraries() -> list[str]:
    """Libraries that are installed."""
    return ["torch", *(each for each in ("timm", "pytorch_optimizer") if importlib.util.find_spec(each))]


@functools.cache
def subjects(library: str) -> dict[str, Subject]:
    """All optimizers of a library, by name, that run by themselves in one process."""
    if library == "torch":
        return {name: _of_torch(name) for name in TORCH}
    if library == "timm":
        return {name: _of_timm(name) for name in sorted(_timm().list_optimizers())}
    library_of: Any = importlib.import_module("pytorch_optimizer")
    return {name: _of_pytorch_optimizer(name) for name in sorted(library_of.get_supported_optimizers())}
