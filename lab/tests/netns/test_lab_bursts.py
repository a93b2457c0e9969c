"""Labs with bursts of loss by time."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_lab import TRAFFIC

from stormtorch.network.loss import GilbertElliott, PerLink, TimedBursts
from stormtorch_lab.bench.allreduce import AllReduceSettings, run_allreduce
from stormtorch_lab.bench.sweep import SweepSettings, _fits
from stormtorch_lab.netns import BadCondition, Conditions, Lab
from stormtorch_lab.netns.measured import LinkCount, Measured
from stormtorch_lab.netns.per_link import read_per_link

MakeLab = Callable[..., Lab]
# Sends pairs of numbered datagrams, and sleeps after each pair.
PAIRS = """
import socket, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for pair in range(int(sys.argv[2])):
    for number in (2 * pair, 2 * pair + 1):
        sock.sendto(number.to_bytes(4, "big").ljust(100, b"0"), (sys.argv[1], 4000))
    time.sleep(float(sys.argv[3]))
"""


@pytest.mark.thorough
@pytest.mark.lab
def test_a_burst_takes_neighbours_and_is_over_after_a_silence(lab: MakeLab) -> None:
    network = lab(2, loss=0.5, burst="10ms", seed=3, probe=False)
    assert network.kind == "TUN relay"
    receiver = network.start(1, [sys.executable, "-ISs", TRAFFIC, "receive", "4000", "2"], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == b"ready\n"
    pairs = 150
    sender = network.start(0, [sys.executable, "-ISc", PAIRS, network.address(1), str(pairs), "0.02"])
    assert sender.wait(30) == 0
    arrived = set(json.loads(receiver.stdout.readline()))
    receiver.stdout.close()
    receiver.wait(10)
    fates = [(2 * pair in arrived, 2 * pair + 1 in arrived) for pair in range(pairs)]
    # A hundredth of a burst apart, even on a busy machine; then four times what a link remembers.
    assert sum(first == second for first, second in fates) > 0.9 * pairs
    lost = [not first for first, _ in fates]
    assert 0.25 * pairs < sum(lost) < 0.75 * pairs  # six standard deviations
    again = sum(lost[i] and lost[i + 1] for i in range(pairs - 1))
    assert again < 0.8 * sum(lost)  # within a burst it would be nearly all
    measured = network.measured()
    link = next(link for link in measured.links if (link.source, link.target) == (0, 1))
    assert (link.seen, link.lost) == (2 * pairs, 2 * pairs - len(arrived))
    assert measured.burst is not None and 2.0 < measured.burst < 10.0
    assert measured.to_json()["burst"] == measured.burst
    network.set(loss=0.1, burst=4)  # the relay has both
    network.set(loss=0.1, burst="2ms")


@pytest.mark.thorough
@pytest.mark.lab
def test_a_benchmark_in_the_lab_meets_timed_bursts_and_tells_their_length(lab: MakeLab) -> None:
    lab(2, loss=0.3, burst="5ms", probe=False).close()  # or the test is skipped
    network = Conditions(rate="20mbit", loss=0.3, burst="5ms")
    settings = AllReduceSettings(ranks=2, mb=(0.3,), iters=2, warmup=0, backends=("storm",), network=network)
    conditions = run_allreduce(settings).conditions
    assert conditions["requested"]["loss"] == {"p": 0.3, "burst_s": 0.005}
    assert conditions["network"] == "lab: TUN relay"
    # A full packet takes 0.6 ms at this rate.
    assert 0.02 < conditions["measured"]["loss"] < 0.7 and 1.5 < conditions["measured"]["burst"] < 40


@pytest.mark.lab
def test_a_time_cannot_be_given_to_a_lab_that_counts_packets(lab: MakeLab) -> None:
    network = lab(2, loss=0.1, burst=4, probe=False)
    with pytest.raises(BadCondition, match="another kind of network") as caught:
        network.set(loss=0.1, burst="5ms")
    assert caught.value.name == "burst"
    assert network.conditions.model(0, 1) == GilbertElliott(p=0.1, burst=4)


def test_conditions_take_a_time_and_say_so() -> None:
    conditions = Conditions(rate="100mbit", loss=0.1, burst="5ms")
    assert conditions.model(0, 1) == TimedBursts(p=0.1, burst_s=0.005)
    assert conditions.timed and not Conditions(loss=0.1, burst=5).timed
    assert conditions.to_json()["loss"] == {"p": 0.1, "burst_s": 0.005}
    assert conditions.changed(rate="50mbit").timed and not conditions.changed(loss=0.2).timed
    one = Conditions(loss=PerLink(links={(0, 1): TimedBursts(p=0.1, burst_s=0.005)}))
    assert one.timed and one.to_json()["loss"]["links"] == {"0>1": {"p": 0.1, "burst_s": 0.005}}


@pytest.mark.parametrize(
    ("loss", "burst"), [(0.1, "0ms"), (0.1, "5"), (0.1, "-3ms"), (0.0, "5ms"), (1.0, "5ms"), (0.1, float("nan"))]
)
def test_a_burst_that_makes_no_sense_is_refused_by_name(loss: float, burst: float | str) -> None:
    with pytest.raises(BadCondition) as caught:
        Conditions(loss=loss, burst=burst)
    assert caught.value.name == "burst"


def test_a_file_gives_single_links_bursts_of_time(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text('{"links": [{"from": 0, "to": 1, "loss": 0.2, "burst": "5ms"}]}')
    found = read_per_link(path, Conditions(), 2)
    assert found.model(0, 1) == TimedBursts(p=0.2, burst_s=0.005)
    assert found.timed
    path.write_text('{"links": [{"from": 0, "to": 1, "loss": 0.2, "burst": "5"}]}')
    with pytest.raises(BadCondition, match=r"links\[0\]: burst must be"):
        read_per_link(path, Conditions(), 2)


def test_measured_bursts_are_those_since_the_last_look() -> None:
    before = Measured(links=[LinkCount(0, 1, 100, 30, 3), LinkCount(1, 0, 100, 0, 0)], lines=[])
    after = Measured(links=[LinkCount(0, 1, 200, 50, 5), LinkCount(1, 0, 200, 40, 2)], lines=[])
    assert after.since(before).burst == 15.0
    uncounted = Measured(links=[LinkCount(0, 1, 100, 30)], lines=[])
    assert uncounted.since(uncounted).burst is None
    assert "burst" not in uncounted.to_json()


def test_a_sweep_has_every_burst_at_every_loss_and_one_point_without_loss() -> None:
    settings = SweepSettings(rates=("100mbit",), delays=("0ms",), losses=(0.0, 0.1), bursts=(1.0, 20.0, "5ms"))
    points = [point.network for point in settings.points()]
    assert [point.to_json()["loss"] for point in points if point] == [
        0.0,
        0.1,
        {"p": 0.1, "burst": 20.0},
        {"p": 0.1, "burst_s": 0.005},
    ]
    plain, independent, counted, timed = points
    assert plain and independent and counted and timed
    assert _fits(plain, counted) and _fits(independent, counted)
    assert not _fits(counted, timed) and not _fits(timed, plain)
