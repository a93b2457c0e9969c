"""A standby (hot spare): a rank that replicates another rank's shard step by step, so its state survives the owner.

The owner sends exactly the averaged gradient that its optimizer is about to use. The standby runs the same optimizer on
the same values one step later, so that the gradient travels together with parameters and the next gradients. A standby
costs 1/(2(n-1)) more traffic at n ranks, the memory of one more shard, and the time of its optimizer.

A program may also change values outside steps, as by clamping weights or clearing the optimizer's state: the owner
sends these too (`Resync`). At intervals a standby compares fingerprints of its shard with the owner's, and requests the
whole shard if they differ.
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import IntEnum
from typing import Any, cast

import torch
from torch import nn

from stormtorch import collectives
from stormtorch.collectives import Group, Pending
from stormtorch.collectives.base import objects
from stormtorch.runtime.handover.reports import ShardReport
from stormtorch.runtime.members.auxiliary_state import AuxiliaryState, Path
from stormtorch.runtime.memory import fingerprints
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.layout import Piece
from stormtorch.runtime.memory.randomness import Randomness
from stormtorch.runtime.memory.shard_state import ShardRecord, ShardState, State, build
from stormtorch.runtime.memory.sharded_optimizer import MASTER
from stormtorch.staging.launch_queue import LaunchQueue

_MOST_STEPS = 16
"""Most steps from one comparison with the owner to the next."""


class Resync(IntEnum):
    """What owners send their standbys besides gradients, because the program changed it or a standby lacks it."""

    NOTHING = 0
    VALUES = 1
    ALL = 2
    """Parameters and the optimizer's state."""


def standby_of(shard: int, members: int, standbys: int) -> int | None:
    """Returns the position, among the members, of a shard's standby; None if it has none.

    Two ranks have none: each would hold everything.
    """
    return (shard + 1) % members if standbys and members >= 3 else None


