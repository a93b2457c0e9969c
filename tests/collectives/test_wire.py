"""What travels in fewer bits: what arrived gets to its place, and the rest stays as it was."""

import pytest
import torch

from stormtorch.collectives.wire import Wire

CHUNK_BYTES = 1400


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chance", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("elements", [100, 12_345])
def test_chunks_that_arrived_are_placed_and_lost_ones_stay(
    wire_dtype: torch.dtype, target_dtype: torch.dtype, chance: float, elements: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    wire = Wire(wire_dtype, CHUNK_BYTES)
    sent = torch.randn(elements, generator=generator)
    before = torch.randn(elements, generator=generator).to(target_dtype)
    arrived_C = torch.rand(wire.chunks(elements), generator=generator) < chance
    # Amid other parameters, which nothing may touch.
    memory = torch.full((elements + 2,), 7.0, dtype=target_dtype)
    target = memory[1:-1]
    target.copy_(before)
    wire.place(wire.encode(sent, seed=3), target, arrived_C)
    arrived = arrived_C.repeat_interleave(wire.per_chunk)[:elements]
    assert torch.equal(target[~arrived], before[~arrived])
    assert torch.allclose(target[arrived].float(), sent[arrived], atol=0.05)
    assert memory[0] == memory[-1] == 7.0
