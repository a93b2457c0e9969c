"""The base of sessions under a `RankPolicy`: every rank runs the user's optimizer on a model of its own."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn

from stormtorch.collectives import Group, Pending
from stormtorch.policies.ledger import Row
from stormtorch.policies.policy import RankPolicy, overrides
from stormtorch.runtime.averages import Averages
from stormtorch.runtime.bucket import Bucket
from stormtorch.runtime.buffers import buffers_of
from stormtorch.runtime.drift_samples import apart
from stormtorch.runtime.handover import hand_over
from stormtorch.runtime.members import Epoch
from stormtorch.runtime.reports import Report
from stormtorch.runtime.rounds import Rounds
from stormtorch.runtime.session import Session
from stormtorch.staging.order import Order


class ReplicatedSession(Session):
    """A session whose rounds exchange one vector per bucket: the parameters or the gradients.

    Args: See `Session`.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, name: str, policy: RankPolicy
    ) -> None:
        super().__init__(model, optimizer, group, name, policy)
        self.policy = policy
        self.buckets = buckets = self.make_buckets(policy.bucket_mb, whole=False)
        self._rounds = rounds = Rounds(
            *(group, name, self.subgroup, optimizer, policy, buckets, len(self.parameters)),
            every=policy.every,
            without=_without(policy),
        )
        if not rounds.members.restarted:
            self.agree(buckets)
            rounds.agree()
        self._averages = Averages(policy, buckets, self.exchanged, Order(), group)
        self._groups = rounds.channels("mean")
        chunks = [self._averages.chunks_of(owner) for owner in range(group.size)]
        rounds.open(chunks, [0] * group.size)
        self._order = torch.Generator(device="cpu").manual_seed(policy.seed)
        self._orders: dict[int, list[int]] = {}
        self._row = Row(0)
        self._samples_S = rounds.drift.read()
        self._buffers = buffers_of(model)
        self.ledger.attend(group.rank, self.wait)

    @abstractmethod
    def exchanged(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the vector of a bucket that ranks exchange, and the memory that the network reads and writes."""

    # --- a round -----------------------------------------------------------------------------------------------------

    def begin(self, bucket: Bucket) -> None:
        """Begins to exchange a bucket's vector."""
        group = self._groups[bucket.index]
        if not self._orders:
            # All at once: buckets may begin in another order on another rank, and must have the same owners there.
            self._orders = {each.index: self.policy.order(group.size, self._order) for each in reversed(self.buckets)}
        order = self._orders.pop(bucket.index)
        turned = group if order == list(range(group.size)) else group.turned(order)
        self._averages.start(bucket, turned, self.steps * group.size + group.rank)

    def tell(self, step: int, digest: int) -> Pending:
        """Begins to send reports about the previous round."""
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
        """Learns who is there and what was lost. Returns False if this rank is cut off from the others."""
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

    def note(self, row: Row, waited_s: float) -> None:
        """Completes the row of a round."""
        averages = self._averages
        row.gradients, row.broadcast = averages.up.fractions(), averages.down.fractions()
        row.effective_batch, row.variance_inflation = averages.effective_batch, averages.variance_inflation
        row.broadcast_wait_s = waited_s
        row.bytes_sent = self.bytes_sent()
        self.ledger.add(row)
        self._row = Row(self.steps)

    def sample(self, number: int) -> None:
        """Reads the elements by which replicas are compared in a round, the same ones on all ranks."""
        self._rounds.drift.choose(number)
        self._samples_S = self._rounds.drift.read()

    # --- ranks that return -------------------------------------------------------------------------------------------

    def come_back(self) -> None:
        """Asks to be let in, and begins the first epoch that includes this rank."""
        epoch = self._rounds.members.ask_in()
        self._row.events.append(str(epoch))
        self.enter(epoch)

    @torch.no_grad()
    def enter(self, epoch: Epoch) -> None:
        """Begins an epoch together with the ranks that return. New processes get another rank's model."""
        rounds = self._rounds
        rounds.enter(epoch)
        self._groups = rounds.channels("mean")
        self._order.manual_seed(self.policy.seed + epoch.number)
        self._orders.clear()
        self._averages.clear()
        self._averages.present = len(epoch.members)
        new = [peer for peer, restarted in epoch.joins.items() if restarted]
        if new:
            hand_over(self, self.buckets, epoch, new, rounds.certain, whole=True)
            rounds.hand_settings(epoch, new)
        self.sample(epoch.step)


def _without(policy: RankPolicy) -> str:
    """Says what training goes on without where a rank is missing."""
    if overrides(policy, "order"):
        return f"its {policy.sends}"
    return f"its {policy.sends}, and the blocks that it owns are not averaged until it returns"
