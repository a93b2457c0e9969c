"""Collectives of objects: of any size, the same on the other side, and never code."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stormtorch.collectives import Group
from stormtorch.collectives.base import objects
from stormtorch.exchange.simulated import SimulatedNetwork, SimulatedTransport

pytestmark = pytest.mark.pure

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=5), each, max_size=4),
    max_leaves=10,
)


@pytest.mark.thorough
@given(value=plain)
def test_what_was_packed_comes_out_again(value: Any) -> None:
    assert objects.unpack(objects.pack(value)) == value


def test_tensors_keep_their_bits_type_and_shape() -> None:
    given_: dict[str, Any] = {
        "a": torch.randn(3, 4),
        "b": torch.randn(5).bfloat16(),
        "c": torch.tensor(3),
        "d": torch.empty(0),
        "e": (torch.ones(2, dtype=torch.bool),),
    }
    found = objects.unpack(objects.pack(given_))
    for name in "abcd":
        assert found[name].dtype == given_[name].dtype
        assert torch.equal(found[name], given_[name])
    assert torch.equal(found["e"][0], torch.ones(2, dtype=torch.bool))


class Hostile:
    """Pickles to a call of the reader's choosing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("saved", ["torch", "pickle"])
def test_hostile_bytes_are_an_error_and_are_not_executed(saved: str, tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    buffer = io.BytesIO()
    if saved == "torch":
        torch.save(Hostile(trace), buffer)
    else:
        pickle.dump(Hostile(trace), buffer)
    message = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    with pytest.raises(Exception, match=r"(?i)weights.only|unsupported|unpickl"):
        objects.unpack(message)
    assert not trace.exists()


@given(noise=st.binary(min_size=1, max_size=300))
def test_noise_is_an_error_and_never_an_object(noise: bytes) -> None:
    packed = bytearray(objects.pack([1, 2, 3]).numpy().tobytes())
    for message in (noise, bytes(packed[: len(packed) // 2])):
        with pytest.raises(Exception):  # noqa: B017  # torch raises errors of many kinds
            objects.unpack(torch.frombuffer(bytearray(message), dtype=torch.uint8))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_messages_of_any_size_reach_those_they_are_for(world: int, loss: float) -> None:
    def message(source: int, target: int) -> torch.Tensor:
        size = (0, 1, 5000, 70_000)[(source + 2 * target) % 4]
        return torch.full((size,), 10 * source + target, dtype=torch.uint8)

    def work(transport: SimulatedTransport) -> None:
        group, rank = Group(transport), transport.rank
        found = objects.exchange([message(rank, peer) for peer in range(world)], group)
        for peer, each in enumerate(found):
            assert torch.equal(each, message(peer, rank))
        assert objects.gather({"rank": rank}, group) == [{"rank": peer} for peer in range(world)]

    SimulatedNetwork(world, loss=loss, seed=1).run(work)
