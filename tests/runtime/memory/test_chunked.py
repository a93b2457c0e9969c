"""A policy's function on flat vectors: all whole chunks at once, the short last one separately."""

import pytest
import torch

from stormtorch.runtime.memory.chunked import chunked

pytestmark = pytest.mark.pure


def test_whole_chunks_and_the_last_come_in_calls_of_their_own_with_their_numbers() -> None:
    shapes = []

    def note(values: torch.Tensor, count: torch.Tensor, all_alike: float) -> torch.Tensor:
        shapes.append((tuple(values.shape), count.flatten().tolist(), all_alike))
        return values * count

    found = chunked(note, 3, [torch.ones(8)], [torch.tensor([2, 3, 4]), 0.5])
    assert shapes == [((2, 3), [2, 3], 0.5), ((1, 2), [4], 0.5)]
    assert found.tolist() == [2.0] * 3 + [3.0] * 3 + [4.0] * 2


@pytest.mark.parametrize("count", [0, 2, 3, 6, 7])
def test_any_length_is_covered_once(count: int) -> None:
    assert chunked(lambda values: values + 1, 3, [torch.arange(float(count))]).tolist() == [
        each + 1.0 for each in range(count)
    ]


def test_a_vector_that_comes_back_is_the_very_one() -> None:
    first, second = torch.zeros(7), torch.ones(7)
    assert chunked(lambda a, b: b, 3, [first, second]) is second
    assert chunked(lambda a, b: a.add_(b), 3, [first, second]) is first
    assert first.tolist() == [1.0] * 7
