"""The memory of some parameters: a flat vector of them, one of their gradients, and this rank's shard of both."""

from collections.abc import Sequence

import torch
from torch import nn

import stormtorch._engine as _engine
from stormtorch.runtime.layout import Layout, Piece
from stormtorch.staging.copies import Visit
from stormtorch.staging.order import Moment
from stormtorch.transport.exchange import WIRE_DTYPES


class Bucket:
    """Parameters that travel together. They become views of `flat`; their gradients become views of `grads`.

    Args:
        index: Number of the bucket. Low ones complete their gradients first; high ones are needed first in forward.
        layout: Places of parameters and shards in the bucket.
        parameters: All parameters, by number. Those in this bucket have one dtype and device.
        rank: Rank of this process, which owns the shard of the same number.
    """

    def __init__(self, index: int, layout: Layout, parameters: Sequence[nn.Parameter], rank: int) -> None:
        self.index = index
        self.layout = layout
        self.rank = rank
        first = parameters[layout.slots[0].parameter]
        self.dtype, self.device = first.dtype, first.device
        self.flat = torch.zeros(layout.elements, dtype=self.dtype, device=self.device)
        self.grads = torch.zeros_like(self.flat)
        self.parameters = [parameters[slot.parameter] for slot in layout.slots]
        self.grad_views: list[torch.Tensor] = []
        with torch.no_grad():
            for slot, parameter in zip(layout.slots, self.parameters, strict=True):
                view = self.flat[slot.first : slot.first + slot.count].view(parameter.shape)
                view.copy_(parameter)
                parameter.data = view
                self.grad_views.append(self.grads[slot.first : slot.first + slot.count].view(parameter.shape))
        # Addresses of the gradients' places: comparing numbers is much quicker than making views.
        self._homes = [view.data_ptr() for view in self.grad_views]
        self._home: torch.Tensor | None = None
        self._spare = torch.empty(0)
        self.finite: bool | None = None
        """Whether all gradients that `collect` last put here are finite; None if it cannot tell."""
        self._own(torch.empty(0))
        self.previous: torch.Tensor | None = None
        """Owned parameters before the last step, where `remember` was called."""
        # The network reads and writes main memory; on the CPU that is the vectors themselves.
        self.host_flat = self._pinned(self.flat) if self.on_gpu else self.flat
        self.host_grads = self._pinned(self.grads) if self.on_gpu else self.grads
        if self.on_gpu:
            self.host_flat.copy_(self.flat)

    def _own(self, masters: torch.Tensor) -> None:
        """Allocates what belongs to this rank's shard; `masters` are its float32 values, empty if `flat` has them."""
        self.own = self.shard(self.flat, self.rank)
        # Owners compute in float32. A float32 bucket is its own master.
        wide = self.dtype == torch.float32
        self.masters = self.own if wide else (masters if masters.numel() else self.own.float())
        # In memory of its own: if a rank dies, the others repeat the exchange from the gradients that they have.
        self.own_grads = torch.zeros_like(self.masters)
        self.host_own_grads = self._pinned(self.own_grads) if self.on_gpu else self.own_grads

    def recut(self, layout: Layout, rank: int, masters: torch.Tensor) -> None:
        """Gives this rank another shard. Parameters and their gradients stay where they are.

        Args:
            layout: The layout with the new shards; its parameters are in the same places.
            rank: Number of this rank's shard from now on.
            masters: Float32 values of the new shard. Where `flat` is float32, it must hold them already.
        """
        self.layout, self.rank = layout, rank
        self.previous = None
        self._own(masters)

    def divide(self, layout: Layout, rank: int) -> None:
        """Divides the bucket into other shards, for sessions in which nobody owns parameters."""
        self.layout, self.rank = layout, rank

    def show_own_gradients(self) -> None:
        """Copies the averaged gradients of this rank's shard to where the user sees gradients."""
        shard = self.shard(self.grads, self.rank)
        if shard.numel():
            shard.copy_(self.own_grads)

    @property
    def on_gpu(self) -> bool:
        """Whether the parameters are on a GPU, so that they must be copied for the network."""
        return self.device.type == "cuda"

    def shard(self, vector: torch.Tensor, owner: int) -> torch.Tensor:
        """Returns an owner's part of a vector like `flat`."""
        return vector.narrow(0, *self.layout.spans[owner])

    def shards(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Returns all owners' parts of a vector like `flat`."""
        return [self.shard(vector, owner) for owner in range(len(self.layout.spans))]

    def pieces(self) -> list[Piece]:
        """Returns the pieces of parameters that this rank owns."""
        return self.layout.pieces(self.rank)

    def within_own(self, piece: Piece, vector: torch.Tensor) -> torch.Tensor:
        """Returns a piece's part of a vector like `masters`."""
        return vector.narrow(0, piece.first - self.layout.spans[self.rank][0], piece.count)

    def bring_home(self, *, arriving: bool = False) -> None:
        """Puts parameters back into the bucket that were only copied, as `model.to("cpu:0")` does on the CPU.

        Args:
            arriving: Whether parameters are on their way, so that copies made meanwhile may hold old values.

        Raises:
            RuntimeError: A parameter has another dtype, device or size, or was copied while parameters were arriving.
        """
        if self.is_away:
            return
        first, size = self.flat.data_ptr(), self.dtype.itemsize
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            if not slot.count or (parameter.data_ptr() == first + slot.first * size and parameter.dtype == self.dtype):
                continue
            home = self.flat[slot.first : slot.first + slot.count]
            same = parameter.dtype == self.dtype and parameter.numel() == slot.count and self._is_here(parameter.device)
            if arriving or not same:
                raise RuntimeError(
                    f"parameter {slot.parameter} of shape {tuple(parameter.shape)} was moved after prepare(), as "
                    f"model.to(), model.half() and flatten_parameters() do, and is {parameter.dtype} on "
                    f"{parameter.device} now: do that before"
                )
            with torch.no_grad():
                home = home.view(parameter.shape)
                home.copy_(parameter)
                parameter.data = home

    def bring_gradient_home(self, place: int, view: torch.Tensor, *, keep: bool) -> None:
        """Puts a gradient back into the bucket if its memory was replaced.

        Args:
            place: Place of the parameter in the bucket.
            view: The gradient that should be a view of `grads`.
            keep: Whether to copy its values into the bucket.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if view.data_ptr() == self._homes[place] or not self.layout.slots[place].count:
                return
            with torch.no_grad():
                slot = self.layout.slots[place]
                home = self.grads[slot.first : slot.first + slot.count].view(view.shape)
                if keep:
                    home.copy_(view)
                view.data = home

    def collect(self, views: Sequence[torch.Tensor]) -> list[bool]:
        """Puts all parameters' gradients into the bucket, zeros where one has none. Tells whether each has one.

        Args:
            views: What parameters get as their gradients: views of `grads`, in the bucket's order.
        """
        given = [parameter.grad for parameter in self.parameters]
        looks = self.device.type == "cpu" and self.dtype in WIRE_DTYPES
        copies: list[tuple[int, int, int]] = []
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # backward(create_graph=True) enables gradients
            for place, (gradient, view, home) in enumerate(zip(given, views, self._homes, strict=True)):
                if view.data_ptr() != home:
                    self.bring_gradient_home(place, view, keep=gradient is view)
                if gradient is None:
                    self.grad_views[place].zero_()
                    continue
                count = self.layout.slots[place].count
                if gradient is view or not (looks and self._is_plain(gradient, count)):
                    if gradient is not view:
                        self.grad_views[place].copy_(gradient.to_dense() if gradient.is_sparse else gradient)
                    copies.append((home, home, count))  # only look at it
                else:
                    copies.append((gradient.data_ptr(), home, count))
                if gradient is not view:
                    self.parameters[place].grad = view
        # One call for the whole bucket. It looks for infinities as it copies: a look of its own would read all again.
        self.finite = _engine.copy_finite(WIRE_DTYPES[self.dtype], copies) if looks else None
        return [gradient is not None for gradient in given]

    def _is_plain(self, gradient: torch.Tensor, count: int) -> bool:
        """Whether a gradient is nothing but elements in a row, like those of the bucket."""
        return (
            type(gradient) is torch.Tensor
            and gradient.layout == torch.strided
            and gradient.dtype == self.dtype
            and gradient.device.type == "cpu"
            and gradient.numel() == count
            and gradient.is_contiguous()
            and not gradient.is_neg()
            and not gradient._is_zerotensor()
        )

    def _is_here(self, device: torch.device) -> bool:
        """Whether a device is this bucket's. All CPU devices are the same one, whatever their index."""
        return device == self.device or (device.type == "cpu" and self.device.type == "cpu")

    # --- owned parameters ---------------------------------------------------------------------------------------------

    def remember(self) -> None:
        """Copies the owned parameters before a step, into memory that is the same at every step."""
        if self.previous is None:
            self.previous = torch.empty_like(self.masters)
        self.previous.copy_(self.masters)

    def settle(self) -> None:
        """Copies the masters to this rank's parameters, after a step."""
        if self.masters is not self.own:
            self.own.copy_(self.masters)

    def follow(self) -> None:
        """Copies this rank's parameters to the masters where they differ, as the user has changed them there."""
        if self.masters is not self.own:
            self.masters.copy_(torch.where(self.masters.to(self.dtype) == self.own, self.masters, self.own.float()))

    def adopt(self) -> None:
        """Takes over loaded parameters: masters keep their extra bits where they round to the same value."""
        self.follow()
        if self.on_gpu:
            self.host_flat.copy_(self.flat)

    def release_gradients(self) -> None:
        """Frees the memory of gradients, for sessions that leave gradients where torch puts them."""
        self.grads = self.host_grads = self.own_grads = self.host_own_grads = self.grads.new_empty(0)
        self.grad_views = []

    # --- steps beside a running backward ------------------------------------------------------------------------------

    @property
    def is_away(self) -> bool:
        """Whether `flat` is other memory than that which the model computes with."""
        return self._home is not None

    @torch.no_grad()
    def go_away(self) -> None:
        """Goes on in a copy of the parameters, so that the model's own stay as they are while it computes."""
        if self._home is None:
            if self._spare.shape != self.flat.shape:
                self._spare = torch.empty_like(self.flat)
            self._spare.copy_(self.flat)
            self._home = self.flat
            self._dwell(self._spare)

    @torch.no_grad()
    def come_back(self) -> None:
        """Gives the model the parameters of the copy, and goes on in its memory."""
        if self._home is not None:
            self._home.copy_(self.flat)
            home, self._home = self._home, None
            self._dwell(home)

    def _dwell(self, flat: torch.Tensor) -> None:
        self.flat = flat
        if not self.on_gpu:
            self.host_flat = flat
        is_master = self.masters is self.own
        self.own = self.shard(flat, self.rank)
        if is_master:
            self.masters = self.own

    # --- to and from a GPU ------------------------------------------------------------------------------------------

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> list[Moment]:
        """Begins to copy to main memory. The copy is complete when the returned moments have happened."""
        visit = Visit(self.device)
        visit.fetch_into(target, source)
        return [event for event in (visit.fetched(),) if event is not None]

    def bring(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies to the GPU, after all work on its current stream."""
        target.copy_(source, non_blocking=True)

    @staticmethod
    def _pinned(like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
