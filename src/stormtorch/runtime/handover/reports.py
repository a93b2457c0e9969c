"""Per-step reports between ranks: a few numbers, sent alongside the gradients so that they add no wait."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stormtorch import collectives
from stormtorch.collectives import Group, Pending
from stormtorch.exchange.reliability import Reliability
from stormtorch.runtime.memory.scaling import MOST_GROWTH, UNKNOWN, Scale

_HEADER = 17
# Steps travel modulo this, so that a float32 holds them exactly.
_STEPS = 1 << 20


class ShardReport(NamedTuple):
    """What a rank reports of its own shard, so that a standby can repeat its steps."""

    resync: int = 0
    """What owners must send their standbys besides gradients, according to the sender: a `standby.Resync`."""
    seed: int = 0
    """Seed of the random numbers that the sender's optimizer draws in this step."""
    values: int = 0
    """Fingerprint of the shard after the last step, in rounds in which standbys compare."""
    state: int = 0
    """Fingerprint of the shard's optimizer state, in the same rounds; under a `RankPolicy`, the number of the
    checkpoint that the sender's memories come from."""


NO_SHARD = ShardReport()


@dataclass(frozen=True, slots=True)
class Report:
    """Report of one rank, the sender, to another. P parameters, S samples, C chunks of the receiver's shards."""

    not_finite: bool
    """Whether the sender's gradients contain an infinity or a NaN."""
    alarm: bool
    """Whether the sender's guard demands an exact broadcast."""
    broadcast_missing: float
    """Fraction of the receiver's last broadcast that the sender lost; negative if there was none, or an exact one."""
    gradients_missing: float
    """Fraction of the receiver's last gradients that the sender lost; negative if there were none."""
    update_variance: float
    """Mean square of the sender's own last update; NaN if its shard is empty."""
    samples_S: torch.Tensor
    """The sender's copies of the elements that all ranks compare."""
    used_P: torch.Tensor
    """Whether each parameter has a gradient at the sender."""
    wanted_C: torch.Tensor
    """Whether the receiver must send each chunk of its shards exactly."""
    settings: int = 0
    """Digest of the sender's optimizer settings; 0 if they are not compared."""
    shard: ShardReport = NO_SHARD
    """What the sender's standby needs."""
    speed: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Measured speed of the sender: see `shard_sizing.Speed`."""
    given: float = 1.0
    """Fraction of its buckets for which the sender contributes gradients in this step; less than 1 if it is late."""
    took_s: float = 0.0
    """Seconds from having parameters to the sender's last gradients; the time so far in this step if that is longer."""
    lost_before_parity: float = -1.0
    """Fraction of the receiver's last chunks that were lost before parity recovered any, in stages without
    retransmission; negative if there were none."""
    scale: Scale = UNKNOWN
    """Loss scale of the sender's gradients."""


class Reports:
    """Sends a report to every rank and receives one from each.

    Args:
        group: Ranks that take part.
        reliability: Reliability of the exchange.
        parameters: Number of parameters.
        samples: Number of elements that ranks compare.
        chunks: Number of chunks of each owner's shards that a report may request.
    """

    def __init__(
        self, group: Group, reliability: Reliability, parameters: int, samples: int, chunks: Sequence[int]
    ) -> None:
        self.group = group
        self._reliability = reliability
        self._parameters = parameters
        self._samples = samples
        self._chunks = chunks
        self._writing = [_Message(parameters, samples, chunks[peer]) for peer in range(group.size)]
        self._reading = [_Message(parameters, samples, chunks[group.rank]) for _ in range(group.size)]
        self._sent = [each.memory for each in self._writing]
        self._received = [each.memory for each in self._reading]
        self._step = -1

    def begin(self, step: int, reports: Sequence[Report | None]) -> Pending:
        """Begins to send a report to each rank; None, at this rank's own position, sends nothing."""
        self._step = step % _STEPS
        for report, message in zip(reports, self._writing, strict=True):
            if report is not None:
                self._write(report, message)
        for message in self._reading:
            message.header[0] = -1.0
        return collectives.all_to_all(self.group, self._received, self._sent, reliability=self._reliability)

    def read(self, peer: int) -> Report | None:
        """Reads a rank's report after the exchange; None if it did not arrive or is malformed."""
        message = self._reading[peer]
        header = message.header.tolist()
        if header[0] != self._step or not all(map(math.isfinite, (*header[:4], *header[5:]))):
            return None  # not arrived, or malformed: its numbers must not be used
        flags = int(header[1])
        samples_S = torch.from_numpy(message.samples.copy())
        used_P = _unpack(message.used, self._parameters)
        wanted_C = _unpack(message.wanted, self._chunks[self.group.rank])
        parameters, gradients = min(header[2], 1.0), min(header[3], 1.0)
        return Report(
            *(bool(flags & 1), bool(flags & 2), parameters, gradients, header[4]),
            *(samples_S, used_P, wanted_C, int(header[5])),
            ShardReport(min(flags >> 2 & 3, 2), *(int(each) for each in header[12:15])),
            tuple(header[6:9]),
            *(min(max(header[9], 0.0), 1.0), max(header[10], 0.0), min(header[11], 1.0)),
            Scale(header[15], min(max(header[16], 0.0), MOST_GROWTH)),
        )

    def _write(self, report: Report, message: "_Message") -> None:
        flags = float(report.not_finite + 2 * report.alarm + 4 * report.shard.resync)
        numbers = [self._step, flags, report.broadcast_missing, report.gradients_missing, report.update_variance]
        numbers += [report.settings, *report.speed, report.given, report.took_s, report.lost_before_parity]
        numbers += [*report.shard[1:], *report.scale]
        message.header[:] = numbers
        message.samples[:] = report.samples_S.numpy()
        _pack(report.used_P, message.used)
        _pack(report.wanted_C, message.wanted)


class _Message:
    """The memory of one report, with its parts as numpy arrays: writing those is much faster than writing tensors."""

    def __init__(self, parameters: int, samples: int, chunks: int) -> None:
        middle = _packed_bytes(parameters)
        length = _HEADER + samples + (middle + _packed_bytes(chunks)) // 4
        self.memory = torch.zeros(length, dtype=torch.float32, device="cpu")
        numbers: npt.NDArray[np.float32] = self.memory.numpy()
        self.header, self.samples = numbers[:_HEADER], numbers[_HEADER : _HEADER + samples]
        packed = numbers[_HEADER + samples :].view(np.uint8)
        self.used, self.wanted = packed[:middle], packed[middle:]


def _packed_bytes(flags: int) -> int:
    return -(-flags // 32) * 4


def _pack(flags: torch.Tensor, packed: npt.NDArray[np.uint8]) -> None:
    bits = np.packbits(flags.numpy(), bitorder="little")
    packed[: bits.size] = bits  # the rest is never written


def _unpack(packed: npt.NDArray[np.uint8], count: int) -> torch.Tensor:
    flags: Any = np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)
    return torch.from_numpy(flags)
