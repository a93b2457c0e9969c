"""A data set in two parts: training data and held-out data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True)
class Split(Generic[Part]):
    """A data set, the same in every process that opens it."""

    name: str
    training: Part
    """Examples to learn from."""
    validation: Part
    """Held-out examples, in the same form."""

    def to_json(self) -> dict[str, object]:
        """Describe the data set, with a digest of all of it, so that figures of different data can be told apart."""
        parts = (self.training, self.validation)
        return {"name": self.name, "sha256": digest(tensor for part in parts for tensor in _tensors(part))}


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """First 16 digits of the SHA-256 of all elements, one tensor after the other."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().numpy().data)
    return found.hexdigest()[:16]


@dataclass(frozen=True)
class Examples:
    """Inputs, and the target of each."""

    inputs: torch.Tensor
    """One row for each example."""
    targets: torch.Tensor
    """int64, one row for each example."""

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, rows: slice) -> Examples:
        return Examples(self.inputs[rows], self.targets[rows])

    def to(self, device: torch.device) -> Examples:
        """Copy the examples to a device; those that are there already are not copied."""
        return Examples(self.inputs.to(device), self.targets.to(device))


def _tensors(part: object) -> tuple[torch.Tensor, ...]:
    if isinstance(part, Examples):
        return part.inputs, part.targets
    assert isinstance(part, torch.Tensor)
    return (part,)
