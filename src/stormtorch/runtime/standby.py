"""A standby: a rank that follows the owner of another shard step by step, so that nothing is lost if the owner dies.

The owner sends its averaged gradient exactly, as its optimizer is about to use it. The standby runs the same optimizer
on the same values, one step later: the gradient travels while parameters and the next gradients do. So a standby costs
1/(2(n-1)) more traffic at n ranks, the memory of one more shard, and the time of its optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

import torch
from torch import nn

from stormtorch import collectives
from stormtorch.collectives import Group, Pending
from stormtorch.runtime.bucket import Bucket
from stormtorch.runtime.holdings import Holding, State
from stormtorch.runtime.layout import Piece
from stormtorch.runtime.shards import MASTER, widened
from stormtorch.staging.order import Order


def standby_of(shard: int, members: int, standbys: int) -> int | None:
    """Returns the place, among the members, of the standby of a shard; None if it has none.

    Two ranks have none: each would hold everything.
    """
    return (shard + 1) % members if standbys and members >= 3 else None


class Standby:
    """Follows the owner before this rank in the list of members, and lets the one after it follow this rank.

    Args:
        optimizer: The user's optimizer, prepared.
        groups: Numbers of the parameters in each of its groups.
        buckets: Buckets of this rank.
        holding: The shard of the owner that this rank follows, as it is now.
        whole: Whether pieces are whole parameters, with their shape.
        shapes: Shape of each parameter.
        channel: Group of the members, for this purpose alone.
        order: Starts exchanges once data has left the GPU.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[Sequence[int]],
        buckets: Sequence[Bucket],
        holding: Holding,
        *,
        whole: bool,
        shapes: Sequence[torch.Size],
        channel: Group,
        order: Order,
    ) -> None:
        self._optimizer = optimizer
        self._buckets = buckets
        self._channel = channel
        self._order = order
        self._layouts, self._masters = holding.layouts, holding.masters
        self.shard = holding.shard
        """Number of the shard that this rank follows."""
        self._grads = [torch.zeros_like(each) for each in holding.masters]
        spans = [layout.spans[self.shard] for layout in holding.layouts]
        self._places = [bucket.places(*span) for bucket, span in zip(buckets, spans, strict=True)]
        """Places in the shard of what travels, by bucket; None where all of it does."""
        self._rooms = [
            _room(each, places) if each.is_cuda or places is not None else each
            for each, places in zip(self._grads, self._places, strict=True)
        ]
        self._gone = [
            None if bucket.kept is None else ~bucket.kept.narrow(0, *span)
            for bucket, span in zip(buckets, spans, strict=True)
        ]
        # Gradients of a GPU on their way to this rank's standby.
        self._messages = {
            bucket.index: torch.empty_like(bucket.host_own_grads, pin_memory=True)
            for bucket in buckets
            if bucket.on_gpu
        }
        self._pieces: list[tuple[int, Piece, nn.Parameter]] = []
        self._state: defaultdict[Any, Any] = defaultdict(dict)
        # Some optimizers keep numbers of their own beside the state of parameters.
        kept: dict[Any, Any] = dict(optimizer.state)
        self._state.update({key: value for key, value in kept.items() if not isinstance(key, torch.Tensor)})
        by_parameter: dict[int, list[nn.Parameter]] = {}
        for bucket, layout in enumerate(holding.layouts):
            begin, _ = layout.spans[self.shard]
            for piece in layout.pieces(self.shard):
                values = holding.masters[bucket].narrow(0, piece.first - begin, piece.count)
                stand_in = nn.Parameter(values.view(shapes[piece.parameter]) if whole else values)
                self._pieces.append((bucket, piece, stand_in))
                by_parameter.setdefault(piece.parameter, []).append(stand_in)
                given = holding.state_of(bucket, piece)
                if given:
                    self._state[stand_in] = {name: widened(value, stand_in) for name, value in given.items()}
        self._groups = [[each for number in members for each in by_parameter.get(number, [])] for members in groups]
        self._settings: list[dict[str, Any]] = []
        self._extra: dict[str, Any] = {}
        self._used: Sequence[bool] = ()
        self._sending: dict[int, Future[Sequence[Pending]] | Sequence[Pending]] = {}
        self._receiving: list[Pending] = []
        self._refilling: list[Pending] = []
        self._values: list[torch.Tensor] = []
        self.behind = 0
        """Updates of the owner that did not arrive here, as it died while it sent them."""

    def before_step(self, used: Sequence[bool], *, refill: bool) -> None:
        """Sends this rank's gradients to its own standby, and begins to receive those of the owner it follows.

        Args:
            used: Whether each parameter has a gradient on any rank.
            refill: Whether owners also send their parameters, as a program has changed them; the same on all ranks.
        """
        self._used = used
        # A scheduler changes them before the gradient has come.
        self._settings = [
            {name: value if name == "params" else _copied(value) for name, value in group.items()}
            for group in self._optimizer.param_groups
        ]
        given = self._optimizer.__dict__
        self._extra = {name: _copied(given[name]) for name in ("grad_scale", "found_inf") if name in given}
        after = (self._channel.rank + 1) % self._channel.size
        if refill:
            self._send_values(after)
        for bucket in self._buckets:
            if bucket.host_own_grads.numel():
                self.sent(bucket)
                self._send(bucket, after)
            if self._rooms[bucket.index].numel():
                self._receiving.append(
                    collectives.receive(self._channel, self._rooms[bucket.index], self.shard, tag=bucket.index)
                )

    @torch.no_grad()
    def _send(self, bucket: Bucket, after: int) -> None:
        # The optimizer may write into its gradients: copy them first.
        moments = []
        if bucket.on_gpu:
            message = self._messages[bucket.index]
            moments = bucket.fetch(message, bucket.own_grads)
            for moment in moments:
                # The optimizer waits for the copy; the program does not.
                torch.cuda.current_stream(bucket.device).wait_event(cast(torch.cuda.Event, moment))
        else:
            message = bucket.taken(bucket.own_grads)

        def begin() -> list[Pending]:
            return [collectives.send(self._channel, message, after, tag=bucket.index)]

        begun = self._order.begin(begin, moments)
        self._sending[bucket.index] = begun  # type: ignore[assignment]  # it holds what `begin` returns

    def _send_values(self, after: int) -> None:
        """Sends this rank's parameters to its standby, and begins to receive those of the owner it follows."""
        begin = len(self._buckets)  # tags below are those of gradients
        for bucket in self._buckets:
            values = bucket.masters.detach().to("cpu", copy=True)  # the optimizer is about to change them
            if values.numel():
                self._refilling.append(collectives.send(self._channel, values, after, tag=begin + bucket.index))
            room = torch.empty(self._masters[bucket.index].shape, dtype=torch.float32, device="cpu")
            self._values.append(room)
            if room.numel():
                self._refilling.append(collectives.receive(self._channel, room, self.shard, tag=begin + bucket.index))

    @property
    def told(self) -> bool:
        """Whether the gradients of the present step are on their way."""
        return bool(self._settings)

    @torch.no_grad()
    def load(self, state_of: Callable[[Piece], State] | None, buckets: Sequence[Bucket]) -> None:
        """Takes over loaded parameters, and the optimizer's state if that was loaded. All ranks load the same.

        Args:
            state_of: Returns the loaded state of a piece; None if only parameters were loaded.
            buckets: Buckets that hold the loaded parameters.
        """
        self.follow()
        for bucket, piece, stand_in in self._pieces:
            given = {} if state_of is None else state_of(piece)
            master = given.pop(MASTER, None)
            loaded = buckets[bucket].flat.narrow(0, piece.first, piece.count).float()
            if master is not None:
                loaded = master.to(loaded.device).reshape(-1)
            elif buckets[bucket].dtype != torch.float32:
                # As the owner does: keep the extra bits where the loaded value is the rounded one.
                own = stand_in.detach().reshape(-1)
                loaded = torch.where(own.to(buckets[bucket].dtype) == loaded.to(buckets[bucket].dtype), own, loaded)
            stand_in.copy_(loaded.view(stand_in.shape))
            if state_of is not None:
                self._state[stand_in] = {
                    name: value.to(stand_in.device, torch.float32)
                    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == stand_in.shape
                    else value
                    for name, value in given.items()
                }

    def sent(self, bucket: Bucket) -> None:
        """Waits until a bucket's gradients have been sent, as their memory is about to be written."""
        sending = self._sending.pop(bucket.index, None)
        if sending is not None:
            for each in sending.result() if isinstance(sending, Future) else sending:
                each.wait()

    @torch.no_grad()
    def follow(self) -> None:
        """Repeats the last step of the owner, unless that has been done."""
        for bucket in self._buckets:
            self.sent(bucket)
        if not self._settings:
            return
        settings, self._settings = self._settings, []
        receiving, self._receiving = self._receiving, []
        refilling, self._refilling = self._refilling, []
        values, self._values = self._values, []
        arrivals = [arrival for each in (*receiving, *refilling) for arrival in each.wait()]
        if any(arrival.arrived < 1.0 for arrival in arrivals):
            self.behind += 1
            return
        for masters, came in zip(self._masters, values, strict=False):
            masters.copy_(came)
        for grads, room, places in zip(self._grads, self._rooms, self._places, strict=True):
            if places is not None:
                grads.index_copy_(0, places, room.to(grads.device))
            elif room is not grads:
                grads.copy_(room)
        for home, piece, stand_in in self._pieces:
            begin, _ = self._layouts[home].spans[self.shard]
            view = self._grads[home].narrow(0, piece.first - begin, piece.count).view(stand_in.shape)
            stand_in.grad = view if self._used[piece.parameter] else None
        self._step(settings)
        for masters, gone in zip(self._masters, self._gone, strict=True):
            if gone is not None:
                masters.masked_fill_(gone, 0.0)

    def _step(self, settings: list[dict[str, Any]]) -> None:
        optimizer = self._optimizer
        kept = dict(optimizer.__dict__)
        groups = [{**each, "params": params} for each, params in zip(settings, self._groups, strict=True)]
        optimizer.__dict__.update(param_groups=groups, state=self._state, **self._extra)
        try:
            plain_step(optimizer)()
        finally:
            for name in self._extra:
                optimizer.__dict__.pop(name, None)
            optimizer.__dict__.update(kept)

    def holding(self) -> Holding:
        """Returns what this rank holds of the shard that it follows. It stays valid until the next `follow`."""
        states = {(bucket, piece): dict(self._state.get(stand_in, {})) for bucket, piece, stand_in in self._pieces}
        return Holding(self.shard, self._layouts, self._masters, lambda bucket, piece: states[bucket, piece])


def plain_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Returns the step of the user's optimizer without the hooks that belong to its own parameters."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]  # torch wraps it when it makes the optimizer
    return lambda: step(optimizer)


def _room(like: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    count = like.numel() if places is None else places.numel()
    return torch.empty(count, dtype=like.dtype, pin_memory=like.is_cuda, device="cpu")


def _copied(value: Any) -> Any:
    """Returns a setting as it is now: schedulers change tensors in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def can_follow(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a standby can repeat the optimizer's steps: not if it has another optimizer within itself."""
    return not any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values())
