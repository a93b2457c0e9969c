"""Messages in fewer bits: chunks that arrived are written, and the rest keeps its old values."""

import pytest
import torch

from stormtorch.collectives.wire import WIRES, Wire, element_bytes, narrower

CHUNK_BYTES = 1400


@pytest.mark.parametrize("wire_dtype", [each for each in WIRES if each != torch.float32], ids=str)
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
    assert torch.allclose(target[arrived].float(), sent[arrived], atol=0.3 if wire_dtype == WIRES[-1] else 0.05)
    assert memory[0] == memory[-1] == 7.0


def test_values_travel_in_the_narrower_of_two_types() -> None:
    int4 = WIRES[-1]
    assert [narrower(wire, torch.bfloat16) for wire in WIRES] == [torch.bfloat16] * 3 + [torch.int8, int4]
    assert narrower(torch.bfloat16, torch.float32) == torch.bfloat16
    # torch says that an element of int4 has a byte.
    assert element_bytes(int4) == 0.5625 and element_bytes(torch.float32) == 4.0


def test_an_outlier_coarsens_fewer_neighbours_where_bits_are_few() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(2))
    values[1000] = 300.0
    for dtype, hurt in ((torch.int8, 1024), (WIRES[-1], 128)):
        wire, back = Wire(dtype, 65_000), torch.empty(4096)
        wire.decode(wire.encode(values, seed=1), back)
        step = 300.0 / {torch.int8: 255}.get(dtype, 15)
        assert int(((back - values).abs() > 0.05 * step).sum()) <= hurt
