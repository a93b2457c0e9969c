"""Arguments of the engine are checked: an unknown value is an error, not a guess."""

import math
from typing import Any

import pytest
import torch

from stormtorch import _engine
from stormtorch.exchange.exchange import Receive, ReduceMode, Reduction, Send, WireDtype
from stormtorch.exchange.options import RateMode
from stormtorch.network.faults import faults

pytestmark = pytest.mark.pure

BYTES = 4096


def core(**changes: Any) -> dict[str, Any]:
    return {
        "datagram_bytes": 1472,
        "receive_buffer": 1 << 20,
        "pool_bytes": 1 << 20,
        "eager_bytes": 1 << 16,
        "rate_mode": int(RateMode.UNLIMITED),
        "bytes_per_s": 0.0,
        "silence_s": 10.0,
        "cookie": 1,
        "checks_data": True,
        "incarnations": [],
        "keys": [],
    } | changes


def sim(world: int = 2, delay_s: float = 0.001, **changes: Any) -> _engine.Sim:
    return _engine.Sim(world, core(**changes), dict(faults().settings), delay_s, 0.0, 1 << 20)


def endpoint() -> _engine.Endpoint:
    return _engine.Endpoint(
        "127.0.0.1", 0, receive_buffer=1 << 20, low_priority=False, segmentation=True, coalescing=True
    )


def post(network: _engine.Sim, timeout_s: float | None = 1.0, **changes: Any) -> torch.Tensor:
    """Begins the exchange of two ranks that add up what they have; what it may write to is returned, to be kept."""
    memory = torch.zeros(3, BYTES // 4)
    own, out, _ = (row.data_ptr() for row in memory)
    fields: dict[str, Any] = {
        "mode": ReduceMode.IN_ORDER,
        "wire": WireDtype.FLOAT32,
        "out_dtype": WireDtype.FLOAT32,
        "own": own,
        "out": out,
        "bytes": BYTES,
        "own_position": 0,
        "average": False,
    } | changes
    reduction = Reduction(**fields)
    for rank in range(2):
        sends, receives = [Send(1 - rank, own, BYTES)], [Receive(1 - rank, 0, BYTES, reduce=True)]
        network.post(rank, 0, 0, sends, receives, reduction, (0.0, 0.0), (None, None), timeout_s)
    return memory


def test_an_exchange_with_values_that_exist_runs() -> None:
    network = sim()
    kept = post(network)
    while network.advance(1000):
        pass
    outcomes = [outcome for rank in range(2) for _, outcome in network.take_finished(rank)]
    assert [outcome.status for outcome in outcomes] == [_engine.Status.OK] * 2
    assert kept.sum() == 0.0


@pytest.mark.parametrize("field", ["mode", "wire", "out_dtype"])
@pytest.mark.parametrize("value", [-1, 6, 255, 256 + ReduceMode.COPY, 1 << 20])
def test_a_reduction_with_a_number_outside_its_enum_is_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{field}.*{value}"):
        post(sim(), **{field: value})


@pytest.mark.parametrize("mode", [ReduceMode.IN_ORDER, ReduceMode.ARRIVED])
def test_a_sum_of_plain_bytes_is_refused_before_anything_is_sent(mode: ReduceMode) -> None:
    with pytest.raises(ValueError, match="plain bytes cannot be added up"):
        post(sim(), mode=mode, wire=WireDtype.BYTES, out_dtype=WireDtype.BYTES)


@pytest.mark.parametrize("value", [-1, 5, 256, 1 << 20])
def test_a_rate_mode_outside_its_enum_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=rf"rate_mode.*{value}"):
        sim(rate_mode=value)
    with pytest.raises(ValueError, match=rf"rate_mode.*{value}"):
        endpoint().start(0, [[("127.0.0.1", 1)] * 2], core(rate_mode=value))


def test_a_time_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="not a time"):
        post(sim(), timeout_s=math.nan)
    with pytest.raises(ValueError, match="not a time"):
        sim(delay_s=math.nan)
    with pytest.raises(ValueError, match="not a time"):
        endpoint().close(math.nan)


def test_more_ranks_than_a_rank_can_count_are_refused() -> None:
    with pytest.raises(ValueError, match="65536 ranks"):
        endpoint().start(0, [[("127.0.0.1", 1)] * (1 << 16)], core())


def test_a_rank_that_does_not_exist_is_refused() -> None:
    network = sim()
    for call in (network.take_finished, network.health, lambda rank: network.set_unreachable(rank, True)):
        with pytest.raises((IndexError, ValueError)):
            call(2)
    with pytest.raises((IndexError, ValueError)):
        network.cancel(2, 1)
