"""Two hosts joined by a cable: no limits, datagrams as large as the MTU allows, and the rate is known."""

import pytest

from commands import call, ranks_left, text_of
from stormtorch.checks import BadCondition
from stormtorch_lab.bench.allreduce import AllReduceSettings, run_allreduce
from stormtorch_lab.cli.tables.bench import allreduce_table
from stormtorch_lab.cli.tables.lab import requested_text
from stormtorch_lab.netns import Conditions, Lab
from stormtorch_lab.netns.fixtures import lab_or_skip


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("cable", {"cable": 100}),
        ("cable", {"cable": 70_000}),
        ("cable", {"cable": "long"}),
        ("rate", {"cable": 1500, "rate": "1gbit"}),
        ("loss", {"cable": 1500, "loss": 0.1}),
        ("delay", {"cable": 1500, "delay": "1ms"}),
        ("mtu", {"cable": 1500, "mtu": 1400}),
        ("cut", {"cable": 1500, "cut": {1}}),
    ],
)
def test_a_cable_has_an_mtu_and_nothing_that_only_a_switch_can_do(name: str, asked: dict[str, object]) -> None:
    with pytest.raises(BadCondition) as caught:
        Conditions(**asked)  # type: ignore[arg-type]  # that is the point
    assert caught.value.name == name


def test_a_cable_joins_two_hosts() -> None:
    Conditions(cable=9000).check(2)
    with pytest.raises(BadCondition, match=r"^cable joins exactly two hosts, got 3"):
        Conditions(cable=9000).check(3)
    with pytest.raises(BadCondition, match=r"^cable joins exactly two hosts, got 4"):
        AllReduceSettings(ranks=4, network=Conditions(cable=9000))
    assert requested_text(Conditions(cable=9000, tcp="reno").to_json()) == (
        "a cable with an MTU of 9000, no limits, TCP reno"
    )


@pytest.mark.thorough
def test_a_cable_with_a_rate_is_refused_on_the_command_line() -> None:
    code, text = call("bench", "allreduce", "--cable", "9000", "--rate", "1gbit")
    assert code == 2
    assert "rate" in text and "needs a switch, which a cable does not have" in text


@pytest.mark.thorough
@pytest.mark.lab
def test_the_all_reduce_by_cable_fills_datagrams_of_its_mtu_and_tells_the_rate() -> None:
    lab_or_skip()
    settings = AllReduceSettings(
        ranks=2, mb=(1.0,), iters=2, warmup=1, backends=("storm", "gloo"), network=Conditions(cable=9000), timeout_s=100
    )
    report = run_allreduce(settings)
    conditions = report.conditions
    assert conditions["network"] == "lab: veth pair"
    assert conditions["requested"]["cable_mtu"] == 9000
    # 28 bytes are IP's and UDP's; the engine's own header is shorter than 100.
    assert 8972 - 100 < conditions["chunk_bytes"] < 8972
    assert sum(link["seen"] for link in conditions["measured"]["links"]) > 10
    for result in report.results:
        # Of 2 ranks, each sends one half twice: 8 Mbit.
        assert result.gbit_per_s == pytest.approx(0.008 / result.median_s)
        assert result.ideal_s is not None and result.ideal_s > 0
        assert result.cpu_s_per_gb > 0
    text = text_of(allreduce_table(report))
    assert "cable with an MTU of 9000" in text
    assert f"{report.results[0].gbit_per_s:.2f}" in text and "Gbit/s" in text
    assert ranks_left() == []


@pytest.mark.thorough
@pytest.mark.lab
def test_a_lab_stays_on_its_cable() -> None:
    lab_or_skip()
    with Lab(2, cable=1500) as lab:
        assert [round(trip, 1) for trip in lab.measured().round_trips_s] == [0.0, 0.0]
        with pytest.raises(BadCondition, match=r"^cable cannot change while"):
            lab.set(cable=9000)
        with pytest.raises(BadCondition, match=r"^loss needs a switch"):
            lab.set(loss=0.1)
