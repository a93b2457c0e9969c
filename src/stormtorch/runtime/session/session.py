"""The session: base class of every policy's runtime on one rank. It holds model and optimizer; hooks call it."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from stormtorch import collectives
from stormtorch.collectives import Group
from stormtorch.collectives.base import objects
from stormtorch.collectives.base.group import NodeLayout
from stormtorch.collectives.base.objects import complete
from stormtorch.errors import Interrupted, StormError
from stormtorch.exchange.waiting import in_call
from stormtorch.policies.policy import Policy
from stormtorch.runtime.handover.reports import Report
from stormtorch.runtime.members import given
from stormtorch.runtime.members.auxiliary_state import AuxiliaryState
from stormtorch.runtime.members.iterations import iterations_of
from stormtorch.runtime.members.membership import Left, SessionMembership
from stormtorch.runtime.members.prepare_checks import check_model, check_parameters
from stormtorch.runtime.members.prepared_optimizer import trained
from stormtorch.runtime.members.served_collectives import EXACT_MODEL
from stormtorch.runtime.members.session_collectives import SessionCollectives
from stormtorch.runtime.memory import personal
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.memory.layout import Layout, Slot, plan
from stormtorch.runtime.memory.scaling import LossScale, Scale
from stormtorch.runtime.recording.recorder import Recorder
from stormtorch.telemetry.ledger import Ledger, LedgerRow

_log = logging.getLogger("stormtorch")

# Keys of what a rank sends in the handshake of a view: how often it has pruned,
_PRUNINGS = "stormtorch/prunings"
# its loss scale,
_SCALE = "stormtorch/scale"
# what its optimizer keeps beside the state of parameters,
_BESIDE = "stormtorch/beside"
# digests of the model, optimizer and policy that it has prepared,
_PREPARED = "stormtorch/prepared"
# and the parameters that its program has frozen since `prepare`.
_FROZEN = "stormtorch/frozen"
_JOINED_MESSAGE = (
    "this process has joined a running job, with the others' parameters, buffers, optimizer and settings: what the "
    "program itself keeps, as schedulers, averages or slow weights, comes along only by session.carry()"
)
# Channels of small messages that steps wait for. They use the job's priority, as the session's may be low.
_SMALL_CHANNELS = frozenset({"begin/settings", "calls", "here", "meet", "norms", "settle", "weights"})

# Weak on both sides: the optimizer and the model's hooks keep a session alive, and the session keeps the model.
_sessions: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Session]]] = weakref.WeakKeyDictionary()


class Session(SessionCollectives, ABC):
    """A prepared model and optimizer on one rank. Subclasses implement the kinds of policies.

    Args:
        model: The user's model.
        optimizer: The user's optimizer.
        group: The ranks that train together.
        name: First part of the names of the session's channels, unique on the transport.
        policy: The user's policy.
    """

    splits_optimizer = False
    """Whether each rank runs the optimizer only on its shard of the parameters."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: Policy
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.group = group
        self.name = name
        self.ledger = Ledger()
        self.steps = 0
        """Optimizer steps so far."""
        self.membership = SessionMembership(group, name, policy.give_up_s, policy.priority)
        self.iterations = iterations_of(group.transport)
        self.recorder: Recorder | None = None
        """Makes the records of this process; None on a simulated network."""
        self._carried: dict[str, tuple[Callable[[], bytes], Callable[[dict[int, bytes]], None]]] = {}
        self._has_left = self._applying_view = False
        self._reported: dict[int, dict[str, bytes]] = {}
        """What members sent when this process joined, kept until the first step for later calls of `carry`."""
        self._on_step: list[Callable[[int], None]] = []
        self.machines: dict[int, str] = {}
        """Identity of the machine of each rank, as that rank reported it; empty if unknown."""
        self._bytes_sent = 0
        self._parity: dict[str, int] = {}
        # Once the session is gone, the transport may forget its channels, as no other session uses their names.
        self._channels_used: set[str] = set()
        weakref.finalize(self, group.transport.channels.forget, self._channels_used).atexit = False
        self._given = given.describe(model, optimizer, policy)
        self.given_policy = policy
        """The policy as the user gave it."""
        self.parameters = trained(optimizer)
        """All parameters of the optimizer as the user gave it, in the order of its groups."""
        self.personal = [each for each in self.parameters if personal.is_personal(each)]
        """Parameters that never leave this rank. No bucket has them."""
        self.shared = [each for each in self.parameters if not personal.is_personal(each)]
        """All other parameters."""
        self.frozen = [each for each in self.shared if not each.requires_grad]
        """Parameters that required no gradient at `prepare`, so that no bucket has them."""
        self.buckets: list[Bucket] = []
        self.prunings = 0
        """How often parameters have been pruned. A rank with fewer prunings receives masks when a view begins."""
        self._pruned_at = (0, 0)
        """Step before which parameters were pruned last, and how many times since the step before it."""
        self._pruned_ahead = (0, 0)
        """The same for prunings that members made before this process joined: its own program repeats these calls."""
        self.auxiliary_state = AuxiliaryState(optimizer, self.parameters)
        """What the optimizer keeps beside the state of parameters."""
        self._join_messages: list[str] = []
        """Warnings about how this process joined, to be logged once the view has begun."""
        self.scaling = LossScale()
        """The loss scale of the gradients, where ranks exchange gradients."""
        self.checked_left_out = False
        """Whether the check for parameters without a prepared optimizer has been made."""
        check_model(model, self.parameters)
        check_parameters(self.shared)

    def backward_ended(self) -> None:
        """Completes the gradients of all optimizers of the model, in the same order on all ranks.

        One backward may produce gradients for different optimizers on different ranks.
        """
        for session in sessions_of(self.model):
            session.complete_gradients()

    def wants_exchange(self) -> bool:
        """Whether backward may exchange gradients: scripts for DDP forbid it by `model.require_backward_grad_sync`."""
        return bool(getattr(self.model, "require_backward_grad_sync", True))

    # --- for subclasses to implement --------------------------------------------------------------------------------

    @abstractmethod
    def complete_gradients(self) -> None:
        """Completes the exchange of gradients, if there is one and `no_sync` does not forbid it."""

    @abstractmethod
    def before_step(self, *, closure: bool) -> None:
        """Called before the optimizer steps. With a closure, gradients are computed within the step."""

    def gradients_final(self, *, within: bool = False) -> None:
        """Called when gradients have the values that the optimizer is about to use.

        Args:
            within: Whether a closure has computed them within the optimizer's step, which may call it again.
        """
        return

    def settle_gradients(self) -> None:  # only a sharded optimizer has gradients of its own
        """Copies the program's changes of its gradients since backward to the optimizer, if that has others."""

    def whole_groups(self) -> list[dict[str, Any]] | None:
        """Returns the optimizer's groups with the model's parameters; None if its own groups have them."""
        return None

    def moves(self, method: Callable[[], Any]) -> Any:
        """Calls a method of the optimizer that may move parameters outside a step, on all state that this rank has."""
        return method()

    def closure_begins(self) -> None:
        """Called when the optimizer calls its closure."""
        return

    @abstractmethod
    def after_step(self) -> None:
        """Called after the optimizer has stepped, before the program's own hooks."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool) -> None:
        """Clears all gradients."""

    def shard_prints(self) -> dict[int, list[int]]:
        """Returns fingerprints of this rank's shard and of the one that it follows, by owner.

        They cover values and optimizer state after the last step, if the program has changed nothing since.
        """
        return {}

    @abstractmethod
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context within which backward exchanges nothing."""

    @abstractmethod
    def synchronise(self, call: int = EXACT_MODEL) -> None:
        """Sets the parameters on every rank to the exact ones under the policy. A collective: all ranks take part.

        Args:
            call: Number of the user's call that needs them, as in `stormtorch.runtime.members.barrier`.
        """

    @abstractmethod
    def wait(self) -> None:
        """Waits until the parameters of the last step have arrived or are lost."""

    @abstractmethod
    def loaded(self) -> None:
        """Called after `load_state_dict` has changed the model's values."""

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """Enters a context within which the parameters are the exact ones under the policy. All ranks take part."""
        self.reattach_parameters()
        self.synchronise()
        yield

    def optimizer_state(self, local: dict[str, Any]) -> dict[str, Any]:
        """Returns the state dict of the whole optimizer, given this rank's."""
        return local

    def local_state(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's shard of a state dict of the whole optimizer."""
        return whole

    def forget_personal(self, *, set_to_none: bool) -> None:
        """Clears the gradients of personal parameters."""
        for parameter in self.personal:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = parameter.grad.detach().zero_()

    def arriving(self) -> bool:
        """Whether parameters are in flight."""
        return False

    def reattach_parameters(self) -> None:
        """Puts parameters back into their buckets, or raises an error where that is impossible."""
        arriving = self.arriving()
        for bucket in self.buckets:
            bucket.reattach_parameters(arriving=arriving)

    # --- for users ----------------------------------------------------------------------------------------------------

    def carry(self, name: str, give: Callable[[], bytes], take: Callable[[dict[int, bytes]], None]) -> None:
        """Exchanges the program's own state between all members whenever a view begins.

        Args:
            name: Name of the state, the same on all ranks.
            give: Returns what this rank sends to the others. New ranks send, too.
            take: Called once the view has begun, with what each member has sent, by rank. In a process that has just
                joined a running job, it is called at once with what the others have sent.
        """
        self._carried[name] = give, take
        if self._reported:
            take({rank: each[name] for rank, each in self._reported.items() if name in each})

    def on_step(self, callback: Callable[[int], None]) -> None:
        """Calls a function after every complete optimizer step, with the number of steps so far."""
        self._on_step.append(callback)

    def record(self, folder: str | Path, *, every_s: float | None = None) -> Path:
        """Writes records of this training to a file, which `stormtorch watch` and `stormtorch ledger` read.

        All ranks may share the folder. STORM_RECORD=FOLDER does the same without a change of the program. If writing
        fails, as on a full disk, training goes on with a warning.

        Args:
            folder: Folder of the run; created if it is missing.
            every_s: Seconds between two records of a kind; None keeps the interval, which is 1 s at first.

        Returns:
            Path of the file.

        Raises:
            ValueError: The folder cannot be written to, or the network is simulated.
        """
        if self.recorder is None:
            raise ValueError("a training on a simulated network makes no records")
        if every_s is not None and not 0.01 <= every_s <= 3600.0:
            raise ValueError(f"every_s must lie in [0.01, 3600], got {every_s}")
        return self.recorder.write_to(folder, every_s)

    def note(self, *, loss: float | torch.Tensor) -> None:
        """Sets the training loss that records show. A tensor is read only when a record is made."""
        if self.recorder is not None:
            self.recorder.note(loss)

    def stepped(self) -> None:
        """Called by subclasses when a step is complete."""
        self._reported = {}
        for callback in self._on_step:
            callback(self.steps)

    def change(self) -> bool:
        """Applies the latest view, together with all its members. Returns False if this rank has missed steps.

        Called between two steps of this rank.

        Raises:
            Left: This rank has transferred what it owned, and may leave.
        """
        self._applying_view = True
        try:
            # The program may be in inference mode, as in an evaluation, but a view allocates memory for training.
            with torch.inference_mode(False), torch.no_grad():
                held = self.begin_latest()
        finally:
            self._applying_view = False
        if self.recorder is not None:
            self.recorder.view(self)
        return held

    @abstractmethod
    def begin_latest(self) -> bool:
        """Applies the latest view, for `change`."""

    def transfer_and_leave(self) -> None:
        """Transfers what this rank owns to the others. Its wish to leave has been announced already."""
        if self._has_left:
            return
        with in_call("leave()"), contextlib.suppress(Left):
            while True:
                self.change()
        self._has_left = True

    def leave(self) -> NoReturn:
        """Ends this session, which has transferred what it owned. This rank's other sessions follow.

        Raises:
            Left: Always.
        """
        self._has_left = True
        rank = self.label(self.group.transport.rank)
        _log.warning("rank %d: has transferred what it owned, and leaves at step %d", rank, self.steps)
        raise Left

    @abstractmethod
    def is_between_steps(self) -> bool:
        """Whether this rank is between two steps, so that a view may begin outside an exchange of gradients."""

    @property
    def has_no_pending_step(self) -> bool:
        """Whether no averaged gradients wait for a step, so that a view may begin with this session."""
        return True

    def can_apply_view(self) -> bool:
        """Whether this session can apply a view before another session's round."""
        return self.has_no_pending_step and not (self._has_left or self._applying_view)

    def switch(self) -> None:
        """Applies the latest view before another session's round."""
        self.change()

    # --- for subclasses ---------------------------------------------------------------------------------------------

    def bytes_sent(self) -> int:
        """Returns the bytes that this rank's transport has sent since the last call."""
        return self._sent_since(self.group.transport.health())

    def _sent_since(self, health: Mapping[str, Any]) -> int:
        before, self._bytes_sent = self._bytes_sent, int(health["bytes_sent"]) + int(health["shared_bytes_sent"])
        return self._bytes_sent - before

    def count_sent(self, row: LedgerRow) -> None:
        """Writes into a row the bytes sent and the counters of parity since the last call."""
        health = self.group.transport.health()
        row.bytes_sent = self._sent_since(health)
        for name in ("parity_bytes", "blocks_saved", "blocks_topped_up", "recovered"):
            now = int(health[name])
            setattr(row, name, now - self._parity.get(name, 0))
            self._parity[name] = now

    def channel(self, name: str, *, interruptible: bool = False) -> Group:
        """Returns a channel of the view's members: a group with its own sequence of exchanges, until the view ends.

        Args:
            name: Name of the channel.
            interruptible: Whether a wait in it ends with `Interrupted` when another view begins for this rank.
        """
        small = name in _SMALL_CHANNELS
        name = f"{self.name}/{self.view.number}/{name}"
        self._channels_used.add(name)
        return self.membership.group(name, self.membership.due if interruptible else None, small=small)

    def round_channel(self, name: str) -> Group:
        """Returns a channel for exchanges of a round, which end with `Interrupted` when the round must be aborted."""
        name = f"{self.name}/{self.view.number}/{name}"
        self._channels_used.add(name)
        return self.membership.group(name, self.must_abort_round)

    def node_layout(self, groups: Sequence[Group]) -> list[NodeLayout] | None:
        """Returns the layout over machines of the view's members, for channels of the view.

        None if the layout does not allow hierarchical exchanges. The result is the same on all members.
        """
        found = [group.by_machine(lambda rank: self.machines.get(rank, "")) for group in groups]
        known = [each for each in found if each is not None]
        self._channels_used |= {part.name for each in known for part in (each.inside, each.between)}
        return known if len(known) == len(groups) else None

    def must_abort_round(self) -> bool:
        """Whether the current round must be aborted: by default, if another view begins with it."""
        return self.membership.due()

    def label(self, rank: int) -> int:
        """Returns the number of a rank in messages and in the ledger: its rank in the group that was prepared."""
        some = rank in self.group.ranks and len(self.group.ranks) < self.group.transport.world
        return self.group.ranks.index(rank) if some else rank

    def labels(self) -> list[int]:
        """Returns the labels of the members, in the order of the view."""
        return [self.label(rank) for rank in self.view.members]

    def describe_view_change(self, before: Sequence[int], after: Sequence[int], newcomers: Sequence[int]) -> str:
        """Describes which ranks have joined, left or returned with the view that the session has begun."""
        self.on_view(newcomers)
        gone = [self.label(rank) for rank in before if rank not in after]
        joined = [self.label(rank) for rank in after if rank not in before]
        back = [self.label(rank) for rank in newcomers if rank in before]
        words = f"view {self.view.number} begins at step {self.steps} with {len(after)} rank{'s' * (len(after) > 1)}"
        for what, ranks in (("gone", gone), ("new", joined), ("back", back)):
            if ranks and before:
                words += f"; rank {', '.join(map(str, ranks))} {'is' if len(ranks) == 1 else 'are'} {what}"
        return words

    def transition_group(self, latest: Any, without: Sequence[int] = ()) -> Group:
        """Returns the group of all ranks that take part in the transition to a view, also those that leave with it.

        Args:
            latest: One of the engine's views.
            without: Members that still wait for the start of an iteration.
        """
        name = f"{self.name}/{latest.number}/moving{'/first' if without else ''}"
        self._channels_used.add(name)
        ranks = [rank for rank in self.membership.takes_part(latest) if rank not in without]
        stop = functools.partial(self.membership.obsolete, latest.number)
        return Group(
            self.group.transport,
            ranks,
            name=name,
            view=latest.number,
            interrupted=stop,
            priority=self.membership.priority,
        )

    def forget_channels(self) -> None:
        """Forgets the channels of earlier views."""
        now = f"{self.name}/{self.view.number}/"
        gone = {name for name in self._channels_used if not name.startswith(now)}
        self.group.transport.channels.forget(gone)
        self._channels_used -= gone

    def given(self) -> dict[str, str]:
        """Returns what this rank sends in the handshake of a view: its own state, and what users of `carry` send."""
        # As text, as torch does not unpack bytes from untrusted data.
        own = {_PREPARED: " ".join(map(str, given.digests(self._given)))}
        if self.prunings:
            own[_PRUNINGS] = " ".join(map(str, (self.prunings, *self._pruned_at)))
        if scale := self.scaling.reported():
            own[_SCALE] = scale
        if self.splits_optimizer and (message := self.auxiliary_state.reported(whole=False)).numel():
            own[_BESIDE] = message.numpy().tobytes().decode("latin-1")
        if frozen := self._frozen_since():
            own[_FROZEN] = " ".join(map(str, sorted(frozen)))
        return own | {name: give().decode("latin-1") for name, (give, _) in self._carried.items()}

    def taken(self, reported: dict[int, dict[str, str]]) -> None:
        """Passes on what members sent in the handshake of a view, to users of `carry`."""
        self._reported = {
            rank: {name: value.encode("latin-1") for name, value in each.items()} for rank, each in reported.items()
        }
        for name, (_, take) in self._carried.items():
            take({rank: each[name] for rank, each in self._reported.items() if name in each})

    def check_fits(self, reported: Mapping[str, Any]) -> None:
        """Compares this process's model, optimizer and policy with a member's, before it receives anything.

        Raises:
            ValueError: They differ.
        """
        theirs = map(int, str(reported["carried"][_PREPARED]).split())
        for what, own, other in zip(self._given, given.digests(self._given), theirs, strict=True):
            if own != other:
                raise ValueError(
                    f"rank {self.group.transport.rank} joins a running job with another {what} than the job's: "
                    "give all processes the same"
                )

    def joined(self, reported: Mapping[str, Any]) -> None:
        """Adopts a member's state of the steps that this rank has missed, as it is new or returns.

        Args:
            reported: Loss scale, what the optimizer keeps beside the state of parameters, and frozen parameters.
        """
        carried = reported["carried"]
        self.scaling.joined(str(carried.get(_SCALE, "")))
        self._join_messages = [_JOINED_MESSAGE] if self.iterations.is_first_join() else []
        self._freeze({*map(int, str(carried.get(_FROZEN, "")).split())})
        message = str(carried.get(_BESIDE, "")).encode("latin-1")
        self.load_auxiliary_state(torch.tensor(list(message), dtype=torch.uint8, device="cpu"))

    def load_auxiliary_state(self, message: torch.Tensor) -> None:
        """Adopts what a member's optimizer keeps beside the state of parameters."""
        lacking = self.auxiliary_state.take(message)
        if lacking:
            self._join_messages.append(
                f"{type(self.optimizer).__name__} keeps {', '.join(map(repr, lacking))} beside the state of "
                "parameters, which cannot be sent: this process starts without it, so its steps may differ from others'"
            )

    def _frozen_since(self) -> set[int]:
        """Returns the numbers of the parameters that the program has frozen since `prepare`."""
        others = {*map(id, self.frozen), *map(id, self.personal)}
        pairs = enumerate(self.parameters)
        return {number for number, each in pairs if not each.requires_grad and id(each) not in others}

    def _freeze(self, frozen: set[int]) -> None:
        """Freezes the parameters that the others' programs have frozen since `prepare`, and no others."""
        changed = [self.parameters[number] for number in frozen ^ self._frozen_since()]
        for each in changed:
            each.requires_grad_(not each.requires_grad)
        if changed:
            names = {id(each): name for name, each in self.model.named_parameters()}
            reported = ", ".join(names.get(id(each), "a parameter") for each in changed)
            self._join_messages.append(
                f"requires_grad of {reported} was set to its value on the other ranks, whose programs changed it"
            )

    def log_absent_ranks(self, row: LedgerRow) -> None:
        """Records and logs which ranks of the group were gone before this session began."""
        gone = [self.label(rank) for rank in self.group.ranks if rank not in self.view.members]
        if gone:
            ranks, is_are = ", ".join(map(str, gone)), "is" if len(gone) == 1 else "are"
            here = len(self.view.members)
            self._join_messages.append(
                f"rank {ranks} {is_are} gone since before prepare(): training begins with {here} "
                f"rank{'s' * (here > 1)}. Has every rank called prepare()?"
            )
            self.log_join_messages(row)

    def log_join_messages(self, row: LedgerRow) -> None:
        """Records and logs the warnings about how this process joined."""
        words, self._join_messages = self._join_messages, []
        for each in words:
            row.events.append(each)
            _log.warning("rank %d: %s", self.label(self.group.transport.rank), each)

    def agree_on_scale(self, own: Scale, reports: Mapping[int, Report], row: LedgerRow) -> bool:
        """Agrees on the loss scale with the members. Returns whether the gradients had different scales."""
        labels = self.labels()
        scales = {labels[place]: report.scale for place, report in reports.items()}
        scales[self.label(self.group.transport.rank)] = own
        words = self.scaling.agree(scales)
        if words:
            row.events.append(words)
            _log.warning("rank %d: %s", self.label(self.group.transport.rank), words)
        return bool(words)

    def sync_masks(self, reported: Mapping[int, Mapping[str, Any]], *, new: bool) -> bool:
        """Broadcasts the pruning masks to members that have missed prunings. All members take part.

        Args:
            reported: What each rank sent in the handshake of the view, which this rank has applied.
            new: Whether this rank is new or returns, so that its program is at the beginning of the step.

        Returns:
            Whether this rank received masks.

        Raises:
            Interrupted: A rank is gone, and another view begins without it.
        """
        members = self.view.members
        gathered = [tuple(map(int, reported[rank]["carried"].get(_PRUNINGS, "0 0 0").split())) for rank in members]
        counts = [count for count, *_ in gathered]
        if min(counts) == max(counts):
            return False
        group = self.channel("masks", interruptible=True)
        for bucket in self.buckets:
            kept = torch.ones(bucket.layout.elements, dtype=torch.uint8, device="cpu")
            if bucket.kept is not None:
                kept.copy_(bucket.kept)
            self.broadcast_values(group, kept, counts.index(max(counts)))
            if self.prunings < max(counts) and not bool(kept.all()):
                bucket.prune(kept.bool())
        learns = self.prunings < max(counts)
        self.prunings, *pruned_at = max(gathered)
        self._pruned_at = pruned_at[0], pruned_at[1]
        if new:
            self._pruned_ahead = self._pruned_at
        return learns

    def count_pruning(self) -> None:
        """Counts a pruning."""
        step, times = self._pruned_at
        self._pruned_at = self.steps, times + 1 if step == self.steps else 1
        self.prunings += 1

    def pruned_already(self) -> bool:
        """Whether the others had made this call of `prune` before this process joined and received their masks."""
        step, times = self._pruned_ahead
        if step != self.steps or times == 0:
            return False
        self._pruned_ahead = step, times - 1
        return True

    @abstractmethod
    def prune(self, masks: Sequence[torch.Tensor]) -> None:
        """Prunes all buckets; later exchanges carry only what is kept. All ranks take part, between two steps.

        Args:
            masks: Whether each element is kept, by bucket.
        """

    def make_buckets(self, bucket_mb: float, *, whole: bool) -> list[Bucket]:
        """Moves the parameters that require a gradient into buckets, each of one dtype and device.

        Args:
            bucket_mb: Size at which a bucket is full.
            whole: Whether a shard must consist of whole parameters.
        """
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number, parameter in enumerate(self.parameters):
            if parameter.requires_grad and not personal.is_personal(parameter):
                kinds.setdefault((parameter.dtype, parameter.device), []).append(number)
        if not kinds:
            others = " and is not personal" if self.personal else ""
            raise ValueError(f"the optimizer has no parameter that requires a gradient{others}")
        layouts: list[Layout] = []
        for (dtype, _), numbers in kinds.items():
            counts = [self.parameters[number].numel() for number in numbers]
            # Planned for the number of owners at the start, so that parameters have the same slots on newcomers.
            for each in plan(counts, dtype.itemsize, bucket_mb * 1e6, self.owners_at_start, whole=whole):
                slots = tuple(Slot(numbers[slot.parameter], slot.first, slot.count) for slot in each.slots)
                layouts.append(Layout(each.elements, slots, each.spans))
        place = self.group.rank if self.group.rank < self.owners_at_start else 0
        return [Bucket(index, layout, self.parameters, place) for index, layout in enumerate(layouts)]

    @property
    def owners_at_start(self) -> int:
        """Number of ranks with which the job began."""
        return min(self.group.size, self.group.transport.world)

    def agree(self, buckets: Sequence[Bucket]) -> None:
        """Checks that all ranks have prepared the same, and broadcasts the lowest rank's parameters and buffers.

        Raises:
            ValueError: A rank has prepared another model, optimizer or policy than the lowest one.
            StormError: A rank was lost meanwhile.
        """
        group = self.channel("begin", interruptible=True)
        try:
            self._compare(group)
            for bucket in buckets:
                self.broadcast_values(group, bucket.host_flat, 0)
                if bucket.on_gpu:
                    bucket.flat.copy_(bucket.host_flat)
                if bucket.masters is not bucket.own:
                    bucket.masters.copy_(bucket.own)
            self.broadcast_rest(group, buckets, 0, take=True)
        except Interrupted as error:
            raise StormError(
                f"rank {group.transport.rank}: a rank was lost before all had prepared their models: start again"
            ) from error

    @staticmethod
    def broadcast_values(group: Group, values: torch.Tensor, root: int) -> None:
        """Broadcasts the root's values to all ranks.

        Raises:
            Interrupted: A rank is gone, and another view begins without it.
        """
        complete(collectives.broadcast(group, values, root), group)

    @torch.no_grad()
    def broadcast_rest(self, group: Group, buckets: Sequence[Bucket], root: int, *, take: bool) -> None:
        """Broadcasts the root's buffers, and its parameters that are not trained; nothing that is personal.

        Args:
            group: Ranks that take part.
            buckets: Buckets that hold the parameters that are trained.
            root: Rank in the group of the sender.
            take: Whether this rank adopts the values.
        """
        in_buckets = {id(parameter) for bucket in buckets for parameter in bucket.parameters}
        for tensor in personal.shared(self.model):
            if id(tensor) not in in_buckets and tensor.numel():
                values = tensor.detach().to("cpu", copy=True).contiguous()
                self.broadcast_values(group, values, root)
                # Lookup tables, which are equal on all ranks, must not count as changed.
                if take and not torch.equal(values.to(tensor.device), tensor):
                    tensor.copy_(values)

    def _compare(self, group: Group) -> None:
        personal_parts, *digests = given.digests(self._given)
        machine = zlib.crc32(group.transport.machine_of(group.transport.rank).encode())
        # Two digests share one number, so that personal parts do not make the message longer.
        last = machine | personal_parts >> 1 << 32
        all_N = [torch.tensor([*digests, last], dtype=torch.int64, device="cpu") for _ in range(group.size)]
        collectives.all_gather(group, all_N, all_N[group.rank]).wait()
        # Each rank reports its own machine, so that all agree: cards may differ for a while as processes come and go.
        reported = [int(each[-1]) & 0xFFFFFFFF for each in all_N]
        self.machines = {rank: f"{each:08x}" if each else "" for rank, each in zip(group.ranks, reported, strict=True)}
        compared = [[int(each[-1]) >> 32, *each[:-1].tolist()] for each in all_N]
        for what, first, *others in zip(self._given, *compared, strict=True):
            for peer, digest in enumerate(others, 1):
                if digest != first:
                    # All ranks find the same difference, so all take part.
                    gathered = objects.gather(dict(self._given[what]), group)
                    raise ValueError(
                        f"rank {group.ranks[peer]} has prepared another {what} than rank {group.ranks[0]}: "
                        f"{given.difference(gathered[peer], gathered[0])}. Give all ranks the same"
                    )


def register(session: Session) -> None:
    """Adds a session to those of its model."""
    _sessions.setdefault(session.model, []).append(weakref.ref(session))
    session.iterations.add(session)


def sessions_of(model: nn.Module) -> list[Session]:
    """Returns the sessions of a model, one per optimizer; none if it is not prepared."""
    return [session for found in _sessions.get(model, ()) if (session := found()) is not None]


@torch._dynamo.disable(  # type: ignore[no-untyped-call, untyped-decorator]  # torch's
    reason="which parameters are prepared is looked up in weak references, which cannot be compiled"
)
def any_prepared(parameters: Iterable[nn.Parameter], *, in_a_job: bool = False) -> bool:
    """Whether any of the parameters is prepared; with `in_a_job`, only in jobs that this process has not left."""
    given = {id(parameter) for parameter in parameters}
    return any(
        id(parameter) in given
        for model in list(_sessions)
        for session in sessions_of(model)
        if not (in_a_job and getattr(session.group.transport, "closed", False))  # simulated ones are never closed
        for parameter in session.parameters
    )


@contextlib.contextmanager
def combined(contexts: Iterable[contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Enters several contexts as one."""
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield
