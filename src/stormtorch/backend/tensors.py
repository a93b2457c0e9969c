"""From the tensors that users pass to those that the collectives take: contiguous, on the CPU, one per rank."""

from collections.abc import Sequence

import torch

from stormtorch.backend.work import Finish


class Staged:
    """Contiguous stand-ins for tensors, and the copies that remain to be made when the results are there."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor with the same values."""
        self._check(tensor)
        return tensor.detach().contiguous()

    def write(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor whose values end up in `tensor`, and that begins with them."""
        dense = self.read(tensor)
        if dense.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
            if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
                # Said here and not by the copy at the end, when the peers have taken part already.
                raise RuntimeError(
                    f"storm: {self._what} cannot write into an expanded tensor, in which one number in memory stands "
                    "for several; clone() it first"
                )
            self._copies.append((tensor.detach(), dense))
        return dense

    def finish(self) -> Finish | None:
        """What to do at the end, or None."""
        return self._copy_back if self._copies else None

    def _copy_back(self) -> None:
        with torch.no_grad():
            for tensor, dense in self._copies:
                tensor.copy_(dense)

    def _check(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"storm: {self._what} needs tensors, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise RuntimeError(f"storm: {self._what} of {tensor.layout} tensors is not supported; make it dense first")
        if tensor.device.type != "cpu":
            raise RuntimeError(f"storm: {self._what} of tensors on {tensor.device} is not supported; use the CPU")


def pieces(tensor: torch.Tensor, count: int, what: str) -> list[torch.Tensor]:
    """`count` equal parts of a contiguous tensor, as views."""
    if tensor.numel() % count:
        raise ValueError(f"storm: {what}: {tensor.numel()} elements cannot be divided among {count} ranks")
    return list(tensor.view(-1).chunk(count)) if tensor.numel() else [tensor.view(-1)] * count


def split(tensor: torch.Tensor, sizes: Sequence[int], count: int, what: str) -> list[torch.Tensor]:
    """Parts of a contiguous tensor along its first dimension, of the sizes given or, with none, equal."""
    if not sizes:
        if tensor.dim() and tensor.size(0) % count:
            raise ValueError(f"storm: {what}: the first dimension, {tensor.size(0)}, is not divisible by {count}")
        return pieces(tensor, count, what)
    if len(sizes) != count or sum(sizes) != tensor.size(0):
        raise ValueError(
            f"storm: {what}: splits {list(sizes)} of {count} ranks must add up to the first dimension, {tensor.size(0)}"
        )
    row = tensor.numel() // max(tensor.size(0), 1)
    return list(torch.split(tensor.view(-1), [row * size for size in sizes]))


def one(tensors: "Sequence[torch.Tensor] | torch.Tensor", what: str) -> torch.Tensor:
    """The only tensor of a list, as one process has one device."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"storm: {what} takes one tensor, got {len(tensors)}")
    return tensors[0]
