"""Sessions under a `RankPolicy`: every rank has a model and an optimizer of its own, and exchanges one or the other."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import nn

from stormtorch import collectives
from stormtorch.collectives import Group, Op, Pending
from stormtorch.policies.ledger import Row
from stormtorch.policies.policy import RankPolicy
from stormtorch.reliability import EXACT, Reliability
from stormtorch.runtime.averages import Averages
from stormtorch.runtime.bucket import Bucket
from stormtorch.runtime.buffers import buffers_of
from stormtorch.runtime.calls import EXACT_MODEL, NAMES, Calls
from stormtorch.runtime.drift_samples import apart
from stormtorch.runtime.gate import Gate
from stormtorch.runtime.gradients import Gradients
from stormtorch.runtime.handover import hand_over
from stormtorch.runtime.members import Epoch
from stormtorch.runtime.reports import Report
from stormtorch.runtime.rounds import Rounds
from stormtorch.runtime.session import Session
from stormtorch.staging.order import Order
from stormtorch.transport.waiting import doing


class ReplicatedSession(Session):
    """What both kinds have in common: a round is an exchange of one vector per bucket; arguments as of `Session`."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: RankPolicy
    ) -> None:
        super().__init__(model, optimizer, group, name, policy)
        self.policy = policy
        self.buckets = buckets = self.make_buckets(policy.bucket_mb, whole=False)
        self._rounds = rounds = Rounds(
            *(group, name, self.subgroup, optimizer, policy, buckets, len(self.parameters)),
            every=policy.every,
            without=f"its {policy.sends}",
        )
        if not rounds.members.restarted:
            self.agree(buckets)
            rounds.agree()
        self._averages = Averages(policy, buckets, self.exchanged, Order(), group)
        self._groups = rounds.channels("mean")
        chunks = [self._averages.chunks_of(owner) for owner in range(group.size)]
        rounds.open(chunks, [0] * group.size)
        self._order = torch.Generator(device="cpu").manual_seed(policy.seed)
        self._row = Row(0)
        self._samples_S = rounds.gauge.read()
        self._buffers = buffers_of(model)
        self.ledger.attend(group.rank, self.wait)

    @abstractmethod
    def exchanged(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """The vector of a bucket that ranks exchange, and the memory of it that the network reads and writes."""

    # --- a round -----------------------------------------------------------------------------------------------------

    def begin(self, bucket: Bucket) -> None:
        """Begins to exchange a bucket's vector."""
        group = self._groups[bucket.index]
        order = self.policy.order(group.size, self._order)
        turned = group if order == list(range(group.size)) else group.turned(order)
        self._averages.start(bucket, turned, self.steps * group.size + group.rank)

    def tell(self, step: int, digest: int) -> Pending:
        """Begins to tell the others of the round before this one."""
        averages = self._averages

        def report_to(peer: int) -> Report:
            down, up = averages.down.fraction(peer), averages.up.fraction(peer)
            nothing = torch.empty(0, dtype=torch.bool)
            return Report(
                not_finite=False,
                alarm=False,
                broadcast_missing=-1.0 if down is None else 1.0 - down,
                gradients_missing=-1.0 if up is None else 1.0 - up,
                update_variance=0.0,
                samples_S=self._samples_S,
                used_P=torch.zeros(len(self.parameters), dtype=torch.bool),
                wanted_C=nothing,
                settings=digest,
            )

        telling = self._rounds.tell(step, report_to)
        averages.clear()
        return telling

    def hear(self, telling: Pending, row: Row, step: int, digest: int) -> bool:
        """Learns who is there and what was lost; false if this rank is cut off from the others."""
        rounds, averages = self._rounds, self._averages
        reports = rounds.hear(telling, row, step, digest)
        if reports is None:
            return False
        averages.present = self.group.size - len(row.missing)
        rounds.losses.hear(reports, guarded=False, resent=(0, 0))
        averages.losses = [each.value for each in rounds.losses.gradients]
        row.loss = rounds.losses.broadcast.value
        row.pair_drift = apart(self._samples_S, [report.samples_S for report in reports.values()])
        return True

    def note(self, row: Row, waited_s: float, step: int) -> None:
        """Completes the row of a round, and reads the numbers by which replicas are compared in the next one."""
        averages = self._averages
        row.gradients, row.broadcast = averages.up.fractions(), averages.down.fractions()
        row.effective_batch, row.variance_inflation = averages.effective_batch, averages.variance_inflation
        row.broadcast_wait_s = waited_s
        row.bytes_sent = self.bytes_sent()
        self.ledger.add(row)
        self._row = Row(self.steps)
        self._rounds.gauge.choose(step + 1)
        self._samples_S = self._rounds.gauge.read()

    # --- ranks that return -------------------------------------------------------------------------------------------

    def come_back(self) -> None:
        """Asks to be let in, and begins the epoch in which this rank is."""
        epoch = self._rounds.members.ask_in()
        self._row.events.append(str(epoch))
        self.enter(epoch)

    @torch.no_grad()
    def enter(self, epoch: Epoch) -> None:
        """Begins an epoch together with those that return. New processes get another rank's model."""
        rounds = self._rounds
        rounds.enter(epoch)
        self._groups = rounds.channels("mean")
        self._order.manual_seed(self.policy.seed + epoch.number)
        self._averages.present = len(epoch.members)
        new = [peer for peer, restarted in epoch.joins.items() if restarted]
        if new:
            hand_over(self, self.buckets, epoch, new, rounds.certain, whole=True)
            rounds.hand_settings(epoch, new)
        rounds.gauge.choose(epoch.step)
        self._samples_S = rounds.gauge.read()


class ModelSession(ReplicatedSession):
    """A session whose ranks exchange parameters after every so many steps."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: RankPolicy
    ) -> None:
        super().__init__(model, optimizer, group, name, policy)
        for bucket in self.buckets:
            bucket.release_gradients()
        self._telling: Pending | None = None
        self._digest = 0
        self._entering = False
        self._gate = Gate(model, self.buckets, self._averages.finish, self._passed, overlap=policy.overlap)
        # GradScaler skips a step by not calling it, and the other ranks would wait for this one's model. An optimizer
        # that says it can unscale is called all the same.
        self._unscales = not getattr(optimizer, "_step_supports_amp_scaling", False)
        optimizer.__dict__["_step_supports_amp_scaling"] = True
        self._calls = Calls(
            self._rounds.meeting(),
            steps=lambda: self.steps,
            ready=lambda: self._gate.is_open and not self._entering,
            serve=self._take_part,
        )
        if self._rounds.members.restarted:
            self.come_back()

    def exchanged(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """The parameters."""
        return bucket.flat, bucket.host_flat

    def complete_gradients(self) -> None:
        """Does nothing: gradients are not exchanged."""

    def before_step(self, *, closure: bool) -> None:
        """Waits for parameters that are on their way: the optimizer is about to change them."""
        self._gate.open()
        self._calls.forget()
        found_inf = getattr(self.optimizer, "found_inf", None)
        if self._unscales and found_inf is not None:
            self._unscale(skip=bool(found_inf), scale=getattr(self.optimizer, "grad_scale", None))
            self.optimizer.__dict__.update(found_inf=None, grad_scale=None)

    def _unscale(self, *, skip: bool, scale: torch.Tensor | None) -> None:
        """Does what GradScaler leaves to the optimizer; without gradients, the step changes nothing."""
        for parameter in self.parameters:
            if skip:
                parameter.grad = None
            elif parameter.grad is not None and scale is not None:
                parameter.grad.mul_(scale.double().reciprocal().float())

    @torch.no_grad()
    def after_step(self) -> None:
        """Begins a round after every so many local steps."""
        self.steps += 1
        self._buffers.remember()
        if self.steps % self.policy.every:
            return
        self._row.step = self.steps - 1
        for bucket in reversed(self.buckets):
            bucket.bring_home()
            self.begin(bucket)
        self._digest = self._rounds.settings.digest(anywhere=True)
        self._telling = self.tell(self.steps, self._digest)
        epoch = self._rounds.members.look(self.steps)
        if epoch is not None:
            self._row.events.append(str(epoch))  # now, as the row may be complete when the gate has closed
        self._gate.close()
        if epoch is not None:
            self._gate.open()
            self.enter(epoch)

    def _passed(self) -> None:
        """Completes a round: all parameters have arrived, or are lost."""
        telling, self._telling = self._telling, None
        assert telling is not None
        row = self._row
        here = self.hear(telling, row, self.steps, self._digest)
        self.note(row, self._gate.waited_s, self.steps)
        if not here:
            self.come_back()

    def enter(self, epoch: Epoch) -> None:
        """Begins an epoch; a rank that returns goes on at the others' step."""
        self._entering = True
        self.steps = epoch.step
        super().enter(epoch)
        self._calls.meeting = self._rounds.meeting()
        self._calls.forget()
        self._entering = False

    # --- for the user ------------------------------------------------------------------------------------------------

    def arriving(self) -> bool:
        """Whether parameters are on their way."""
        return not self._gate.is_open

    def zero_grad(self, set_to_none: bool) -> None:
        """Forgets all gradients."""
        torch.optim.Optimizer.zero_grad(self.optimizer, set_to_none)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Changes nothing: backward exchanges nothing anyway."""
        return contextlib.nullcontext()

    def loaded(self) -> None:
        """Forgets what calls and buffers have kept: it is of what was there before."""
        self._calls.forget()
        self._buffers.remember()

    def wait(self) -> None:
        """Returns when the last round has ended."""
        self._gate.open()

    @torch.no_grad()
    def synchronise(self, call: int = EXACT_MODEL) -> None:
        """Gives every rank that calls it the mean of all models."""
        with doing(NAMES[call]):
            self._gate.open()
        with self._calls.call(call) as (present, kept):
            if kept is None:
                self._take(self._means(present))
                self._buffers.average(self._calls.group, self._certain(present), self._rounds.members.lowest)
            else:
                taken: tuple[list[torch.Tensor], torch.Tensor | None] = kept  # type: ignore[assignment]  # `_take_part`'s
                self._take(taken[0])
                self._buffers.become(taken[1])

    def _certain(self, present: list[int]) -> Reliability:
        """Exact sums, with the same bits on all ranks, unless a rank is missing that they would wait for."""
        return EXACT if len(present) == self.group.size else self._rounds.certain

    def _means(self, present: list[int]) -> list[torch.Tensor]:
        means = [bucket.flat.detach().to("cpu", copy=True) for bucket in self.buckets]
        for values in means:
            collectives.all_reduce(self._calls.group, values, Op.AVG, reliability=self._certain(present)).wait()
        return means

    def _take(self, means: list[torch.Tensor]) -> None:
        for bucket, values in zip(self.buckets, means, strict=True):
            bucket.flat.copy_(values)

    def _take_part(self, _call: int, present: list[int]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Takes part in a call that others make; this rank keeps its own model."""
        means = self._means(present)
        return means, self._buffers.give(self._calls.group, self._certain(present), self._rounds.members.lowest)

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """Within it, the parameters are the mean of all models; afterwards each rank has its own again."""
        self.bring_home()
        self._gate.open()
        own = [bucket.flat.clone() for bucket in self.buckets]
        self.synchronise()
        try:
            yield
        finally:
            with torch.no_grad():
                self._take(own)


class GradientSession(ReplicatedSession):
    """A session whose ranks exchange gradients before each step, and apply what they got."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: RankPolicy
    ) -> None:
        super().__init__(model, optimizer, group, name, policy)
        self._gradients = Gradients(self.buckets, self.begin, self._finish)
        self._gradients.end = self.backward_ended
        self._gradients.wanted = self.wants_exchange
        self._waited_s = 0.0
        if self._rounds.members.restarted:
            self.come_back()

    def exchanged(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients."""
        return bucket.grads, bucket.host_grads

    def _finish(self) -> None:
        began = time.perf_counter()
        self._row = Row(self.steps, events=self._row.events)  # of an earlier backward of this step, or a return
        while not self._exchange(self._row):
            # What is lost is this rank itself: it comes in again, and gives the gradients that it has.
            self.come_back()
            for bucket in self.buckets:
                self.begin(bucket)
        self._waited_s = time.perf_counter() - began

    def _exchange(self, row: Row) -> bool:
        digest = self._rounds.settings.digest()
        telling = self.tell(self.steps, digest)
        for bucket in self.buckets:
            self._averages.finish(bucket)
        return self.hear(telling, row, self.steps, digest)

    def complete_gradients(self) -> None:
        """Ends the exchange of gradients, unless `no_sync` forbids it."""
        if self._gradients.syncing:
            self._gradients.complete()

    def before_step(self, *, closure: bool) -> None:
        """Waits for gradients, unless a closure will make them."""
        if not closure:
            self._gradients.complete()

    def after_step(self) -> None:
        """Completes the step: every rank has applied what it got."""
        row = self._row
        row.step = self.steps
        self.steps += 1
        epoch = self._rounds.members.look(self.steps)
        if epoch is not None:
            row.events.append(str(epoch))
        self.note(row, self._waited_s, self.steps)
        if epoch is not None:
            self.enter(epoch)

    def enter(self, epoch: Epoch) -> None:
        """Begins an epoch; a rank that returns goes on at the others' step."""
        self.steps = epoch.step
        super().enter(epoch)

    def zero_grad(self, set_to_none: bool) -> None:
        """Forgets all gradients."""
        self._gradients.clear(set_to_none)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Within it, backward exchanges nothing."""
        return self._gradients.no_sync()

    def wait(self) -> None:
        """Returns at once: parameters are never on their way."""

    def loaded(self) -> None:
        """Does nothing: parameters are views of the buckets."""

    def synchronise(self, call: int = EXACT_MODEL) -> None:
        """Does nothing: there is no common value, and every rank keeps its own."""
