"""Conditions of a lab, and the commands for nft and tc. No lab is needed."""

import json
from pathlib import Path
from typing import Any

import pytest

from stormtorch.checks import BadCondition
from stormtorch.network.loss import Bernoulli, GilbertElliott, PerLink, Trace
from stormtorch_lab.cli.tables.lab import requested_text
from stormtorch_lab.netns.access import LabUnavailable, find_access, tool
from stormtorch_lab.netns.conditions import AccessLink, Conditions, between, both_ways
from stormtorch_lab.netns.links.kernel_network import _bits, ruleset, shape
from stormtorch_lab.netns.measured import AccessLinkCount, LinkCount, Measured
from stormtorch_lab.netns.per_link import read_per_link


def test_text_becomes_numbers() -> None:
    conditions = Conditions(rate="1.5gbit", queue="64kb", delay="20ms", jitter="500us", loss=0.1, burst=8)
    assert conditions.rate_bits == 1.5e9
    assert conditions.queue_bytes == 65536
    assert conditions.delay_s == pytest.approx(0.02)
    assert conditions.jitter_s == pytest.approx(0.0005)
    assert conditions.model(0, 1) == GilbertElliott(p=0.1, burst=8)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rate", "fast"),
        ("rate", "0mbit"),
        ("rate", -1.0),
        ("rate", "1kbit"),
        ("queue", "1b"),
        ("queue", "many"),
        ("loss", 1.5),
        ("loss", -0.1),
        ("loss", float("nan")),
        ("loss", "half"),
        ("delay", "20"),
        ("delay", "-1ms"),
        ("delay", "1h"),
        ("delay", float("inf")),
        ("jitter", "2ms"),  # without a delay
        ("seed", -1),
        ("mtu", 100),
        ("mtu", 9000),
        ("mtu", "1200"),
    ],
)
def test_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadCondition) as refused:
        Conditions(**{name: value})
    assert refused.value.name == name


def test_burst_too_short_for_its_loss_is_refused() -> None:
    with pytest.raises(BadCondition, match="burst"):
        Conditions(loss=0.9, burst=2)


def test_burst_beside_a_model_is_refused() -> None:
    with pytest.raises(BadCondition, match="burst"):
        Conditions(loss=Bernoulli(p=0.1), burst=4)


def test_change_keeps_what_it_does_not_name() -> None:
    before = Conditions(rate="100mbit", loss=0.1, burst=8, seed=3)
    after = before.changed(rate="50mbit")
    assert after.model(0, 1) == GilbertElliott(p=0.1, burst=8)
    assert (after.rate_bits, after.seed) == (50e6, 3)
    assert before.changed(loss=0.2).model(0, 1) == Bernoulli(p=0.2)


@pytest.mark.parametrize("changes", [{"los": 0.1}, {"burst": 3.0}])
def test_change_of_nothing_known_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadCondition):
        Conditions(loss=0.1).changed(**changes)


def test_hosts_that_do_not_exist_are_refused() -> None:
    for conditions in (
        Conditions(cut_links=frozenset({(0, 4)})),
        Conditions(cut=frozenset({4})),
        Conditions(loss=PerLink(links={(0, 4): Bernoulli(p=0.1)})),
        Conditions(delays={(4, 0): 0.1}),
        Conditions(lines={4: AccessLink(up_bits=1e6)}),
    ):
        with pytest.raises(BadCondition, match="host 4"):
            conditions.check(4)


def test_link_of_a_host_to_itself_is_refused() -> None:
    with pytest.raises(BadCondition, match="itself"):
        Conditions(cut_links=frozenset({(1, 1)})).check(4)


def test_partitions_and_pairs_are_links_of_both_directions() -> None:
    assert both_ways((0, 1)) == {(0, 1), (1, 0)}
    assert between({0}, {1, 2}) == both_ways((0, 1), (0, 2))


# --- the file of links ---------------------------------------------------------------------------------------------


def _file(folder: Path, data: Any) -> Path:
    path = folder / "links.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_file_of_links_is_read(tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_text('{"bits": "0"}\n{"bits": "0011"}\n')
    links = [
        {"from": "*", "to": 2, "loss": 0.5},
        {"from": 0, "to": 1, "loss": 0.2, "burst": 8},
        {"from": 1, "to": 0, "trace": {"file": "traces.jsonl", "line": 1}},
        {"from": 2, "to": "*", "delay": "80ms"},
    ]
    hosts = [{"host": 1, "rate": "10mbit", "up": "5mbit", "queue": "64kb"}]
    path = _file(tmp_path, {"links": links, "hosts": hosts})
    found = read_per_link(path, Conditions(rate="100mbit", loss=0.01), 3)
    assert found.model(0, 1) == GilbertElliott(p=0.2, burst=8)
    assert found.model(1, 0) == Trace(bits="0011")
    assert found.model(0, 2) == found.model(1, 2) == Bernoulli(p=0.5)
    assert found.model(2, 0) == Bernoulli(p=0.01)
    assert found.link_delay_s(2, 0) == pytest.approx(0.08)
    assert found.link_delay_s(0, 2) == 0.0
    assert found.line(1) == AccessLink(up_bits=5e6, down_bits=10e6, queue_bytes=65536)
    assert found.line(0) == AccessLink(up_bits=100e6, down_bits=100e6, queue_bytes=512 << 10)


