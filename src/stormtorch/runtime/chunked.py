"""Applies a policy's function to flat memory, chunk by chunk, as policies see values."""

from collections.abc import Callable, Sequence

import torch

from stormtorch.policies.policy import applied


def chunked(
    function: Callable[..., torch.Tensor],
    per_chunk: int,
    vectors: Sequence[torch.Tensor],
    numbers: Sequence[torch.Tensor | float | int] = (),
) -> torch.Tensor:
    """Calls a function on the whole chunks of some vectors, and once more on a last chunk that is shorter.

    Args:
        function: Gets each vector as (C, E), then each of the numbers; returns (C, E).
        per_chunk: Elements of a whole chunk.
        vectors: Vectors of equal length.
        numbers: Numbers for all chunks, or tensors with one for each chunk, which the function gets as (C, 1).

    Returns:
        One of the vectors, if the function returned that one or wrote into it; otherwise a new vector.
    """
    count = vectors[0].numel()
    whole = count // per_chunk
    given: list[list[torch.Tensor]] = []
    results: list[torch.Tensor] = []
    for first, last, chunks in (
        (0, whole * per_chunk, slice(0, whole)),
        (whole * per_chunk, count, slice(whole, whole + 1)),
    ):
        if first == last:
            continue
        rows = chunks.stop - chunks.start
        given.append([each[first:last].view(rows, -1) for each in vectors])
        known = [each[chunks].unsqueeze(-1) if isinstance(each, torch.Tensor) else each for each in numbers]
        results.append(applied(function, *given[-1], *known))
    for place, vector in enumerate(vectors):
        if all(result is parts[place] for parts, result in zip(given, results, strict=True)):
            return vector
    return torch.cat([result.reshape(-1) for result in results])
