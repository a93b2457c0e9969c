import dataclasses
import pickle
from typing import Any

import pytest
import torch
from conftest import OPTIONS, local_world
from hypothesis import given
from hypothesis import strategies as st

from reference import reduced, same_bits, values
from stormtorch import Options, faults
from stormtorch.collectives import Group, Op, all_reduce, all_to_all, broadcast
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.keys import new_key
from stormtorch.exchange.options import RateMode
from stormtorch.udp.udp import UdpTransport


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("rate", "fast"),
        ("rate", "-5mbit"),
        ("rate", "0mbit"),
        ("rate", 0),
        ("rate", float("nan")),
        ("rate", float("inf")),
        ("rate", "400"),
        ("port", -1),
        ("port", 65_536),
        ("datagram_bytes", 255),
        ("datagram_bytes", 65_508),
        ("key", b"fifteen bytes.."),
        ("key", bytes(32)),
        ("key", b"x" * 40),
        ("key", b"12" * 20),
        ("key", b"password" * 4),
        ("key", b"a longer piece, " * 3),
        ("key", "the text of a key, not its bytes"),
        ("receive_buffer_bytes", 4095),
        ("pool_bytes", 0),
        ("eager_bytes", -1),
        ("rejoin", "always"),
        ("spare_ranks", -1),
        ("leave_s", float("nan")),
        ("silence_s", 0.0),
        ("silence_s", float("nan")),
        ("timeout_s", -1.0),
        ("linger_s", -0.1),
        ("linger_s", float("nan")),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_knob(knob: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{knob} must"):
        Options(**{knob: value})


def test_the_limits_themselves_are_taken() -> None:
    Options(port=0, datagram_bytes=256, key=b"sixteen bytes...", receive_buffer_bytes=4096, linger_s=0.0)
    Options(port=65_535, datagram_bytes=65_507, pool_bytes=4096, eager_bytes=4096, silence_s=1e-3, timeout_s=1e-3)


def test_refused_key_is_told_what_makes_a_better_one_and_is_not_shown() -> None:
    with pytest.raises(ValueError, match="stormtorch keygen") as refused:
        Options(key=b"secret" * 5)
    assert "secret" not in str(refused.value)
    assert Options(key=new_key().encode()).key != new_key().encode()


def test_options_are_frozen_by_keyword_only_and_keep_their_key_secret() -> None:
    options = Options(key=b"a very secret key of a job")
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.port = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        Options("eth0")  # type: ignore[call-arg]
    assert "secret" not in repr(options)
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("rate", "bits"),
    [
        ("400mbit", 400e6),
        ("1.5gbit", 1.5e9),
        ("64kbit", 64e3),
        ("800bit", 800.0),
        ("10 Mbit/s", 10e6),
        (" 1mbit ", 1e6),
        (250e6, 250e6),
        (1_000, 1e3),
    ],
)
def test_rates_are_read_in_bits_per_second(rate: str | float, bits: float) -> None:
    mode, bytes_per_s = Options(rate=rate).rate_mode(loopback=True)
    assert mode is RateMode.FIXED
    assert bytes_per_s == pytest.approx(bits / 8)


@given(st.text(max_size=12))
def test_any_other_text_is_refused_by_name(text: str) -> None:
    try:
        Options(rate=text)
    except ValueError as error:
        assert str(error).startswith("rate must")


def test_the_rate_by_name_becomes_a_mode() -> None:
    assert Options().rate_mode(loopback=True)[0] is RateMode.UNLIMITED
    assert Options().rate_mode(loopback=False)[0] is RateMode.AUTO
    assert Options(rate="low").rate_mode(loopback=True)[0] is RateMode.LOW_PRIORITY
    assert Options(rate="unlimited").rate_mode(loopback=False)[0] is RateMode.UNLIMITED


def everything(transport: Transport) -> list[torch.Tensor]:
    group = Group(transport)
    total, copy = values(group.rank, 100_001), values(group.rank, 50_000)
    parts = [values(group.rank, 3_000, seed=peer) for peer in range(group.size)]
    outputs = [torch.empty(3_000) for _ in parts]
    begun = [all_reduce(group, total), broadcast(group, copy, 1), all_to_all(group, outputs, parts)]
    for pending in begun:
        pending.wait()
    return [total, copy, *outputs]


def assert_everything(results: list[list[torch.Tensor]]) -> None:
    n = len(results)
    for rank, (total, copy, *outputs) in enumerate(results):
        assert same_bits(total, reduced([values(peer, 100_001) for peer in range(n)], Op.SUM))
        assert same_bits(copy, values(1, 50_000))
        for peer, output in enumerate(outputs):
            assert same_bits(output, values(peer, 3_000, seed=rank))


@pytest.mark.parametrize("segmentation", [True, False])
@pytest.mark.parametrize("coalescing", [True, False])
@pytest.mark.parametrize("datagram_bytes", [None, 1472])
def test_everything_works_with_and_without_the_kernels_help(
    segmentation: bool, coalescing: bool, datagram_bytes: int | None
) -> None:
    options = dataclasses.replace(
        OPTIONS, segmentation=segmentation, coalescing=coalescing, datagram_bytes=datagram_bytes
    )

    def work(transport: UdpTransport) -> tuple[list[torch.Tensor], dict[str, Any]]:
        return everything(transport), transport.health()

    results = local_world(3, work, options=options)
    assert_everything([tensors for tensors, _ in results])
    for _, health in results:
        assert health["segments"] <= segmentation
        assert health["coalesces"] <= coalescing


def test_ranks_with_and_without_the_kernels_help_understand_each_other() -> None:
    mixed = [
        dataclasses.replace(OPTIONS, datagram_bytes=1472, segmentation=bool(rank % 2), coalescing=rank < 2)
        for rank in range(4)
    ]
    with faults(loss=0.1, seed=3):
        assert_everything(local_world(4, everything, options=mixed))


@pytest.mark.parametrize("datagram_bytes", [256, 1472, 8_972, 65_507])
def test_everything_works_in_datagrams_of_any_size(datagram_bytes: int) -> None:
    options = dataclasses.replace(OPTIONS, datagram_bytes=datagram_bytes)
    assert_everything(local_world(3, everything, options=options))


def test_the_smallest_buffers_still_do() -> None:
    options = dataclasses.replace(
        OPTIONS, datagram_bytes=1472, receive_buffer_bytes=16_384, pool_bytes=4096, eager_bytes=4096
    )
    assert_everything(local_world(3, everything, options=options))
    with faults(loss=0.1, seed=4):
        assert_everything(local_world(3, everything, options=options))


@pytest.mark.parametrize("rate", ["auto", "low", "unlimited", "200mbit"])
def test_everything_works_at_every_kind_of_rate(rate: str) -> None:
    options = dataclasses.replace(OPTIONS, rate=rate)
    assert_everything(local_world(3, everything, options=options))
    with faults(loss=0.1, seed=5):
        assert_everything(local_world(3, everything, options=dataclasses.replace(options, datagram_bytes=1472)))


def test_a_fixed_rate_is_kept() -> None:
    elements, bits_per_s = 500_000, 100e6

    def work(transport: UdpTransport) -> float:
        tensors = [torch.ones(elements) for _ in range(2)]
        arrival = broadcast(Group(transport), tensors[transport.rank], 0).wait()[0]
        return arrival.elapsed_s

    took = max(local_world(2, work, options=dataclasses.replace(OPTIONS, rate=bits_per_s)))
    ideal = elements * 32 / bits_per_s
    assert 0.9 * ideal < took < 2.0 * ideal
