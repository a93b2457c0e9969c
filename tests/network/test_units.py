"""Rates, sizes and times as users write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormtorch.network.units import parse_rate, parse_size, parse_time

pytestmark = pytest.mark.pure


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
    assert parse_rate(rate) == pytest.approx(bits)


@pytest.mark.parametrize(("size", "size_bytes"), [("64kb", 65536), ("64KiB", 65536), ("1.5mb", 1572864), (99, 99)])
def test_sizes_are_read_in_bytes_of_powers_of_two(size: str | int, size_bytes: int) -> None:
    assert parse_size(size) == size_bytes


@pytest.mark.parametrize(("time", "seconds"), [("20ms", 0.02), ("500us", 5e-4), ("5µs", 5e-6), ("2s", 2.0), (0.1, 0.1)])
def test_times_are_read_in_seconds(time: str | float, seconds: float) -> None:
    assert parse_time(time) == pytest.approx(seconds)


@pytest.mark.parametrize("parse", [parse_rate, parse_size, parse_time])
@pytest.mark.parametrize("value", ["", "20", "-1ms", "1h", "fast", None, True, float("nan"), float("inf")])
def test_anything_else_is_refused_by_the_name_of_the_setting(parse: object, value: object) -> None:
    assert callable(parse)
    with pytest.raises(ValueError, match=r"^pace must be a (rate|size|time) such as .*, got "):
        parse(value, "pace")


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused_by_name(text: str) -> None:
    for parse, name in ((parse_rate, "rate"), (parse_size, "size"), (parse_time, "time")):
        try:
            assert parse(text) >= 0.0
        except ValueError as error:
            assert str(error).startswith(f"{name} must be ")
