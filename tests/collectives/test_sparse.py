"""The sparse code: what travels, what receivers decode, and that any bytes are harmless."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stormtorch.collectives.formats.sparse import Sparse, SparseWire

pytestmark = pytest.mark.pure

CHUNK_BYTES = 1440
CODES = pytest.mark.parametrize("code", [Sparse(), Sparse(keep=16, of=256), Sparse(keep=256, bits=16)])


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def test_a_block_of_the_default_has_116_bytes_and_twelve_fit_in_a_datagram() -> None:
    assert Sparse().block_bytes == 116
    assert SparseWire(Sparse(), CHUNK_BYTES).per_chunk == 12 * 4096
    assert Sparse(keep=256, bits=16).block_bytes == 896


@CODES
@pytest.mark.parametrize("count", [1, 255, 4096, 50_000, 123_457])
def test_what_is_decoded_is_what_was_rounded(code: Sparse, count: int) -> None:
    wire = SparseWire(code, CHUNK_BYTES)
    values = numbers(count)
    if code.bits == 16:
        values[numbers(count, 1) > -1.5] = torch.nan
    message = wire.encode(values)
    assert message.numel() * 4 <= wire.chunks(count) * CHUNK_BYTES
    torch.testing.assert_close(wire.decode(message, count), wire.rounded(values), rtol=0, atol=0, equal_nan=True)


def test_the_largest_elements_travel_with_their_signs_and_near_their_magnitudes() -> None:
    values = numbers(4096)
    seen = Sparse().rounded(values.view(1, -1)).view(-1)
    chosen = seen != 0.0
    assert int(chosen.sum()) == 64
    assert float(values[chosen].abs().min()) >= float(values[~chosen].abs().max())
    assert torch.equal(seen[chosen].sign(), values[chosen].sign())
    torch.testing.assert_close(seen[chosen], values[chosen], rtol=0.25, atol=0.1)


def test_with_sixteen_bits_what_is_no_number_does_not_travel() -> None:
    values = torch.full((4096,), torch.nan)
    values[5], values[4000] = 1.0, -2.0
    seen = Sparse(keep=256, bits=16).rounded(values.view(1, -1)).view(-1)
    assert seen.isnan().sum() == 4094
    assert (float(seen[5]), float(seen[4000])) == (1.0, -2.0)


@CODES
def test_a_lost_chunk_keeps_its_old_values(code: Sparse) -> None:
    wire = SparseWire(code, CHUNK_BYTES)
    count = 3 * wire.per_chunk - 7
    message, target = wire.encode(numbers(count)), torch.full((count,), 9.0)
    wire.place(message, target, torch.tensor([True, False, True]))
    lost = slice(wire.per_chunk, 2 * wire.per_chunk)
    assert bool((target[lost] == 9.0).all())
    seen = wire.rounded(numbers(count))[: wire.per_chunk]
    torch.testing.assert_close(target[: wire.per_chunk], seen, equal_nan=True)


@given(st.binary(min_size=4 * 29, max_size=4 * 29), st.sampled_from([Sparse(), Sparse(keep=16, of=100)]))
def test_any_bytes_are_some_values(data: bytes, code: Sparse) -> None:
    message = torch.frombuffer(bytearray(data), dtype=torch.float32)
    wire = SparseWire(code, CHUNK_BYTES)
    count = code.of - 3
    found = wire.decode(message[: wire.room(count).numel()], count)
    assert found.shape == (count,)
    assert int((found != 0.0).sum()) <= code.keep


@pytest.mark.parametrize(
    ("knob", "settings"),
    [("keep", {"keep": 12}), ("keep", {"keep": 5000}), ("of", {"of": 5000}), ("bits", {"bits": 3})],
)
def test_a_code_that_cannot_be_is_refused_by_name(knob: str, settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"^{knob} must"):
        Sparse(**settings)  # type: ignore[arg-type]
