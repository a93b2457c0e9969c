"""Staging of users' tensors into those that collectives take: contiguous, on the CPU, one per rank."""

import contextlib
from collections.abc import Sequence

import torch

from stormtorch.staging.copies import DeviceCopies


class Staged:
    """Contiguous stand-ins on the CPU for users' tensors, and the copies to make once the results have arrived.

    A tensor that is already contiguous and on the CPU is its own stand-in.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copies_by_device: dict[torch.device, DeviceCopies] = {}
        self._parts: list[Staged] = []

    # --- before the collective --------------------------------------------------------------------------------------

    def read(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns a stand-in with the tensor's values, in another dtype if given.

        For a tensor on a GPU, the values are there once `events` have happened.
        """
        given = self._given(tensor)
        given = given if dtype is None else given.to(dtype)
        return self._device_copies(given).fetch(given) if given.is_cuda else given.contiguous()

    def write(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns a stand-in whose values `finish` copies into `tensor`, in another dtype if given."""
        target = self._given(tensor)
        dtype = dtype or target.dtype
        if target.is_cuda:
            dense = self._device_copies(target).room(target, dtype)
        elif target.is_contiguous() and target.data_ptr() == tensor.data_ptr() and target.dtype == dtype:
            return target
        else:
            dense = torch.empty(target.shape, dtype=dtype, device="cpu")
        self._copy_later(tensor.detach(), dense)
        return dense

    def update(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns a stand-in with the tensor's values, which `finish` copies back into `tensor`."""
        target = tensor.detach()
        if target.is_cuda and dtype not in (None, target.dtype):
            narrow = self._given(target).to(dtype)  # convert on the GPU: faster, and fewer bytes to copy
            dense = self.read(narrow)
            self._copies.append((narrow, dense))
            self._copy_later(target, narrow)
            return dense
        dense = self.read(tensor, dtype)
        if dense.data_ptr() != target.data_ptr() or not target.is_contiguous() or dense.dtype != target.dtype:
            self._copy_later(target, dense)
        return dense

    def events(self) -> list[torch.cuda.Event]:
        """Returns events that must have happened before the stand-ins can be read; none for tensors on the CPU."""
        return [event for event in (visit.fetched() for visit in self._copies_by_device.values()) if event is not None]

    def include(self, other: "Staged") -> None:
        """Adds the GPUs of another work that this one waits for; that work copies its own results."""
        self._parts.append(other)

    # --- after the collective ---------------------------------------------------------------------------------------

    @property
    def devices(self) -> list[torch.device]:
        """GPUs that hold any of the tensors."""
        return list({visit.device for visit in self._all_visits()})

    def finish(self) -> None:
        """Copies the results into the users' tensors. Does not wait for a GPU."""
        with torch.no_grad():
            for tensor, values in self._copies:
                if tensor.is_cuda:
                    self._copies_by_device[tensor.device].bring(tensor, values)
                else:
                    tensor.copy_(values)
        self._copies.clear()

    def join(self) -> None:
        """Makes the current streams wait for the results. Returns at once."""
        for visit in self._all_visits():
            visit.join()

    def on_streams(self) -> contextlib.AbstractContextManager[object]:
        """Makes the streams that copy the results the current ones."""
        stack = contextlib.ExitStack()
        for visit in self._all_visits():
            stack.enter_context(visit.stream())
        return stack

    def _copy_later(self, target: torch.Tensor, values: torch.Tensor) -> None:
        if any(step == 0 and size > 1 for step, size in zip(target.stride(), target.shape, strict=True)):
            # Refuse it here: the copy at the end would fail only after the peers have taken part.
            raise RuntimeError(
                f"storm: {self._what} cannot write into an expanded tensor, whose elements share memory; "
                "clone() it first"
            )
        self._copies.append((target, values))

    def _all_visits(self) -> list[DeviceCopies]:
        return [*self._copies_by_device.values(), *(visit for part in self._parts for visit in part._all_visits())]

    def _device_copies(self, tensor: torch.Tensor) -> DeviceCopies:
        if tensor.device not in self._copies_by_device:
            self._copies_by_device[tensor.device] = DeviceCopies(tensor.device)
        return self._copies_by_device[tensor.device]

    def _given(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"storm: {self._what} needs tensors, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise RuntimeError(
                f"storm: {self._what} of {tensor.layout} tensors is not supported; convert them with to_dense()"
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise RuntimeError(
                f"storm: {self._what} of tensors on {tensor.device} is not supported; use the CPU or CUDA"
            )
        return tensor.detach().resolve_conj().resolve_neg()


def pieces(tensor: torch.Tensor, count: int, what: str) -> list[torch.Tensor]:
    """Splits a contiguous tensor into `count` equal views."""
    if tensor.numel() % count:
        raise ValueError(f"storm: {what}: {tensor.numel()} elements cannot be divided evenly among {count} ranks")
    return list(tensor.view(-1).chunk(count)) if tensor.numel() else [tensor.view(-1)] * count


def split(tensor: torch.Tensor, sizes: Sequence[int], count: int, what: str) -> list[torch.Tensor]:
    """Splits a contiguous tensor along its first dimension, into parts of the given sizes or equal ones."""
    if not sizes:
        if tensor.dim() and tensor.size(0) % count:
            raise ValueError(f"storm: {what}: the first dimension, {tensor.size(0)}, is not divisible by {count}")
        return pieces(tensor, count, what)
    if len(sizes) != count or sum(sizes) != tensor.size(0):
        raise ValueError(
            f"storm: {what}: splits must be {count} sizes, one per rank, that add up to the first dimension, "
            f"{tensor.size(0)}, got {list(sizes)}"
        )
    row = tensor.numel() // max(tensor.size(0), 1)
    return list(torch.split(tensor.view(-1), [row * size for size in sizes]))


def one(tensors: "Sequence[torch.Tensor] | torch.Tensor", what: str) -> torch.Tensor:
    """Returns the only tensor of a list, as one process has one device."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"storm: {what} takes one tensor, got {len(tensors)}")
    return tensors[0]
