"""Bursts of loss that last some time: values, errors, and what the engine makes of them under a virtual clock."""

import math
from typing import Any

import pytest
import torch

from stormtorch import faults
from stormtorch.checks import BadSetting
from stormtorch.collectives import Group, all_reduce
from stormtorch.exchange.exchange import Transport
from stormtorch.exchange.simulated import SimulatedNetwork
from stormtorch.network.loss import (
    Bernoulli,
    GilbertElliott,
    LinkFaults,
    PerLink,
    Stragglers,
    TimedBursts,
    Trace,
    loss_in_bursts,
)
from stormtorch_lab.simulation.arrivals.masks import Masks
from stormtorch_lab.studies.settings import LmSettings, SimSettings

pytestmark = pytest.mark.pure


def test_a_burst_is_a_number_of_packets_or_a_time() -> None:
    assert loss_in_bursts(0.1, 1) == Bernoulli(p=0.1)
    assert loss_in_bursts(0.1, 20) == GilbertElliott(p=0.1, burst=20)
    assert loss_in_bursts(0.1, "5ms") == TimedBursts(p=0.1, burst_s=0.005)
    assert loss_in_bursts(0.1, "250us").link_faults() == LinkFaults(loss=0.1, burst_s=250e-6)


@pytest.mark.parametrize(
    ("loss", "burst", "problem"),
    [
        (0.1, "0ms", "burst must lie in"),
        (0.1, "2h", "burst must be a number of packets, or a time such as 5ms, got '2h'"),
        (0.1, "3601s", "burst must lie in"),
        (0.1, "5", "burst must be a number of packets, or a time such as 5ms, got '5'"),
        (0.1, "-3ms", "burst must be a number of packets, or a time such as 5ms, got '-3ms'"),
        (0.1, "nan", "burst must be a number of packets"),
        (0.1, "nanms", "burst must be a number of packets"),
        (0.1, math.nan, "burst must be a finite number"),
        (0.1, False, "burst must be a finite number"),
        (0.1, None, "burst must be a finite number"),
        (0.0, "5ms", "burst needs a loss above 0"),
        (1.0, "5ms", "burst needs a loss above 0 and below 1"),
    ],
)
def test_a_burst_that_makes_no_sense_is_refused_by_name(loss: float, burst: Any, problem: str) -> None:
    for refuse in (lambda: loss_in_bursts(loss, burst, name="loss"), lambda: faults(loss=loss, burst=burst)):
        with pytest.raises(ValueError, match=f"^{problem}"):
            refuse()


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"p": 0.1, "burst_s": 0.0}, "^burst_s must lie in"),
        ({"p": 0.1, "burst_s": math.nan}, "^burst_s must be a finite number"),
        ({"p": 0.1, "burst_s": "5ms"}, "^burst_s must be a finite number"),
        ({"p": 0.0, "burst_s": 1.0}, "^burst_s needs a p above 0"),
        ({"p": 1.0, "burst_s": 1.0}, "^burst_s needs a p above 0"),
        ({"p": 1.5, "burst_s": 1.0}, "^p must lie in"),
    ],
)
def test_a_model_of_timed_bursts_names_what_is_wrong(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TimedBursts(**values)


def test_faults_take_a_time_for_all_links_or_for_one() -> None:
    links = {
        (0, 1): 0.2,
        (0, 2): {"loss": 0.2},
        (0, 3): {"loss": 0.0},
        (0, 4): {"burst": 4},
        (0, 5): TimedBursts(p=0.5, burst_s=1.0),
        (0, 6): Trace(bits="01"),
    }
    made = faults(loss=0.1, burst="5ms", links=links).settings  # type: ignore[arg-type]  # mypy infers a dict of objects
    default = made["default"]
    assert (default["loss"], default["burst"], default["burst_ns"]) == (0.1, 1.0, 5_000_000)
    found = {link: (each["loss"], each["burst"], each["burst_ns"]) for link, each in made["links"].items()}
    assert found == {
        (0, 1): (0.2, 1.0, 0),
        (0, 2): (0.2, 1.0, 5_000_000),
        (0, 3): (0.0, 1.0, 0),
        (0, 4): (0.1, 4.0, 0),
        (0, 5): (0.5, 1.0, 1_000_000_000),
        (0, 6): (0.0, 1.0, 0),
    }
    with pytest.raises(ValueError, match=r"^burst must be given with a loss rate"):
        faults(loss=TimedBursts(p=0.5, burst_s=1.0), burst="5ms")


def time_of_sum(seed: int, burst: float | str) -> tuple[float, int]:
    """Virtual seconds that an exact sum took between two ranks, and datagrams that were lost."""

    def work(transport: Transport) -> torch.Tensor:
        values = torch.full((100_000,), float(transport.rank + 1))
        all_reduce(Group(transport), values).wait()
        return values

    network = SimulatedNetwork(2, loss=0.3, burst=burst, rate="50mbit", seed=seed)
    for values in network.run(work):
        assert torch.equal(values, torch.full((100_000,), 3.0))
    return network.now_s, sum(network.health(rank)["faults"]["lost"] for rank in range(2))


def test_a_simulated_network_has_the_same_timed_bursts_for_the_same_seed() -> None:
    assert time_of_sum(1, "5ms") == time_of_sum(1, "5ms")
    assert time_of_sum(1, "5ms") != time_of_sum(2, "5ms")


def test_a_sender_that_waits_gets_out_of_a_timed_burst() -> None:
    # Half of the links begin in a burst; if it were one of many packets, few probes of a small sum would not end it.

    def ping(transport: Transport) -> None:
        all_reduce(Group(transport), torch.ones(1)).wait()

    times_s = []
    for seed in range(40):
        network = SimulatedNetwork(2, loss=0.5, burst="5ms", seed=seed)
        begin_s = network.now_s
        network.run(ping)
        times_s.append(network.now_s - begin_s)
    assert 0.002 < sum(times_s) / len(times_s) < 0.5


@pytest.mark.parametrize(
    "network",
    [
        TimedBursts(p=0.1, burst_s=0.005),
        PerLink(links={(0, 1): TimedBursts(p=0.1, burst_s=0.005)}),
        Stragglers(chance=0.1, network=PerLink(default=TimedBursts(p=0.1, burst_s=0.005))),
    ],
)
def test_virtual_workers_have_no_clock(network: Any) -> None:
    with pytest.raises(ValueError, match=r"^network must have bursts of packets .* no clock"):
        Masks(network, workers=4, owner_C=torch.arange(4), seed=1)
    with pytest.raises(BadSetting) as caught:
        SimSettings(network=network)
    assert (caught.value.name, "no clock" in str(caught.value)) == ("per_link", True)


def test_settings_of_trainings_take_a_time_where_there_is_a_clock() -> None:
    assert LmSettings(loss=0.1, burst="5ms").burst == "5ms"
    with pytest.raises(BadSetting, match="no clock") as caught:
        SimSettings(loss=0.1, burst="5ms")
    assert caught.value.name == "burst"
    for burst in ("0ms", "5", "-3ms"):
        with pytest.raises(BadSetting) as caught:
            LmSettings(loss=0.1, burst=burst)
        assert caught.value.name == "burst"
