"""Bucket: a flat vector of parameters, a flat vector of their gradients, and this rank's shard of both."""

from collections.abc import Sequence

import torch
from torch import nn

import stormtorch._engine as _engine
from stormtorch.exchange.exchange import WIRE_DTYPES
from stormtorch.runtime.memory.layout import Layout, Piece
from stormtorch.staging.copies import DeviceCopies
from stormtorch.staging.launch_queue import Event


class Bucket:
    """Parameters that are exchanged together. They become views of `flat`; their gradients become views of `grads`.

    Args:
        index: Number of the bucket. Low ones complete their gradients first; high ones are needed first in forward.
        layout: Offsets of parameters and shards in the bucket.
        parameters: All parameters, by number. Those in this bucket have one dtype and device.
        rank: Rank of this process, which owns the shard of the same number.
    """

    def __init__(self, index: int, layout: Layout, parameters: Sequence[nn.Parameter], rank: int) -> None:
        self.index = index
        self.layout = layout
        self.rank = rank
        first = parameters[layout.slots[0].parameter]
        self.dtype, self.device = first.dtype, first.device
        self.on_gpu = self.device.type == "cuda"
        """Whether the parameters are on a GPU, so that they must be copied for the network."""
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
        # Addresses of the gradients in the bucket: comparing numbers is much faster than making views.
        self._grad_addresses = [view.data_ptr() for view in self.grad_views]
        self._model_flat: torch.Tensor | None = None
        self._copy_flat = torch.empty(0)
        self.kept: torch.Tensor | None = None
        """Whether each element is kept, once `prune` was called. All others are zero and are not sent."""
        self._lay_out()
        self.finite: bool | None = None
        """Whether all gradients that `collect` last put here are finite; None if unknown."""
        self._shares_gradients = False
        self._own(torch.empty(0))
        self.previous: torch.Tensor | None = None
        """Owned parameters before the last step, if `remember` was called."""
        # The network reads and writes main memory; on the CPU that is the vectors themselves.
        self.host_flat = self._host(self.flat, self.travels)
        self.host_grads = self._host(self.grads, self.travels)
        self.refresh_host()

    def _own(self, masters: torch.Tensor) -> None:
        """Allocates the memory of this rank's shard; `masters` are its float32 values, empty if `flat` has them."""
        self.own = self.shard(self.flat, self.rank)
        self._owned = self.layout.spans[self.rank]
        # Owners compute in float32. A float32 bucket is its own master.
        wide = self.dtype == torch.float32
        self.masters = self.own if wide else (masters if masters.numel() else self.own.float())
        # In separate memory: if a rank dies, the others repeat the exchange from their own gradients.
        self.own_grads = torch.zeros_like(self.masters)
        self.host_own_grads = self._host(self.own_grads, self.spans[self.rank][1])
        shares = self._shares_gradients and wide
        self.step_grads = self.shard(self.grads, self.rank) if shares else self.own_grads
        """Averaged gradients of this rank's shard that the optimizer uses."""

    def share_gradients(self) -> None:
        """Makes the optimizer use the memory in which the program sees gradients."""
        self._shares_gradients = True
        self.repartition(self.layout, self.rank, torch.empty(0) if self.masters is self.own else self.masters)

    def repartition(self, layout: Layout, rank: int, masters: torch.Tensor) -> None:
        """Gives this rank another shard. Parameters and their gradients stay where they are.

        Args:
            layout: The layout with the new shards and the same parameter offsets.
            rank: Number of this rank's new shard.
            masters: Float32 values of the new shard. Where `flat` is float32, it must hold them already.
        """
        self.layout, self.rank = layout, rank
        self.previous = None
        self._lay_out()
        self._own(masters)

    def divide(self, layout: Layout, rank: int) -> None:
        """Changes the shards of the bucket, for sessions whose parameters have no owners."""
        self.layout, self.rank = layout, rank
        self._lay_out()

    def show_own_gradients(self) -> None:
        """Copies the averaged gradients of this rank's shard to where the program sees gradients."""
        shard = self.shard(self.grads, self.rank)
        if shard.numel():
            shard.copy_(self.own_grads)

    @property
    def is_staged(self) -> bool:
        """Whether the network uses staging memory instead of the model's, so that values must be copied."""
        return self.on_gpu or self.kept is not None

    def shard(self, vector: torch.Tensor, owner: int) -> torch.Tensor:
        """Returns an owner's part of a vector like `flat`, or like `host_flat`, which pruning makes shorter."""
        spans = self.layout.spans if vector.numel() == self.layout.elements else self.spans
        return vector.narrow(0, *spans[owner])

    def shards(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Returns all owners' parts of such a vector."""
        return [self.shard(vector, owner) for owner in range(len(self.layout.spans))]

    def pieces(self) -> list[Piece]:
        """Returns the pieces of parameters that this rank owns."""
        return self.layout.pieces(self.rank)

    def within_own(self, piece: Piece, vector: torch.Tensor) -> torch.Tensor:
        """Returns a piece's part of a vector like `masters`."""
        return vector.narrow(0, piece.first - self.layout.spans[self.rank][0], piece.count)

    def address_of(self, piece: Piece, vector: torch.Tensor) -> int:
        """Returns the address of a piece's part of such a vector, which is cheaper than a view of it."""
        return vector.data_ptr() + (piece.first - self.layout.spans[self.rank][0]) * vector.element_size()

    def reattach_parameters(self, *, arriving: bool = False) -> None:
        """Makes parameters views of the bucket again if they were only copied, as `model.to("cpu:0")` does on the CPU.

        Args:
            arriving: Whether parameters are still arriving, so that copies made meanwhile may hold old values.

        Raises:
            RuntimeError: A parameter has another dtype, device or size, or was copied while parameters were arriving.
        """
        if self.uses_copy:
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

    def reattach_gradient(self, position: int, view: torch.Tensor, *, keep: bool) -> bool:
        """Makes a gradient a view of the bucket again if its memory was replaced. Returns whether it was.

        Args:
            position: Position of the parameter in the bucket.
            view: The gradient that should be a view of `grads`.
            keep: Whether to copy its values into the bucket.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if view.data_ptr() == self._grad_addresses[position] or not self.layout.slots[position].count:
                return False
            with torch.no_grad():
                slot = self.layout.slots[position]
                home = self.grads[slot.first : slot.first + slot.count].view(view.shape)
                if keep:
                    home.copy_(view)
                view.data = home
                return True

    def collect(self, views: Sequence[torch.Tensor]) -> list[bool]:
        """Copies all parameters' gradients into the bucket, zeros for missing ones. Returns whether each has one.

        Args:
            views: Tensors that parameters get as gradients: views of `grads`, in the bucket's order.
        """
        given = [parameter.grad for parameter in self.parameters]
        looks = self.device.type == "cpu" and self.dtype in WIRE_DTYPES
        copies: list[tuple[int, int, int]] = []
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # backward(create_graph=True) enables gradients
            for position, (gradient, view, home) in enumerate(zip(given, views, self._grad_addresses, strict=True)):
                if view.data_ptr() != home:
                    self.reattach_gradient(position, view, keep=gradient is view)
                if gradient is None:
                    self.grad_views[position].zero_()
                    continue
                count = self.layout.slots[position].count
                if gradient is view or not (looks and self._is_plain(gradient, count)):
                    if gradient is not view:
                        self.grad_views[position].copy_(gradient.to_dense() if gradient.is_sparse else gradient)
                    copies.append((home, home, count))  # only check it
                else:
                    copies.append((gradient.data_ptr(), home, count))
                if gradient is not view:
                    self.parameters[position].grad = view
        # One call for the whole bucket. It checks for infinities while it copies, so that memory is read only once.
        self.finite = _engine.copy_finite(WIRE_DTYPES[self.dtype], copies) if looks else None
        return [gradient is not None for gradient in given]

    def _is_plain(self, gradient: torch.Tensor, count: int) -> bool:
        """Whether a gradient is a plain contiguous CPU tensor with the bucket's dtype."""
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
        """Copies the owned parameters before a step, into memory that every step reuses."""
        if self.previous is None:
            self.previous = torch.empty_like(self.masters)
        self.previous.copy_(self.masters)

    def settle(self) -> None:
        """Copies the masters to this rank's parameters, after a step."""
        if self.masters is not self.own:
            self.own.copy_(self.masters)

    def follow(self) -> None:
        """Copies this rank's parameters to the masters where they differ, because the program has changed them."""
        if self.masters is not self.own:
            self.masters.copy_(torch.where(self.masters.to(self.dtype) == self.own, self.masters, self.own.float()))

    def adopt(self) -> None:
        """Adopts loaded parameters: masters keep their extra bits where they round to the same value."""
        self.follow()
        self.refresh_host()

    # --- pruning: elements that are not sent --------------------------------------------------------------------------

    def prune(self, kept_E: torch.Tensor) -> None:
        """Sets all but the kept elements to zero for good: from now on, only these are sent.

        Args:
            kept_E: Whether each element of `flat` is kept. Elements that earlier calls have pruned stay pruned.
        """
        if self.kept is None:
            self.kept = torch.ones(self.layout.elements, dtype=torch.bool, device=self.device)
            for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
                part = self.kept[slot.first : slot.first + slot.count].view(parameter.shape)
                # The hook holds only the mask, which later calls update in place: it must not hold its parameter.
                parameter.register_hook(lambda gradient, part=part: _masked(gradient, part))  # type: ignore[no-untyped-call]
        self.kept &= kept_E.to(self.device)
        with torch.no_grad():
            for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
                if parameter.grad is not None:
                    part = self.kept[slot.first : slot.first + slot.count].view(parameter.shape)
                    parameter.grad.masked_fill_(~part, 0.0)
        self._lay_out()
        self.clear_pruned()
        self.host_flat = self._host(self.flat, self.travels)
        self.refresh_host()
        if self.grads.numel():
            self.host_grads = self._host(self.grads, self.travels)
            self.host_own_grads = self._host(self.own_grads, self.spans[self.rank][1])

    @torch.no_grad()
    def clear_pruned(self) -> None:
        """Sets pruned elements to zero again: some optimizers change them although their gradients are zero."""
        if self.kept is not None:
            self.flat.masked_fill_(~self.kept, 0.0)
            if self.masters is not self.own:
                self.masters.masked_fill_(~self.kept.narrow(0, *self._owned), 0.0)

    def _lay_out(self) -> None:
        """Computes the positions of the elements that are sent, in `flat` and in the network's memory."""
        self.spans = self.layout.spans
        """First element and number of elements of each owner's shard in `host_flat`."""
        self.travels = self.layout.elements
        """Number of elements of `host_flat`."""
        if self.kept is None:
            return
        (self._kept_indices,) = torch.nonzero(self.kept, as_tuple=True)
        firsts = [first for first, _ in self.layout.spans]
        ends = [first + count for first, count in self.layout.spans]
        bounds = torch.tensor([firsts, ends], device=self.device)
        begins, stops = torch.searchsorted(self._kept_indices, bounds).tolist()
        self.spans = tuple((begin, stop - begin) for begin, stop in zip(begins, stops, strict=True))
        self.travels = self._kept_indices.numel()
        first, count = self.spans[self.rank]
        self._own_kept_indices = self._kept_indices[first : first + count] - self.layout.spans[self.rank][0]

    def kept_indices(self, first: int, count: int) -> torch.Tensor | None:
        """Returns the positions, within a range of `flat`, of the elements that are sent; None if all are."""
        return None if self.kept is None else torch.nonzero(self.kept.narrow(0, first, count), as_tuple=True)[0]

    def _where(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns the positions of the elements that are sent, in a vector like `flat` or like `masters`."""
        return self._kept_indices if vector.numel() == self.layout.elements else self._own_kept_indices

    def release_gradients(self) -> None:
        """Frees the memory of gradients, for sessions that leave gradients where torch puts them."""
        self.grads = self.host_grads = self.own_grads = self.host_own_grads = self.grads.new_empty(0)
        self.step_grads = self.own_grads
        self.grad_views = []

    # --- steps during a running backward ------------------------------------------------------------------------------

    @property
    def uses_copy(self) -> bool:
        """Whether `flat` is a copy, and the model computes with other memory."""
        return self._model_flat is not None

    @torch.no_grad()
    def switch_to_copy(self) -> None:
        """Switches `flat` to a copy of the parameters, so that the model's own do not change while it computes."""
        if self._model_flat is None:
            if self._copy_flat.shape != self.flat.shape:
                self._copy_flat = torch.empty_like(self.flat)
            self._copy_flat.copy_(self.flat)
            self._model_flat = self.flat
            self._use_memory(self._copy_flat)

    @torch.no_grad()
    def switch_to_model(self) -> None:
        """Copies the parameters back to the model, and switches `flat` to the model's memory."""
        if self._model_flat is not None:
            self._model_flat.copy_(self.flat)
            home, self._model_flat = self._model_flat, None
            self._use_memory(home)

    def _use_memory(self, flat: torch.Tensor) -> None:
        self.flat = flat
        if not self.is_staged:
            self.host_flat = flat
        is_master = self.masters is self.own
        self.own = self.shard(flat, self.rank)
        if is_master:
            self.masters = self.own

    # --- to and from the network's memory -----------------------------------------------------------------------------

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> list[Event]:
        """Begins to copy the sent elements of a vector like `flat` or `masters` to the network's memory.

        The copy is complete when the returned events have happened.
        """
        if self.kept is not None:
            source = source.index_select(0, self._where(source))
        if not self.on_gpu:
            target.copy_(source)
            return []
        visit = DeviceCopies(self.device)
        visit.fetch_into(target, source)
        return [event for event in (visit.fetched(),) if event is not None]

    def copy_from_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies received values into a vector like `flat` or `masters`; on a GPU, in order on its current stream."""
        if self.kept is None:
            target.copy_(source, non_blocking=True)
        else:
            target.zero_().index_copy_(0, self._where(target), source.to(target, non_blocking=True))

    def taken(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns a copy in main memory of the sent elements of a vector like `flat` or `masters`."""
        values = vector if self.kept is None else vector.index_select(0, self._where(vector))
        return values.detach().to("cpu", copy=True)

    def copy_others_from_host(self) -> None:
        """Copies all parameters but this rank's shard from the network's memory."""
        first, count = self.spans[self.rank]
        for begin, end in ((0, first), (first + count, self.travels)):
            values = self.host_flat[begin:end]
            if self.kept is None:
                self.flat[begin:end].copy_(values, non_blocking=True)
            else:
                self.flat.index_copy_(0, self._kept_indices[begin:end], values.to(self.device, non_blocking=True))

    def refresh_host(self) -> None:
        """Copies the model's parameters to the network's memory."""
        if self.is_staged:
            self.host_flat.copy_(self.taken(self.flat))

    def _host(self, like: torch.Tensor, travels: int) -> torch.Tensor:
        """Returns network memory for a vector: the vector itself, unless values are staged."""
        if not self.is_staged:
            return like
        return torch.zeros(travels, dtype=like.dtype, device="cpu", pin_memory=self.on_gpu)


def _masked(gradient: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return (gradient.to_dense() if gradient.is_sparse else gradient).masked_fill(~kept, 0.0)
