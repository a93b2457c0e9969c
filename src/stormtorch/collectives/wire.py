"""Conversion of a shard to the type in which it travels: float32, 16 bits or int8, and back."""

import torch

import stormtorch._engine as _engine
from stormtorch.collectives.grid import chunk_elements

WIRES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
"""Types in which parameters and gradients may travel."""


class Wire:
    """Converts float tensors to messages and back. A message is a float tensor too, since only those may be lossy.

    Args:
        dtype: The type in which elements travel, one of `WIRES`.
        chunk_bytes: The transport's `chunk_bytes`.
    """

    def __init__(self, dtype: torch.dtype, chunk_bytes: int) -> None:
        self.dtype = dtype
        self.chunk_bytes = chunk_bytes
        self.per_chunk = chunk_elements(chunk_bytes) if dtype == torch.int8 else chunk_bytes // dtype.itemsize
        """Elements of a full chunk: they arrive or are lost together."""

    def chunks(self, elements: int) -> int:
        """Returns the number of chunks of a message; even an empty message has one."""
        return max(-(-elements // self.per_chunk), 1)

    def room(self, elements: int) -> torch.Tensor:
        """Allocates memory for a message."""
        if self.dtype != torch.int8:
            return torch.empty(elements, dtype=self.dtype, device="cpu")
        return torch.empty(-(-_engine.int8_bytes(elements, self.chunk_bytes) // 4), dtype=torch.float32, device="cpu")

    def encode(self, tensor: torch.Tensor, seed: int) -> torch.Tensor:
        """Converts a tensor to a message. Returns the tensor itself if it has the right type already.

        Args:
            tensor: The values to send.
            seed: Chooses the offsets of int8's grids.
        """
        if self.dtype != torch.int8:
            return tensor.to(self.dtype)
        message = self.room(tensor.numel())
        source = tensor.float()
        _engine.int8_encode(source.data_ptr(), source.numel(), self.chunk_bytes, seed, message.data_ptr())
        return message

    def place(self, message: torch.Tensor, target: torch.Tensor, arrived_C: torch.Tensor) -> None:
        """Copies the chunks of a message that arrived into `target`; lost ones keep their old values. C chunks."""
        everything = bool(arrived_C.all())
        values = message
        if self.dtype == torch.int8:
            # Decode in place if every old value is to be replaced.
            direct = everything and target.dtype == torch.float32 and target.is_contiguous()
            values = target if direct else torch.empty(target.numel(), dtype=torch.float32, device="cpu")
            _engine.int8_decode(message.data_ptr(), values.numel(), self.chunk_bytes, values.data_ptr())
        if everything:
            if values is not target:
                target.copy_(values)
            return
        full = target.numel() // self.per_chunk
        whole = full * self.per_chunk
        # Copy everything, then restore what was lost: most chunks arrive, and selecting rows is slower than copying.
        rows = target[:whole].view(full, self.per_chunk)
        lost = (~arrived_C[:full]).nonzero().squeeze(1)
        stale = rows.index_select(0, lost)
        target[:whole] = values[:whole]
        rows.index_copy_(0, lost, stale)
        if whole < target.numel() and bool(arrived_C[full]):
            target[whole:] = values[whole:]