@pytest.mark.parametrize(
    "data",
    [
        "{",
        [],
        {"link": []},
        {"links": {}},
        {"links": [3]},
        {"links": [{"from": 0, "to": 9, "loss": 0.1}]},
        {"links": [{"from": 0, "to": 1, "los": 0.1}]},
        {"links": [{"from": 0, "to": 1, "loss": 7}]},
        {"links": [{"from": 0, "to": 1, "burst": 7}]},
        {"links": [{"from": 0, "to": 1, "loss": 0.1, "trace": "01"}]},
        {"links": [{"from": 0, "to": 1, "trace": {"file": "none"}}]},
        {"links": [{"from": 0, "to": 1, "trace": "012"}]},
        {"hosts": [{"host": 0, "rate": "quick"}]},
    ],
)
def test_wrong_file_of_links_is_refused(tmp_path: Path, data: Any) -> None:
    with pytest.raises(BadCondition):
        read_per_link(_file(tmp_path, data), Conditions(), 3)


# --- commands for the kernel ------------------------------------------------------------------------------------------


def test_drawn_loss_is_exactly_what_was_asked() -> None:
    bits = _bits(Bernoulli(p=0.1), seed=1)
    assert sum(bits) == round(0.1 * len(bits))
    assert bits != _bits(Bernoulli(p=0.1), seed=2)
    assert bits == _bits(Bernoulli(p=0.1), seed=1)


def test_drawn_bursts_have_their_length() -> None:
    bits = _bits(GilbertElliott(p=0.1, burst=8), seed=1)
    runs = [len(run) for run in "".join("01"[bit] for bit in bits).split("0") if run]
    assert sum(bits) / len(bits) == pytest.approx(0.1, rel=0.03)
    # 800 runs whose length has a standard deviation of about 7.5
    assert sum(runs) / len(runs) == pytest.approx(8, abs=4 * 7.5 / len(runs) ** 0.5)


def test_ruleset_names_every_link_once_and_drops_only_where_asked() -> None:
    rules = "".join(ruleset(Conditions(loss=PerLink(links={(0, 1): Bernoulli(p=0.5)})), 3))
    assert rules.count(" drop") == 1
    assert rules.count("jump link_") == 6
    assert "lost_0_1 drop" in rules


def test_queue_and_rate_reach_tc() -> None:
    line = Conditions(rate="400mbit", queue="64kb").line(0)
    (command,) = shape("eth0", line.up_bits, line, (0.0, 0.0))
    assert "rate 400000000bit" in command
    assert command.endswith("limit 65536")


def test_delay_in_the_kernel_comes_before_the_rate() -> None:
    line = Conditions(rate="100mbit").line(0)
    delay, rate = shape("p0", line.down_bits, line, (0.02, 0.002))
    assert "root handle 9: netem delay 20000us 2000us" in delay
    assert "parent 9: handle 1: tbf" in rate


# --- texts ------------------------------------------------------------------------------------------------------------


def test_measured_loss_and_overflow_are_shares_of_what_was_sent() -> None:
    links = [LinkCount(0, 1, 100, 10), LinkCount(1, 0, 300, 10)]
    lines = [AccessLinkCount(0, "up", 96, 4), AccessLinkCount(1, "down", 80, 6), AccessLinkCount(1, "up", 300, 0)]
    measured = Measured(links=links, lines=lines)
    assert measured.loss == pytest.approx(20 / 400)
    assert measured.overflow == pytest.approx(10 / 400)
    later = Measured(links=[LinkCount(0, 1, 150, 15), links[1]], lines=lines)
    assert later.since(measured).loss == pytest.approx(5 / 50)
    assert later.since(measured).overflow == 0.0


def test_what_was_asked_is_said_in_full() -> None:
    conditions = Conditions(
        rate="100mbit", loss=0.1, burst=4, delay="20ms", jitter="1ms", tcp="cubic", cut=frozenset({1})
    )
    text = requested_text(conditions.to_json())
    for words in ("100 Mbit/s", "10 % loss in bursts of 4", "40 ms round trip", "1 ms jitter", "cubic", "cut off: h1"):
        assert words in text


def test_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stormtorch_lab.netns.access._PATH", "/nonexistent")
    find_access.cache_clear()
    try:
        with pytest.raises(LabUnavailable, match=r"apt-get install .*nftables") as missing:
            find_access()
        assert "faults(" in str(missing.value)
        with pytest.raises(LabUnavailable, match="iproute2"):
            tool("tc")
    finally:
        find_access.cache_clear()
