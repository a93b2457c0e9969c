"""Barrier before a call of all ranks: each rank announces which call it makes, and after how many steps.

A barrier has two exchanges. In the second, ranks confirm which messages they received in the first. A rank that times
out after `collective_wait_s` also posts the second exchange, to cancel: a later rank then finds its first message
without a confirmation, and does not wait for it. So every barrier uses two sequence numbers of the channel on every
rank, however it ends.

The exchanges after the barrier use another channel. A failed call may have left ranks at different sequence numbers
there, so all ranks first skip to the highest one.
"""

from __future__ import annotations

import contextlib
import struct
from typing import NamedTuple

import torch

from stormtorch import collectives
from stormtorch.collectives import Group
from stormtorch.errors import ExchangeTimeout, Interrupted, StormError
from stormtorch.exchange.reliability import Reliability

SERVES_ONLY, MODEL_STATE, EXACT_MODEL, OPTIMIZER_STATE, LEAVES = range(5)
NAMES = (
    "a call of another rank",
    "model.state_dict()",
    "exact()",
    "optimizer.state_dict()",
    "destroy_process_group() or the end of its program",
)
"""Names of calls, by number."""
_COUNT = 5  # numbers in a rank's message
_FORMAT = f"{_COUNT}f"
# Steps and sequence numbers travel as two float32s each, in base 2^20, so that they stay exact.
_LOW = 1 << 20
_CANCELLED = 0.0
_CANCEL_TIMEOUT_S = 1e-3


class BarrierMessage(NamedTuple):
    """What a rank announces when it enters the barrier."""

    call: int
    steps: int
    sequence: int
    """Next sequence number on the channel of the exchanges after the barrier."""

    @property
    def is_request(self) -> bool:
        """Whether the rank makes a call itself; False if it leaves or only serves the calls of others."""
        return self.call not in (SERVES_ONLY, LEAVES)

    @property
    def of_optimizer(self) -> bool:
        """Whether the call is for the optimizer's state rather than the model."""
        return self.call == OPTIMIZER_STATE

    def numbers(self) -> list[float]:
        """Encodes the message as float32 numbers."""
        return [float(each) for each in (self.call, *divmod(self.steps, _LOW), *divmod(self.sequence, _LOW))]

    @classmethod
    def read(cls, numbers: list[float]) -> BarrierMessage | None:
        """Decodes a message; None if it did not arrive."""
        if numbers[0] < 0.0:
            return None
        call, steps, steps_low, sequence, sequence_low = map(int, numbers)
        return cls(call, steps * _LOW + steps_low, sequence * _LOW + sequence_low)


class Barrier:
    """The barrier of one session's ranks.

    Args:
        channel: Group of the ranks, for the barrier's exchanges alone.
        group: Group of the same ranks for the exchanges after the barrier.
        reliability: Reliability of the barrier's exchanges.
        wait_s: Wait limit in seconds; then an error is raised.
    """

    def __init__(self, channel: Group, group: Group, reliability: Reliability, wait_s: float) -> None:
        self.channel = channel
        self.group = group
        self._reliability = reliability
        self._wait_s = wait_s

    def pending_messages(self) -> list[BarrierMessage]:
        """Returns the messages of ranks that wait in a barrier which this rank has not entered."""
        firsts = [payload for _, payload in self.channel.posted_by_peers()]
        messages = [
            BarrierMessage.read(list(struct.unpack(_FORMAT, each))) for each in firsts if len(each) == 4 * _COUNT
        ]
        return [each for each in messages if each is not None]

    def wait_for_all(self, call: int, steps: int) -> dict[int, BarrierMessage] | None:
        """Waits until all ranks have entered the barrier.

        Returns:
            The message of each rank that arrived; None if a rank cancelled or ranks received different messages.

        Raises:
            ExchangeTimeout: A rank did not arrive in time.
        """
        own = BarrierMessage(call, steps, self.group.reserve(0)[1])
        try:
            rows = self._gather(own.numbers(), self._wait_s)
        except Interrupted:
            raise  # the channel ends with the view, so no cancellation is needed
        except BaseException as error:
            with contextlib.suppress(StormError):
                self._gather([_CANCELLED], _CANCEL_TIMEOUT_S)
            if isinstance(error, ExchangeTimeout):
                raise self._timeout_error(call, error) from error
            raise
        found = {peer: message for peer, row in enumerate(rows) if (message := BarrierMessage.read(row)) is not None}
        confirmed = self._gather([float(len(found))], self._wait_s)
        if any(confirmed[peer] != [float(len(found))] for peer in found):
            return None
        self.group.reserve(max(message.sequence for message in found.values()) - own.sequence)
        return found

    def _gather(self, own: list[float], timeout_s: float) -> list[list[float]]:
        channel = self.channel
        rows = [torch.full((len(own),), -1.0, device="cpu") for _ in range(channel.size)]
        rows[channel.rank].copy_(torch.tensor(own, device="cpu"))
        collectives.all_gather(
            channel, rows, rows[channel.rank], reliability=self._reliability, timeout_s=timeout_s
        ).wait()
        return [row.tolist() for row in rows]

    def _timeout_error(self, call: int, error: ExchangeTimeout) -> ExchangeTimeout:
        rank = self.channel.rank
        late = ExchangeTimeout(
            f"rank {rank}: {NAMES[call]} has waited {self._wait_s:g} s (collective_wait_s): every rank must "
            "make this call, or wait for others in backward() or a collective, before its next step; "
            f"{str(error).removeprefix(f'rank {rank}: ')}"
        )
        late.culprit = error.culprit
        return late
