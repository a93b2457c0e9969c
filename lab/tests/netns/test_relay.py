"""Labs with delay by the native relay, if the kernel has no netem."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_lab import TRAFFIC, exchanged, with_rates

from stormtorch.network.loss import Trace
from stormtorch_lab.netns import BadCondition, Lab, LabError
from stormtorch_lab.netns.access import has_netem
from stormtorch_lab.netns.fixtures import lab_or_skip
from stormtorch_lab.netns.links.relay import RelayNetwork

MakeLab = Callable[..., Lab]
pytestmark = pytest.mark.lab


@pytest.fixture(autouse=True)
def _relay() -> None:
    lab_or_skip()
    if has_netem():
        pytest.skip("this kernel has netem, so delays are not made by the relay")


@pytest.mark.thorough
def test_round_trip_and_rate_are_what_was_asked(lab: MakeLab) -> None:
    measured = with_rates(lab, 3, rate="50mbit", delay="20ms").measured()
    # Never shorter; longer while the cores are busy.
    assert all(0.04 <= seconds < 0.055 for seconds in measured.round_trips_s) and len(measured.round_trips_s) == 3


@pytest.mark.thorough
def test_loss_and_traces_work_with_delay(lab: MakeLab) -> None:
    network = lab(2, delay="2ms", loss=0.1, probe=False)
    arrived = exchanged(network, 0, 1, 5000)
    link = next(link for link in network.measured().links if (link.source, link.target) == (0, 1))
    assert (link.seen, link.lost) == (5000, 5000 - len(arrived))
    assert abs(link.lost - 500) < 4 * 450**0.5
    bits = "0001101000"
    network.set(loss=Trace(bits=bits))
    arrived = exchanged(network, 0, 1, 100)
    assert "".join("0" if number in arrived else "1" for number in range(100)) in bits * 11


@pytest.mark.thorough
def test_jitter_delays_and_keeps_the_order(lab: MakeLab) -> None:
    network = lab(2, delay="1ms", jitter="5ms", probe=False)
    arrived = exchanged(network, 0, 1, 2000)
    assert arrived == list(range(2000))


def test_links_may_have_delays_of_their_own(lab: MakeLab) -> None:
    measured = lab(2, delays={(0, 1): 0.03}).measured()
    assert all(0.03 <= seconds < 0.045 for seconds in measured.round_trips_s) and len(measured.round_trips_s) == 2


@pytest.mark.thorough
def test_conditions_change_while_it_runs(lab: MakeLab) -> None:
    network = lab(2, delay="1ms", probe=False)
    network.set(rate="20mbit", queue="2mb")
    begin = time.monotonic()
    assert len(exchanged(network, 0, 1, 600, pause_s=0, size=1472)) == 600
    assert time.monotonic() - begin > 600 * 1514 * 8 / 20e6
    network.set(cut={1})
    words = [sys.executable, "-ISs", TRAFFIC, "send", network.address(1), "4000", "50", "0", "100"]
    assert network.start(0, words).wait(10) == 0
    network.set(cut=(), queue="16kb")
    arrived = exchanged(network, 0, 1, 600, pause_s=0, size=1472)
    overflowed = sum(line.overflowed for line in network.measured().lines)
    assert overflowed == 600 - len(arrived) > 0


def test_delay_cannot_be_added_to_a_lab_without(lab: MakeLab) -> None:
    with pytest.raises(BadCondition, match="delay"):
        lab(2, probe=False).set(delay="5ms")


def test_relay_that_dies_is_noticed_and_nothing_is_left(lab: MakeLab) -> None:
    network = lab(2, delay="1ms", probe=False)
    relay = network._network._process  # type: ignore[union-attr]
    os.kill(relay.pid, signal.SIGKILL)
    relay.wait(10)
    with pytest.raises(LabError, match="relay"):
        network.measured()
    network.close()


@pytest.mark.thorough
def test_four_hosts_carry_200_mbit_each(lab: MakeLab) -> None:
    """In both directions at once, each to its neighbour, as the probe does."""
    network = lab(4, rate="200mbit", delay="5ms")
    assert max(network.measured().rates_bits) < 1.15 * 200e6
    # By the processor's time that it needed: a busy machine gives it less, but it must do with one core.
    relay: RelayNetwork = network._network  # type: ignore[assignment]
    times = Path(f"/proc/{relay._process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    seconds = sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    carried = sum(line.packets for line in relay.lines() if line.direction == "down")
    assert carried > 5000
    assert 8 * 1514 * carried > 4 * 200e6 * seconds


def test_relay_ends_with_its_owner(lab: MakeLab) -> None:
    network = lab(2, delay="1ms", probe=False)
    relay: subprocess.Popen[str] = network._network._process  # type: ignore[union-attr]
    network.close()
    assert relay.returncode == 0
