"""Redundancy control: how much parity (forward error correction) one rank sends, and deadlines of its exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from stormtorch.collectives.wire import Wire
from stormtorch.exchange.reliability import Reliability
from stormtorch.policies import rules
from stormtorch.policies.policy import Policy
from stormtorch.runtime.memory.arrival_counts import ArrivalCounts
from stormtorch.runtime.memory.bucket import Bucket
from stormtorch.runtime.session.adaptive_deadline import AdaptiveDeadline
from stormtorch.runtime.session.packet_losses import PacketLosses


class RedundancyControl:
    """Chooses the redundancy of one rank's messages, step by step; see `Policy.redundancy_of`.

    Each rank decides for the messages that it sends.

    Args:
        policy: The user's policy.
        losses: Losses of this rank's messages; updated when the redundancy changes.
        buckets: Buckets of the session.
        wires: Number format of each bucket.
        chunk_bytes: Payload of a datagram.
    """

    def __init__(
        self, policy: Policy, losses: PacketLosses, buckets: Sequence[Bucket], wires: Sequence[Wire], chunk_bytes: int
    ) -> None:
        self._policy, self._losses = policy, losses
        counts = [(wires[bucket.index], count) for bucket in buckets for _, count in bucket.spans]
        self._chunks = max((wire.chunks(count) for wire, count in counts), default=1) or 1
        plain = Wire(torch.float32, chunk_bytes).per_chunk
        self._up_deadline = AdaptiveDeadline(policy.allowed_loss, exact=policy.up.exact)
        self._down_deadline = AdaptiveDeadline(policy.allowed_loss, exact=policy.down.exact)
        self._narrower = min((wires[bucket.index].per_chunk / plain for bucket in buckets), default=1.0)
        self.up = self._chosen(policy.up, self._up_deadline)
        """Reliability of this rank's gradients."""
        self.down = self._chosen(policy.down, self._down_deadline)
        """Reliability of this rank's parameters."""

    def choose(self, gradients: ArrivalCounts) -> None:
        """Chooses the reliability of the next exchanges, once the losses of a step are known.

        Args:
            gradients: Arrivals of the last gradients, and how long they took.
        """
        self._up_deadline.learn(gradients)
        up, down = (
            self._chosen(self._policy.up, self._up_deadline),
            self._chosen(self._policy.down, self._down_deadline),
        )
        loss = self._losses.raw.value
        self._losses.translate(
            gradients=rules.residual_loss_ratio(loss, self._chunks, _parity(self.up), _parity(up)),
            broadcast=rules.residual_loss_ratio(loss, self._chunks, _parity(self.down), _parity(down)),
        )
        self.up, self.down = up, down

    def watch(self, broadcast: ArrivalCounts) -> None:
        """Takes the arrivals of the last broadcast, which was not exact, and how long they took."""
        self._down_deadline.learn(broadcast)

    def _chosen(self, stage: Reliability, adaptive: AdaptiveDeadline) -> Reliability:
        stage = adaptive.within(stage)
        if stage.budget < 1.0:
            return stage  # with retransmission, the engine itself decides how much parity is worth it
        loss = self._losses.raw.value
        return _with(stage, self._policy.redundancy_of(stage, loss, self._chunks, self._narrower))


@lru_cache(maxsize=64)  # making one is the main cost here, and most steps use that of the step before
def _with(stage: Reliability, redundancy: float) -> Reliability:
    return replace(stage, redundancy=redundancy)


def _parity(stage: Reliability) -> float:
    return 0.0 if stage.redundancy == "auto" else stage.redundancy