class Standby:
    """Follows the previous member's shard, and sends this rank's own gradients to the next member, its standby.

    Args:
        optimizer: The user's optimizer, prepared.
        groups: Numbers of the parameters in each of its groups.
        buckets: Buckets of this rank.
        shard_state: The followed owner's shard, as it is now.
        whole: Whether pieces are whole parameters, with their shape.
        shapes: Shape of each parameter.
        channel: Group of the members, for standbys alone.
        order: Starts exchanges once data has left the GPU.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[Sequence[int]],
        buckets: Sequence[Bucket],
        shard_state: ShardState,
        *,
        whole: bool,
        shapes: Sequence[torch.Size],
        channel: Group,
        order: LaunchQueue,
    ) -> None:
        self._optimizer = optimizer
        self._buckets = buckets
        self._channel = channel
        self._order = order
        self._whole = whole
        self._layouts, self._masters = shard_state.layouts, shard_state.masters
        self.shard = shard_state.shard
        """Number of the shard that this rank follows."""
        self._grads = [torch.zeros_like(each) for each in shard_state.masters]
        spans = [layout.spans[self.shard] for layout in shard_state.layouts]
        self._kept_indices = [bucket.kept_indices(*span) for bucket, span in zip(buckets, spans, strict=True)]
        """Positions in the shard of the elements that are sent, by bucket; None if all are."""
        self._receive_buffers = [
            _new_buffer(each, kept_indices) if each.is_cuda or kept_indices is not None else each
            for each, kept_indices in zip(self._grads, self._kept_indices, strict=True)
        ]
        self._pruned = [
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
        # Some optimizers also keep values in `state` that belong to no parameter.
        kept: dict[Any, Any] = dict(optimizer.state)
        self._state.update({key: _copied(value) for key, value in kept.items() if not isinstance(key, torch.Tensor)})
        self._auxiliary_state = AuxiliaryState(optimizer, ())
        by_parameter: dict[int, list[nn.Parameter]] = {}
        for bucket, layout in enumerate(shard_state.layouts):
            begin, _ = layout.spans[self.shard]
            for piece in layout.pieces(self.shard):
                values = shard_state.masters[bucket].narrow(0, piece.first - begin, piece.count)
                local_param = nn.Parameter(values.view(shapes[piece.parameter]) if whole else values)
                self._pieces.append((bucket, piece, local_param))
                by_parameter.setdefault(piece.parameter, []).append(local_param)
                self._set_state(local_param, shard_state.state_of(bucket, piece))
        self._settings: list[dict[str, Any]] = []
        self._groups = [[each for number in members for each in by_parameter.get(number, [])] for members in groups]
        self._step_inputs: _StepInputs | None = None
        """Inputs to repeat the current or the last step."""
        self._randomness = Randomness(bucket.device for bucket in buckets)
        self._sending: dict[int, Future[Sequence[Pending]] | Sequence[Pending]] = {}
        self._receiving: list[Pending] = []
        self._resyncing: list[Pending] = []
        self._values: list[torch.Tensor] = []
        self._size: torch.Tensor | None = None
        self._copy_fingerprints: dict[int, fingerprints.Fingerprint] = {}
        self.behind = 0
        """Updates of the owner that did not arrive, because it died while it sent them."""
        self.differs = False
        """Whether the shard is known to differ from the owner's, until the owner has sent all of it."""
        self.mismatches = 0
        """How often a comparison found a difference."""
        self._every = 1
        self._compare_at = 0
        self._resyncs = 0
        self.changes = False
        """Whether the program has changed parameters outside steps, as seen by this rank or reported in a round."""
        self.older = False
        """Whether this rank's copies are too old to show the program's changes to the shard since its last step."""

    def begin(self, own: ShardState, step: int) -> None:
        """Begins a view, or continues from loaded values: from now on, changes by the program are detected.

        Args:
            own: This rank's shard.
            step: Number of the step that comes next.
        """
        self._change_detector, self._reported = fingerprints.ChangeDetector(self._buckets, own), (0, 0)
        self._every, self._compare_at = 1, step + 1
        self.arrived()

    def _set_state(self, local_param: nn.Parameter, given: State) -> None:
        if given:
            self._state[local_param] = dict(given)

    # --- this rank's own shard, for its standby -----------------------------------------------------------------------

    def take(self, used: Sequence[bool], seeds: tuple[int, int], resync: Resync, own: ShardState) -> None:
        """Records what this rank's optimizer is about to use, and seeds the generators for the step.

        Args:
            used: Whether each parameter has a gradient on any rank.
            seeds: Seeds of the random numbers of this rank's step, and of the followed owner's step.
            resync: What owners send besides gradients; the same on all ranks.
            own: This rank's shard.
        """
        gradients = {}
        for bucket in self._buckets:
            self.sent(bucket)
            if bucket.host_own_grads.numel():
                gradients[bucket.index] = self._take_gradients(bucket)
        self._step_inputs = _StepInputs(used, seeds[1], resync, self._optimizer, gradients)
        self._step_inputs.within_objects = self._auxiliary_state.within_objects()
        if resync is Resync.VALUES:
            self._step_inputs.values = [each.detach().to("cpu", copy=True) for each in own.masters]
        elif resync is Resync.ALL:
            records = [
                record.packed()
                for bucket, layout in enumerate(own.layouts)
                for record in own.partition(bucket, *layout.spans[own.shard], whole=self._whole)
            ]
            self._step_inputs.records = objects.pack(records)
        self._randomness.begin(seeds[0])

    @torch.no_grad()
    def _take_gradients(self, bucket: Bucket) -> tuple[torch.Tensor, Sequence[Any]]:
        # The optimizer may write into its gradients: copy them first.
        if not bucket.on_gpu:
            return bucket.taken(bucket.step_grads), ()
        message = self._messages[bucket.index]
        events = bucket.fetch(message, bucket.step_grads)
        for moment in events:
            # The optimizer waits for the copy; the program does not.
            torch.cuda.current_stream(bucket.device).wait_event(cast(torch.cuda.Event, moment))
        return message, events

    def release(self) -> None:
        """Restores the program's random state, after the optimizer's step or before a closure runs again."""
        self._randomness.end()

    @property
    def taken(self) -> bool:
        """Whether `take` has recorded the current step."""
        return self._step_inputs is not None

    def stepped(self, own: ShardState, step: int) -> None:
        """Called when the optimizer has stepped, before the program changes anything.

        Args:
            own: This rank's shard.
            step: Number of the step.
        """
        # A shard without elements shows nothing about the optimizer's use of random numbers.
        self._randomness.end(look=any(each.numel() for each in own.masters))
        self.send()  # what a closure has computed within the step
        self._change_detector = fingerprints.ChangeDetector(self._buckets, own)
        self._reported = fingerprints.of_shard_state(own) if step + 1 >= self._compare_at else (0, 0)

    def report(self, own: ShardState, step: int) -> ShardReport:
        """Returns this rank's report on its shard for the round of a step."""
        if self.differs or self._change_detector.state_changed(own):
            resync = Resync.ALL
        else:
            resync = Resync.VALUES if self._change_detector.values_changed(self._buckets, own) else Resync.NOTHING
        return ShardReport(resync, self._randomness.fresh_seed(step), *self._reported)

    def send(self) -> None:
        """Sends the recorded step to this rank's standby, and begins to receive from the owner that it follows."""
        if self._step_inputs is None or self._step_inputs.sent:
            return
        self._step_inputs.sent = True
        channel, after = self._channel, (self._channel.rank + 1) % self._channel.size
        last = len(self._buckets)  # tags below are those of gradients
        if self._step_inputs.resync is Resync.VALUES:
            for index, values in enumerate(self._step_inputs.values):
                if values.numel():
                    self._resyncing.append(collectives.send(channel, values, after, tag=last + index))
                buffer = torch.empty(self._masters[index].shape, dtype=torch.float32, device="cpu")
                self._values.append(buffer)
                if buffer.numel():
                    self._resyncing.append(collectives.receive(channel, buffer, self.shard, tag=last + index))
        elif self._step_inputs.resync is Resync.ALL:
            records = self._step_inputs.records
            size = torch.tensor([records.numel()], dtype=torch.int64, device="cpu")
            self._size = torch.zeros(1, dtype=torch.int64, device="cpu")
            self._resyncing.append(collectives.send(channel, size, after, tag=last))
            self._resyncing.append(collectives.send(channel, records, after, tag=last + 1))
            self._receiving.append(collectives.receive(channel, self._size, self.shard, tag=last))
        for index, (message, events) in self._step_inputs.gradients.items():

            def begin(message: torch.Tensor = message, index: int = index) -> list[Pending]:
                return [collectives.send(channel, message, after, tag=index)]

            begun = self._order.begin(begin, events)
            self._sending[index] = begun  # type: ignore[assignment]  # it holds what `begin` returns
        for index, buffer in enumerate(self._receive_buffers):
            if buffer.numel():
                self._receiving.append(collectives.receive(channel, buffer, self.shard, tag=index))

    def sent(self, bucket: Bucket) -> None:
        """Waits until a bucket's gradients have been sent, because their memory is about to be written."""
        sending = self._sending.pop(bucket.index, None)
        if sending is not None:
            for each in sending.result() if isinstance(sending, Future) else sending:
                each.wait()

    # --- the shard that this rank follows -----------------------------------------------------------------------------

    @torch.no_grad()
    def follow(self) -> None:
        """Repeats the last step of the followed owner, unless that is done."""
        for bucket in self._buckets:
            self.sent(bucket)
        taken, self._step_inputs = self._step_inputs, None
        if taken is None or not taken.sent:
            return
        receiving, self._receiving = self._receiving, []
        refilling, self._resyncing = self._resyncing, []
        values, self._values = self._values, []
        arrivals = [arrival for each in receiving for arrival in each.wait()]
        records = None
        if taken.resync is Resync.ALL and all(arrival.arrived == 1.0 for arrival in arrivals):
            assert self._size is not None
            records = objects.room(int(self._size), self._channel.ranks[self.shard], self._channel)
            refilling.append(collectives.receive(self._channel, records, self.shard, tag=len(self._buckets) + 1))
        arrivals += [arrival for each in refilling for arrival in each.wait()]
        if any(arrival.arrived < 1.0 for arrival in arrivals):
            self.behind += 1
            return
        for masters, received in zip(self._masters, values, strict=False):
            masters.copy_(received)
        if records is not None:
            self._replace(records)
        for grads, buffer, kept_indices in zip(self._grads, self._receive_buffers, self._kept_indices, strict=True):
            if kept_indices is not None:
                grads.index_copy_(0, kept_indices, buffer.to(grads.device))
            elif buffer is not grads:
                grads.copy_(buffer)
        for index, piece, local_param in self._pieces:
            begin, _ = self._layouts[index].spans[self.shard]
            view = self._grads[index].narrow(0, piece.first - begin, piece.count).view(local_param.shape)
            local_param.grad = view if taken.used[piece.parameter] else None
        self._step(taken)
        for masters, gone in zip(self._masters, self._pruned, strict=True):
            if gone is not None:
                masters.masked_fill_(gone, 0.0)

    def _replace(self, packed: torch.Tensor) -> None:
        """Replaces the followed shard by the owner's, received as records."""
        records = [ShardRecord(*each) for each in objects.unpack(packed)]
        masters, states = build(self.shard, self._layouts, records, self._buckets, whole=self._whole)
        for own, given in zip(self._masters, masters, strict=True):
            own.copy_(given)
        for bucket, piece, local_param in self._pieces:
            self._state.pop(local_param, None)
            self._set_state(local_param, states[bucket, piece])
        self.differs = False

    @torch.no_grad()
    def move(self, method: Callable[[], object], own: ShardState) -> None:
        """Applies a method of the optimizer to the followed shard, as it was just applied to this rank's own.

        Args:
            method: The method.
            own: This rank's shard.
        """
        optimizer = self._optimizer
        kept = dict(optimizer.__dict__)
        groups = [
            {**each, **old, "params": params}
            for each, old, params in zip(optimizer.param_groups, self._settings, self._groups, strict=True)
        ]
        optimizer.__dict__.update(param_groups=groups, state=self._state)
        try:
            method()
        finally:
            optimizer.__dict__.update(kept)
        self._show()
        self._change_detector = fingerprints.ChangeDetector(self._buckets, own)

    def _show(self) -> None:
        """Copies the followed shard into this rank's copies of the parameters."""
        for masters, copies in zip(self._masters, self._followed_copies(), strict=True):
            copies.copy_(masters)
        self.arrived()

    def kept(self) -> tuple[list[torch.Tensor], dict[Any, State]]:
        """Returns a snapshot of the followed shard, before a method of the optimizer changes it."""
        self.follow()
        self._settings = [
            {name: _copied(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        return [each.clone() for each in self._masters], {key: dict(each) for key, each in self._of_parameters()}

    @torch.no_grad()
    def restore(self, kept: tuple[list[torch.Tensor], dict[Any, State]]) -> None:
        """Undoes `move`, given a snapshot of `kept`."""
        for masters, values in zip(self._masters, kept[0], strict=True):
            masters.copy_(values)
        self._state.update(kept[1])
        self._show()

    def _of_parameters(self) -> list[tuple[Any, State]]:
        return [(key, each) for key, each in self._state.items() if isinstance(key, torch.Tensor)]

    def _step(self, taken: _StepInputs) -> None:
        optimizer = self._optimizer
        kept, within = dict(optimizer.__dict__), self._auxiliary_state.within_objects()
        groups = [{**each, "params": params} for each, params in zip(taken.settings, self._groups, strict=True)]
        for name in kept.keys() - taken.attributes.keys() - {"param_groups", "state"}:
            del optimizer.__dict__[name]  # this rank's own step has created it
        optimizer.__dict__.update(taken.attributes, param_groups=groups, state=self._state)
        # They belong to the optimizer's own parameters, and the step of a base class would call them.
        hooks: OrderedDict[int, Any] = OrderedDict()
        optimizer.__dict__.update(_optimizer_step_pre_hooks=hooks, _optimizer_step_post_hooks=hooks)
        self._auxiliary_state.put(taken.within_objects)
        self._randomness.begin(taken.seed)
        try:
            plain_step(optimizer)()
        finally:
            self._randomness.end()
            for name in vars(optimizer).keys() - kept.keys():
                del optimizer.__dict__[name]
            optimizer.__dict__.update(kept)
            self._auxiliary_state.put(within)

    @torch.no_grad()
    def load(self, state_of: Callable[[Piece], State] | None, buckets: Sequence[Bucket]) -> None:
        """Adopts loaded parameters, and the optimizer's state if that was loaded. All ranks load the same.

        Args:
            state_of: Returns the loaded state of a piece; None if only parameters were loaded.
            buckets: Buckets that hold the loaded parameters.
        """
        self.follow()
        for bucket, piece, local_param in self._pieces:
            given = {} if state_of is None else state_of(piece)
            master = given.pop(MASTER, None)
            loaded = buckets[bucket].flat.narrow(0, piece.first, piece.count).float()
            if master is not None:
                loaded = master.to(loaded.device).reshape(-1)
            elif buckets[bucket].dtype != torch.float32:
                # As the owner does: keep the extra bits where the loaded value is the rounded one.
                own = local_param.detach().reshape(-1)
                loaded = torch.where(own.to(buckets[bucket].dtype) == loaded.to(buckets[bucket].dtype), own, loaded)
            local_param.copy_(loaded.view(local_param.shape))
            if state_of is not None:
                self._state[local_param] = {
                    name: value.to(local_param.device, torch.float32)
                    if buckets[bucket].dtype != torch.float32
                    and isinstance(value, torch.Tensor)
                    and value.is_floating_point()
                    and value.shape == local_param.shape
                    else value
                    for name, value in given.items()
                }
        self.arrived()

    # --- comparison with the owner ------------------------------------------------------------------------------------

    def compare(self, owner: ShardReport, resync: Resync, step: int) -> bool:
        """Compares the followed shard with the owner's report, at intervals. Returns False if they differ.

        All ranks compare in the same rounds: often at the beginning of a view and after a full resync, later rarely.

        Args:
            owner: The owner's report of this round, about its last step.
            resync: What owners send in this step besides gradients.
            step: Number of the step.
        """
        equal = True
        self.changes |= resync is not Resync.NOTHING
        if step >= self._compare_at:
            values, state = fingerprints.of_shard_state(self.shard_state())
            # Values that the program has changed since are sent in this step.
            known = owner.values or owner.state
            if known and not self.behind:
                equal = state == owner.state and (values == owner.values or resync is not Resync.NOTHING)
            self._every = min(2 * self._every, _MOST_STEPS)
            self._compare_at = step + self._every
        if resync is Resync.ALL:
            # An optimizer whose steps cannot be repeated would need a full resync at every step.
            self._every = min(1 << self._resyncs, _MOST_STEPS)
            self._resyncs += 1
            self._randomness.needed = True  # the optimizer may draw random numbers now
            self._compare_at = step + self._every
        if not equal:
            self.differs = True
            self.mismatches += 1
        return equal

    def arrived(self, received: Sequence[bool] = ()) -> None:
        """Takes fingerprints of this rank's copies of the followed parameters, before the program changes them.

        Args:
            received: Whether anything arrived for each bucket; empty if for all. If nothing did, as after the owner's
                death, the program's latest change is already in the copy.
        """
        for place, copies in enumerate(self._followed_copies()):
            if not received or received[place]:
                self._copy_fingerprints[place] = fingerprints.of(copies)

    def _followed_copies(self) -> list[torch.Tensor]:
        return [
            bucket.flat.narrow(0, *layout.spans[self.shard])
            for bucket, layout in zip(self._buckets, self._layouts, strict=True)
        ]

    @torch.no_grad()
    def adopt(self) -> None:
        """Adopts this rank's copies of the shard's parameters, which the owner has just sent exactly."""
        for masters, copies in zip(self._masters, self._followed_copies(), strict=True):
            _adopt(masters, copies)
        self.arrived()

    @torch.no_grad()
    def end(self, own: ShardState) -> None:
        """Repeats the last step, and adopts what the program has changed since, because another view begins.

        The program changes this rank's copies of parameters as it does the owner's. Copies that were equal to the shard
        show the change, and the shard adopts it. Copies that are stale because of loss do not show it.

        Args:
            own: This rank's shard.
        """
        self.follow()
        # The program makes the same changes on all ranks: what it did to this rank's state, it did to the owner's.
        self.differs |= self._change_detector.state_changed(own)
        self.changes |= self._change_detector.values_changed(self._buckets, own)
        pairs = zip(self._masters, self._followed_copies(), strict=True)
        for before, (masters, copies) in zip(self._copy_fingerprints.values(), pairs, strict=True):
            up_to_date = fingerprints.same([fingerprints.of(masters.to(copies.dtype))], [before])
            if fingerprints.same([fingerprints.of(copies)], [before]):
                self.older |= not up_to_date
            elif up_to_date:
                _adopt(masters, copies)
            else:
                self.differs = True

    def shard_state(self) -> ShardState:
        """Returns the followed shard. It stays valid until the next `follow`."""
        states = {
            (bucket, piece): dict(self._state.get(local_param, {})) for bucket, piece, local_param in self._pieces
        }
        return ShardState(self.shard, self._layouts, self._masters, lambda bucket, piece: states[bucket, piece])


class _StepInputs:
    """Inputs to repeat a step: this rank's settings, which are also the owner's, and gradients to send to its standby.

    Args:
        used: Whether each parameter has a gradient on any rank.
        seed: Seed of the random numbers of the owner's step.
        resync: What owners send besides gradients.
        optimizer: The user's optimizer, before it steps.
        gradients: This rank's own gradients, by bucket, and the GPU events to wait for before they are read.
    """

    def __init__(
        self,
        used: Sequence[bool],
        seed: int,
        resync: Resync,
        optimizer: torch.optim.Optimizer,
        gradients: dict[int, tuple[torch.Tensor, Sequence[Any]]],
    ) -> None:
        self.used, self.seed, self.resync, self.gradients = used, seed, resync, gradients
        # Copied, because a scheduler changes them before the owner's gradient has arrived.
        self.settings: list[dict[str, Any]] = [
            {name: value if name == "params" else _copied(value) for name, value in group.items()}
            for group in optimizer.param_groups
        ]
        # Some optimizers count their steps in an attribute, and GradScaler passes its scale in one.
        self.attributes = {
            name: _copied(value) for name, value in vars(optimizer).items() if name not in ("param_groups", "state")
        }
        self.within_objects: dict[Path, Any] = {}
        """Values inside objects that the optimizer keeps: `attributes` refers to the same objects."""
        self.sent = False
        self.values: list[torch.Tensor] = []
        self.records = torch.empty(0, dtype=torch.uint8)


def _adopt(masters: torch.Tensor, copies: torch.Tensor) -> None:
    """Copies parameters into the float32 masters, which keep their extra bits where the rounded value is the same."""
    same = masters.to(copies.dtype) == copies
    masters.copy_(torch.where(same, masters, copies.float()))


def plain_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Returns the step of the user's optimizer without the hooks that belong to its own parameters."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]  # torch wraps it when it makes the optimizer
    return lambda: step(optimizer)


def _new_buffer(like: torch.Tensor, kept_indices: torch.Tensor | None) -> torch.Tensor:
    count = like.numel() if kept_indices is None else kept_indices.numel()
    return torch.empty(count, dtype=like.dtype, pin_memory=like.is_cuda, device="cpu")


def _copied(value: Any) -> Any:
    """Copies a setting, because schedulers and steps change tensors and lists in place."""
    if isinstance(value, OrderedDict | nn.Parameter):
        return value  # hooks, and parameters, are not settings
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is dict:
        return {name: _copied(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(each) for each in value)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, random.Random):
        copy = random.Random()
        copy.setstate(value.getstate())
        return copy
    return value


def can_follow(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a standby can repeat the optimizer's steps: not if it wraps another optimizer."""
    return not any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values())
