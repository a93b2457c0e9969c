"""Theory of forward error correction: parity chunks of a message, and the loss that remains in spite of them.

A message is divided as in the engine (`engine/coding/coding.hpp`): into stretches of at most 512 chunks, and a stretch
into up to four interleaved blocks of at most 128 chunks, which spreads a burst of losses over all of them. The parity
of a stretch follows its last chunk. Every block of k data chunks has m parity chunks of a maximum-distance-separable
code: any k of them decode the block; with fewer, only the data chunks that arrived count.
"""

import functools
import math
from itertools import pairwise

from stormtorch.checks import check
from stormtorch.theory.arguments import check_count, check_loss

MOST_IN_BLOCK = 255
"""Most chunks of a block, data and parity together: the limit of a code over bytes."""
BLOCK_CHUNKS = 128
"""Most data chunks of a block."""
STRETCH_BLOCKS = 4
"""Most blocks of a stretch."""
RESIDUAL = 0.05
"""Residual loss that "auto" redundancy aims for: it hardly affects a training."""
SHARE = 0.55
"""Most bytes of "auto" redundancy, as a fraction of float32 without parity."""
# Tolerance for rounding errors before `ceil`; the engine uses the same.
_HAIR = 1e-9


def stretches_of(data: int) -> list[list[int]]:
    """Returns the data chunks of each block of each stretch of a message."""
    check_count("data", data)
    count = -(-data // (BLOCK_CHUNKS * STRETCH_BLOCKS))
    edges = [stretch * data // count for stretch in range(count + 1)]
    sizes = [last - first for first, last in pairwise(edges)]
    several = [-(-size // BLOCK_CHUNKS) for size in sizes]
    return [[-(-(size - block) // n) for block in range(n)] for size, n in zip(sizes, several, strict=True)]


def block_parity(redundancy: float, size: int) -> int:
    """Parity chunks of each block of a stretch whose first block has `size` data chunks."""
    return min(math.ceil(redundancy * size - _HAIR), MOST_IN_BLOCK - size)


def parity_of(redundancy: float, data: int) -> int:
    """Parity chunks of a message of `data` chunks; `redundancy` is parity chunks per data chunk."""
    return sum(len(blocks) * block_parity(redundancy, blocks[0]) for blocks in stretches_of(data))


def residual_loss(p: float, data: int, redundancy: float, burst: float = 1.0) -> float:
    """Fraction of the data chunks of a message that remains lost after decoding.

    Exact for independent loss; derived here: in a block of k data and m parity chunks, a chunk remains lost if it is
    lost itself and fewer than k of the k + m - 1 others arrive. Bursts follow the Gilbert-Elliott model; also exact if
    the blocks of a stretch are equally long.

    Args:
        p: Probability that a chunk is lost.
        data: Data chunks of the message.
        redundancy: Parity chunks per data chunk.
        burst: Mean number of chunks lost in a row; 1 is independent loss.
    """
    check_loss(p)
    check(redundancy >= 0.0, "redundancy", "be at least 0", redundancy)
    check(burst == 1.0 or burst >= max(1.0, p / (1.0 - p)), "burst", "be 1 or at least p/(1-p)", burst)
    lost = 0.0
    for blocks in stretches_of(data):
        m = block_parity(redundancy, blocks[0])
        # A block has every n-th chunk of the link, so the memory between two of its chunks decays n times.
        memory = 0.0 if burst == 1.0 else (1.0 - 1.0 / (burst * (1.0 - p))) ** len(blocks)
        lost += sum(k * (_block_loss(p, k, m, memory) if m else p) for k in blocks)
    return lost / data


def most_redundancy(data: int, compression_ratio: float, share: float = SHARE) -> float:
    """Parity per data chunk that fits into the bytes saved by a narrow wire: `share` of float32 in total.

    Args:
        data: Data chunks of the message.
        compression_ratio: Bytes of float32 over those of the wire.
        share: Bytes that may be sent, as a fraction of float32.
    """
    allowed = max(share * compression_ratio - 1.0, 0.0)
    k = stretches_of(data)[0][0]
    m = block_parity(math.floor(allowed * k + _HAIR) / k, k)
    # Blocks that are shorter by a chunk have as much parity.
    while m and parity_of(m / k, data) > allowed * data + _HAIR:
        m -= 1
    return m / k


@functools.lru_cache(maxsize=4096)
def least_redundancy(p: float, data: int, most: float, target: float = RESIDUAL) -> float:
    """Least parity per data chunk with a residual loss of at most `target`; `most` if that is not enough.

    Assumes independent loss.
    """
    check(most >= 0.0, "most", "be at least 0", most)
    if p <= target or most == 0.0:
        return 0.0
    if residual_loss(p, data, most) > target:
        return most
    k = stretches_of(data)[0][0]
    too_few, enough = 0, math.ceil(most * k - _HAIR)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if residual_loss(p, data, middle / k) > target:
            too_few = middle
        else:
            enough = middle
    return min(enough / k, most)


@functools.lru_cache(maxsize=65536)
def _block_loss(p: float, k: int, m: int, memory: float) -> float:
    """Fraction of a block's k data chunks that remains lost; `memory` is the correlation of neighbouring losses."""
    if p == 0.0:
        return 0.0
    if memory == 0.0:
        return p * _at_most(k - 1, k + m - 1, 1.0 - p)
    data, parity = _arrivals(p, k, memory, started=None), [_arrivals(p, m, memory, started=bad) for bad in (0, 1)]
    lost = 0.0
    for state in (0, 1):
        # Probability that fewer parity chunks arrive than data chunks are missing, by the number missing.
        below, total = [0.0], 0.0
        for arrived in range(m + 1):
            total += parity[state][0][arrived] + parity[state][1][arrived]
            below.append(total)
        for arrived in range(k):
            missing = k - arrived
            lost += data[state][arrived] * missing * below[min(missing, m + 1)]
    return lost / k


def _at_most(most: int, tries: int, chance: float) -> float:
    """Probability of at most `most` successes."""
    if most >= tries:
        return 1.0
    terms = (
        math.lgamma(tries + 1) - math.lgamma(i + 1) - math.lgamma(tries - i + 1)
        + i * math.log(chance) + (tries - i) * math.log1p(-chance)
        for i in range(most + 1)
    )  # fmt: skip
    return math.fsum(math.exp(each) for each in terms)


def _arrivals(p: float, chunks: int, memory: float, *, started: int | None) -> tuple[list[float], list[float]]:
    """Probabilities of each number of arrivals, separately for the good (0) and bad (1) state at the last chunk.

    Args:
        p: Probability of the bad state.
        chunks: Number of chunks.
        memory: Correlation of the states at two neighbouring chunks.
        started: State at the chunk before the first; None is any.
    """
    stay_bad, enter_bad = p + (1.0 - p) * memory, p * (1.0 - memory)
    chance_bad = p if started is None else float(started)
    good, bad = [1.0 - chance_bad] + [0.0] * chunks, [chance_bad] + [0.0] * chunks
    for number in range(chunks):
        # If `started` is None, the first chunk has the stationary state; otherwise there is a transition before each
        # chunk.
        if number or started is not None:
            good, bad = (
                [g * (1.0 - enter_bad) + b * (1.0 - stay_bad) for g, b in zip(good, bad, strict=True)],
                [g * enter_bad + b * stay_bad for g, b in zip(good, bad, strict=True)],
            )
        good = [0.0, *good[:-1]]  # it arrives
    return good, bad
