"""Loss models of many links (Gilbert-Elliott chains, traces), drawn at once on one device.

The models are those of the engine's `faults.cpp`, with its meaning of `burst` and of a trace's start, but with other
random numbers. B workers of a block, S shards, C chunks; a column of C is a position in the order of sending.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stormtorch.network.loss import Trace

_LEAST, _SPAN = -(2**31), 2**32


def random_bits(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draws uniform int32 numbers, never the largest: each is below `threshold(p)` with probability p, also 0 and 1."""
    count = 1
    for size in shape:
        count *= size
    # Two numbers from each draw: several times as fast as drawing floats, and finer.
    pairs = torch.empty((count + 1) // 2, dtype=torch.int64, device=generator.device)
    bits = pairs.random_(_LEAST * _SPAN, None, generator=generator).view(torch.int32)[:count]
    return bits.clamp_(max=-_LEAST - 2).view(*shape)


def threshold(p: float) -> int:
    """Returns the threshold below which `random_bits` are with probability p."""
    return min(round(p * _SPAN) + _LEAST, -_LEAST - 1)


def thresholds(p: Tensor) -> Tensor:
    """Returns the thresholds below which `random_bits` are with the probabilities p, in float64."""
    return (p * _SPAN).round_().add_(_LEAST).clamp_(max=-_LEAST - 1).to(torch.int32)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The bounds of messages in a row of chunks."""

    shard_C: Tensor
    """Shard of each chunk, from 0."""
    first_S: Tensor
    """First chunk of each shard."""
    size_S: Tensor
    """Number of chunks in each shard, at least 1."""
    position_C: Tensor
    """Position of each chunk in its shard."""

    @classmethod
    def of(cls, owner_C: Tensor) -> "ShardLayout":
        """Finds the shards: runs of chunks with one owner."""
        begins_C = owner_C.diff(prepend=owner_C[:1] - 1) != 0
        shard_C = begins_C.cumsum(0) - 1
        size_S = shard_C.bincount()
        first_S = size_S.cumsum(0) - size_S
        position_C = torch.arange(owner_C.numel(), device=owner_C.device) - first_S[shard_C]
        return cls(shard_C, first_S, size_S, position_C)

    def rotated(self, rotation_S: Tensor, *, back: bool = False) -> Tensor:
        """Returns the chunk at each position if each shard is sent from its chunk `rotation_S` on.

        With `back`, returns the position of each chunk instead.
        """
        rotation_C = rotation_S[self.shard_C]
        shifted = self.position_C - rotation_C if back else self.position_C + rotation_C
        return self.first_S[self.shard_C] + shifted.remainder_(self.size_S[self.shard_C])


class Chains:
    """Chains with two states, good and bad, one per entry of a matrix. A datagram sent in the bad state is lost.

    Each step draws a random number. A low one sets the state to bad and a high one to good. One in
    between keeps the state, or flips it in a chain that changes more often than chance. So the state depends only on
    the last number that set it and on the flips since, and is found without going step by step. Where no number lies in
    between, steps are independent.
    """

    def __init__(self, p: Tensor, burst: Tensor, generator: torch.Generator) -> None:
        """Draws the first states. `p` and `burst` are float64, mean what they do in `GilbertElliott`, and are valid."""
        enter = torch.where(burst > 1.0, p / ((1.0 - p) * burst).clamp_(min=1e-300), p).clamp_(max=1.0)
        stay = torch.where(burst > 1.0, 1.0 - 1.0 / burst, p)
        self._low, self._high = thresholds(torch.minimum(enter, stay)), thresholds(torch.maximum(enter, stay))
        self._flips = enter > stay
        self.independent = bool((enter == stay).all())
        self._may_flip = bool(self._flips.any())
        self._alike = bool(((p == p[0, 0]) & (burst == burst[0, 0])).all())
        self.only_p = float(p[0, 0]) if self._alike and self.independent else None
        """Loss rate of all links, if equal and without memory; otherwise None."""
        self._generator = generator
        self.bad = random_bits(tuple(p.shape), generator) < thresholds(p)
        """State for the next datagram; initially bad with probability p, the stationary probability."""

    def lost(self, rows: slice, columns_S: Tensor, shards: ShardLayout, *, up: bool, sent_BC: Tensor | None) -> Tensor:
        """Returns which chunks of the next messages are lost, (B, C) in the order of sending, and advances the chains.

        Args:
            rows: Workers of the block: sources on the way up, targets on the way down.
            columns_S: The other end of each shard's links.
            shards: The messages.
            up: Whether the rows send.
            sent_BC: Whether each position is sent; None sends all.
        """
        was_bad_BS = _part(self.bad, rows, columns_S, up)
        chunks = shards.shard_C.numel()
        bits_BC = random_bits((was_bad_BS.shape[0], chunks), self._generator)
        bad_BC = bits_BC < self._spread(self._low, rows, columns_S, shards, up)
        if self.independent:
            return bad_BC
        good_BC = bits_BC >= self._spread(self._high, rows, columns_S, shards, up)
        del bits_BC
        first_S, last_S = shards.first_S, shards.first_S + shards.size_S - 1
        if sent_BC is not None:
            # Only sent datagrams advance a chain: a skipped position has no effect.
            before = torch.arange(-1, chunks - 1, device=sent_BC.device)
            before[first_S] = last_S
            moves_BC = sent_BC.index_select(1, before)
            bad_BC &= moves_BC
            good_BC &= moves_BC
        # Column c advances the chain from position c - 1 to c. At the first position of a message the chain keeps its
        # state; the number of that column advances it after the last position.
        set_BC = bad_BC | good_BC
        end_bad, end_good = bad_BC.index_select(1, first_S), good_BC.index_select(1, first_S)
        end_flip = torch.zeros_like(end_bad)
        if self._may_flip:
            flip_BC = ~set_BC & self._spread(self._flips, rows, columns_S, shards, up)
            if sent_BC is not None:
                flip_BC &= moves_BC
            end_flip = flip_BC.index_select(1, first_S)
            flip_BC.index_fill_(1, first_S, False)
            odd_BC = flip_BC.cumsum(1, dtype=torch.int32).bitwise_and_(1).bool()
        set_BC.index_fill_(1, first_S, True)
        bad_BC.index_copy_(1, first_S, was_bad_BS)
        if self._may_flip:
            bad_BC ^= odd_BC
        code = torch.int16 if 2 * chunks < 2**15 else torch.int32
        when_C = torch.arange(0, 2 * chunks, 2, dtype=code, device=bad_BC.device)
        last_set_BC = (when_C + bad_BC).masked_fill_(set_BC.logical_not_(), -1).cummax(1).values
        bad_BC = last_set_BC.bitwise_and_(1).bool()
        if self._may_flip:
            bad_BC ^= odd_BC
        end_BS = bad_BC.index_select(1, last_S) ^ end_flip
        _whole(self.bad, up)[rows, columns_S] = (end_BS | end_bad) & ~end_good
        return bad_BC

    def _spread(self, matrix: Tensor, rows: slice, columns_S: Tensor, shards: ShardLayout, up: bool) -> Tensor:
        """Returns a property of links for each of their chunks, or one value if all links are alike."""
        if self._alike:
            return matrix[0, 0]
        return _part(matrix, rows, columns_S, up).index_select(1, shards.shard_C)


class Traces:
    """Recorded losses of many links, each replayed in a loop from its own position."""

    def __init__(self, traces: Sequence[Trace], which: Tensor, generator: torch.Generator) -> None:
        """Draws where each link's trace begins. `which` is the number of each link's trace, -1 for none."""
        device = which.device
        self._bits = torch.frombuffer(bytearray(b"".join(each.bits for each in traces)), dtype=torch.uint8).to(device)
        size = torch.tensor([len(each.bits) for each in traces], device=device)
        first = size.cumsum(0) - size
        self.here = which >= 0
        """Whether each link has a trace."""
        at = which.clamp(min=0)
        self._first, self._size = first[at].int(), size[at].int()
        at_random = torch.rand(which.shape, dtype=torch.float64, device=device, generator=generator)
        self.next = (at_random * self._size).int()
        """Position of each link's next datagram in its trace."""

    def lost(self, rows: slice, columns_S: Tensor, shards: ShardLayout, *, up: bool, sent_BC: Tensor | None) -> Tensor:
        """Returns the losses of the next messages, as `Chains.lost` does; undefined for links without a trace."""
        first_BS, size_BS, next_BS = (_part(each, rows, columns_S, up) for each in (self._first, self._size, self.next))
        if sent_BC is None:
            position_BC = shards.position_C.int().expand(next_BS.shape[0], -1)
            count_BS = shards.size_S.int().expand_as(next_BS)
        else:
            upto_BC = sent_BC.cumsum(1, dtype=torch.int32)
            base_BS = (upto_BC - sent_BC.int()).index_select(1, shards.first_S)
            count_BS = upto_BC.index_select(1, shards.first_S + shards.size_S - 1) - base_BS
            position_BC = upto_BC - sent_BC.int() - base_BS.index_select(1, shards.shard_C)
        at_BC = next_BS.index_select(1, shards.shard_C) + position_BC
        at_BC.remainder_(size_BS.index_select(1, shards.shard_C)).add_(first_BS.index_select(1, shards.shard_C))
        _whole(self.next, up)[rows, columns_S] = (next_BS + count_BS).remainder_(size_BS)
        return self._bits.index_select(0, at_BC.view(-1)).view_as(at_BC).bool()


def _whole(matrix: Tensor, up: bool) -> Tensor:
    """Returns a matrix (source, target) with the workers as rows, which send on the way up and receive down."""
    return matrix if up else matrix.t()


def _part(matrix: Tensor, rows: slice, columns_S: Tensor, up: bool) -> Tensor:
    return _whole(matrix, up)[rows].index_select(1, columns_S)
