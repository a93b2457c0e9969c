"""What a shard looks like on its way: itself, half as many bits, or eight of them."""

import torch

from stormtorch import _engine
from stormtorch.collectives.int8 import chunk_elements


class Wire:
    """Turns float tensors into messages and back. A message is a float tensor as well, since only those may lose."""

    def __init__(self, dtype: torch.dtype, chunk_bytes: int) -> None:
        self.dtype = dtype
        self.chunk_bytes = chunk_bytes
        self.per_chunk = chunk_elements(chunk_bytes) if dtype == torch.int8 else chunk_bytes // dtype.itemsize
        """Elements that are lost at once."""

    def chunks(self, elements: int) -> int:
        """Chunks of a message with so many elements; even an empty message has one."""
        return max(-(-elements // self.per_chunk), 1)

    def room(self, elements: int) -> torch.Tensor:
        """Memory for a message."""
        if self.dtype != torch.int8:
            return torch.empty(elements, dtype=self.dtype, device="cpu")
        return torch.empty(-(-_engine.int8_bytes(elements, self.chunk_bytes) // 4), dtype=torch.float32, device="cpu")

    def encode(self, tensor: torch.Tensor, seed: int) -> torch.Tensor:
        """A message with a tensor's values; the tensor itself where nothing has to be changed."""
        if self.dtype != torch.int8:
            return tensor.to(self.dtype)
        message = self.room(tensor.numel())
        source = tensor.float()
        _engine.int8_encode(source.data_ptr(), source.numel(), self.chunk_bytes, seed, message.data_ptr())
        return message

    def place(self, message: torch.Tensor, target: torch.Tensor, arrived_C: torch.Tensor) -> None:
        """Copies what arrived of a message to where it belongs. C chunks."""
        everything = bool(arrived_C.all())
        values = message
        if self.dtype == torch.int8:
            # Straight to its place where nothing there has to stay.
            direct = everything and target.dtype == torch.float32 and target.is_contiguous()
            values = target if direct else torch.empty(target.numel(), dtype=torch.float32, device="cpu")
            _engine.int8_decode(message.data_ptr(), values.numel(), self.chunk_bytes, values.data_ptr())
        if everything:
            if values is not target:
                target.copy_(values)
            return
        full = target.numel() // self.per_chunk
        whole = full * self.per_chunk
        # All is copied and what was lost put back: most arrives, and picking rows costs more than copying them.
        rows = target[:whole].view(full, self.per_chunk)
        lost = (~arrived_C[:full]).nonzero().squeeze(1)
        stale = rows.index_select(0, lost)
        target[:whole] = values[:whole]
        rows.index_copy_(0, lost, stale)
        if whole < target.numel() and bool(arrived_C[full]):
            target[whole:] = values[whole:]
