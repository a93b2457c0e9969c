"""Number format of a shard on the network: converts to float32, 16 bits, int8 or int4 (quantisation), and back."""

import torch

from stormtorch.collectives import hierarchy
from stormtorch.collectives.base.group import Group, Pending
from stormtorch.collectives.base.ops import Op
from stormtorch.collectives.formats.grid import GRIDS
from stormtorch.exchange.reliability import EXACT, Reliability

WIRES = (torch.float32, torch.bfloat16, torch.float16, *GRIDS)
"""Types in which parameters and gradients may travel."""


def element_bytes(dtype: torch.dtype) -> float:
    """Returns the bytes of an element on the network; torch's itemsize of int4 is 1."""
    return GRIDS[dtype].element_bytes if dtype in GRIDS else dtype.itemsize


def narrower(wire: torch.dtype, own: torch.dtype) -> torch.dtype:
    """Returns the type in which values of type `own` travel: the wire's, unless their own is as narrow."""
    return wire if element_bytes(wire) < element_bytes(own) else own


class Wire:
    """Converts float tensors to messages and back. A message is a float tensor too, because only those may be lossy.

    Args:
        dtype: The type in which elements travel, one of `WIRES`.
        chunk_bytes: The transport's `chunk_bytes`.
    """

    def __init__(self, dtype: torch.dtype, chunk_bytes: int) -> None:
        self.dtype = dtype
        self.chunk_bytes = chunk_bytes
        self._grids = grids = GRIDS.get(dtype)
        self.per_chunk = chunk_bytes // dtype.itemsize if grids is None else grids.chunk_elements(chunk_bytes)
        """Elements of a full chunk: they arrive or are lost together."""

    @property
    def grids(self) -> bool:
        """Whether elements are rounded to grids, at random and without bias, as those of int8 and int4 are."""
        return self._grids is not None

    @property
    def reduces(self) -> torch.dtype:
        """The tensors' type in `reduce_scatter` and `all_reduce`: float32 if they are quantised there."""
        return torch.float32 if self.grids else self.dtype

    def chunks(self, elements: int) -> int:
        """Returns the number of chunks of a message; even an empty message has one."""
        return max(-(-elements // self.per_chunk), 1)

    def room(self, elements: int) -> torch.Tensor:
        """Allocates a buffer for a message."""
        if self._grids is None:
            return torch.empty(elements, dtype=self.dtype, device="cpu")
        length = self._grids.message_bytes(elements, self.chunk_bytes)
        return torch.empty(-(-length // 4), dtype=torch.float32, device="cpu")

    def encode(self, tensor: torch.Tensor, seed: int) -> torch.Tensor:
        """Converts a tensor to a message. Returns the tensor itself if it has the right type already.

        Args:
            tensor: The values to send.
            seed: Chooses the offsets of the grids, where there are any.
        """
        if self._grids is None:
            return tensor.to(self.dtype)
        message = self.room(tensor.numel())
        self._grids.encode(tensor.float(), self.chunk_bytes, seed, message.data_ptr())
        return message

    def rounded(self, tensor: torch.Tensor, seed: int) -> torch.Tensor:
        """Returns a tensor as receivers decode it; the tensor itself if nothing is rounded."""
        if self.dtype == tensor.dtype:
            return tensor
        result = torch.empty_like(tensor)
        everything = torch.ones(self.chunks(tensor.numel()), dtype=torch.bool, device="cpu")
        self.place(self.encode(tensor, seed), result, everything)
        return result

    def decode(self, message: torch.Tensor, values: torch.Tensor) -> None:
        """Writes all values of a message into contiguous float32 memory."""
        if self._grids is None:
            values.copy_(message)
        else:
            self._grids.decode(message.data_ptr(), self.chunk_bytes, values)

    def place(self, message: torch.Tensor, target: torch.Tensor, arrived_C: torch.Tensor) -> None:
        """Copies the chunks of a message that arrived into `target`; lost ones keep their old values. C chunks."""
        everything = bool(arrived_C.all())
        values = message
        if self.grids:
            # Decode in place if every old value is to be replaced.
            direct = everything and target.dtype == torch.float32 and target.is_contiguous()
            values = target if direct else torch.empty(target.numel(), dtype=torch.float32, device="cpu")
            self.decode(message, values)
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

    def reduce_scatter(
        self,
        group: Group,
        output: torch.Tensor,
        inputs: list[torch.Tensor],
        op: Op = Op.AVG,
        *,
        reliability: Reliability,
        timeout_s: float | None = None,
    ) -> Pending:
        """Reduces `inputs[i]` of all ranks, in this format on the network, into rank i's `output`.

        Args:
            group: The ranks that take part.
            output: This rank's shard of the result, of the type `reduces` or float32.
            inputs: One contribution per rank, of the type `reduces`.
            op: AVG or SUM; other operations only without grids.
            reliability: How much of each message may be missing.
            timeout_s: Seconds until the call fails; None takes the transport's default.
        """
        if not self.grids:
            return hierarchy.reduce_scatter(group, output, inputs, op, reliability=reliability, timeout_s=timeout_s)
        return hierarchy.reduce_scatter_on_grids(
            group, output, inputs, op, wire=self.dtype, reliability=reliability, timeout_s=timeout_s
        )

    def all_reduce(
        self,
        group: Group,
        tensor: torch.Tensor,
        op: Op = Op.AVG,
        *,
        reliability: Reliability,
        timeout_s: float | None = None,
    ) -> Pending:
        """Reduces `tensor` over the group, in this format on the network, in place. The second stage is exact.

        Args:
            group: The ranks that take part.
            tensor: This rank's contribution, of the type `reduces`; replaced by the result.
            op: AVG or SUM; other operations only without grids.
            reliability: How much of each message of the first stage may be missing.
            timeout_s: Seconds until the call fails; None takes the transport's default.
        """
        if not self.grids:
            return hierarchy.all_reduce(group, tensor, op, reliability=reliability, share=EXACT, timeout_s=timeout_s)
        return hierarchy.all_reduce_on_grids(
            group, tensor, op, wire=self.dtype, reliability=reliability, timeout_s=timeout_s
        )
