"""Applies a policy's function to flat vectors, viewed as rows of chunks."""

from collections.abc import Callable, Iterator, Sequence

import torch

from stormtorch.policies.memory import Memory
from stormtorch.policies.policy import applied

ChunkMemory = Callable[[int, int, int], Memory]
"""Returns a policy's memory of some chunks, given the first element, the number of chunks, and their size."""


def windows(count: int, per_chunk: int) -> Iterator[tuple[int, int, slice]]:
    """Splits a vector into its whole chunks and a shorter last one. Yields begin and end element, and chunk numbers."""
    whole = count // per_chunk
    if whole:
        yield 0, whole * per_chunk, slice(0, whole)
    if whole * per_chunk < count:
        yield whole * per_chunk, count, slice(whole, whole + 1)


def chunked(
    function: Callable[..., torch.Tensor],
    per_chunk: int,
    vectors: Sequence[torch.Tensor],
    numbers: Sequence[torch.Tensor | float | int] = (),
    memory: ChunkMemory | None = None,
) -> torch.Tensor:
    """Calls a function on the whole chunks of some vectors, and once more on a last chunk that is shorter.

    Args:
        function: Receives each vector as (C, E), then each of the numbers, then the memory; returns (C, E).
        per_chunk: Elements of a whole chunk.
        vectors: Vectors of equal length.
        numbers: Numbers for all chunks, or tensors with one for each chunk, which the function receives as (C, 1).
        memory: Returns the memory of some chunks; None if the function takes none.

    Returns:
        One of the vectors, if the function returned that one or wrote into it; otherwise a new vector.
    """
    given: list[list[torch.Tensor]] = []
    results: list[torch.Tensor] = []
    for first, last, chunks in windows(vectors[0].numel(), per_chunk):
        rows = chunks.stop - chunks.start
        given.append([each[first:last].view(rows, -1) for each in vectors])
        known = [each[chunks].unsqueeze(-1) if isinstance(each, torch.Tensor) else each for each in numbers]
        more = [] if memory is None else [memory(first, rows, (last - first) // rows)]
        results.append(applied(function, *given[-1], *known, *more))
    for place, vector in enumerate(vectors):
        if all(result is parts[place] for parts, result in zip(given, results, strict=True)):
            return vector
    return torch.cat([result.reshape(-1) for result in results])
