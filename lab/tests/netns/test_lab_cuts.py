"""Labs whose hosts, links and paths fail while they run: each cut stops what it names, and nothing else."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stormtorch_lab.netns import AccessLink, Lab, between, both_ways

pytestmark = pytest.mark.lab
MakeLab = Callable[..., Lab]
TRAFFIC = str(Path(__file__).parents[3] / "tests" / "helpers" / "lab_traffic.py")
KINDS = [pytest.param({}, id="kernel"), pytest.param({"delay": "1ms"}, id="relay")]


def arrivals(network: Lab, links: list[tuple[int, int]], size: int = 100) -> set[tuple[int, int]]:
    """Sends ten datagrams on each link at once, and returns the links on which any arrived."""
    receivers = {}
    for link in links:
        port = str(4000 + 10 * link[0] + link[1])
        words = [sys.executable, "-ISs", TRAFFIC, "receive", port, "0.5"]
        receivers[link] = network.start(link[1], words, stdout=subprocess.PIPE, text=True)
    senders = []
    for link, receiver in receivers.items():
        assert receiver.stdout is not None and receiver.stdout.readline() == "ready\n"
        port = str(4000 + 10 * link[0] + link[1])
        words = [sys.executable, "-ISs", TRAFFIC, "send", network.address(link[1]), port, "10", "0.001", str(size)]
        senders.append(network.start(link[0], words))
    assert [sender.wait(30) for sender in senders] == [0] * len(links)
    came = set()
    for link, receiver in receivers.items():
        time.sleep(0.05)
        # A receiver without any datagram still waits for the first.
        network.signal(receiver, signal.SIGINT)
        assert receiver.stdout is not None
        if receiver.stdout.readline() not in ("", "[]\n"):
            came.add(link)
        receiver.stdout.close()
        receiver.wait(10)
    return came


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_links_are_cut_one_way_or_both_ways_and_partitions_are_links(lab: MakeLab, kind: dict[str, str]) -> None:
    network = lab(3, probe=False, **kind)
    every = [(a, b) for a in range(3) for b in range(3) if a != b]
    network.set(cut_links={(0, 1)})
    assert arrivals(network, every) == set(every) - {(0, 1)}
    network.set(cut_links=both_ways((0, 1)))
    assert arrivals(network, every) == set(every) - {(0, 1), (1, 0)}
    network.set(cut_links=between({0}, {1, 2}))
    assert arrivals(network, every) == {(1, 2), (2, 1)}
    network.set(cut_links=(), cut={0, 1, 2})
    assert arrivals(network, every) == set()
    network.set(cut=())
    assert arrivals(network, every) == set(every)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_packets_above_the_mtu_of_a_hosts_path_vanish_until_it_is_lifted(lab: MakeLab, kind: dict[str, str]) -> None:
    network = lab(3, probe=False, **kind)
    links = [(0, 1), (1, 0), (2, 1)]
    network.set(mtu=1200)
    assert arrivals(network, links, size=1172) == set(links)
    assert arrivals(network, links, size=1173) == set()
    network.set(mtu=None)
    assert arrivals(network, links, size=1472) == set(links)
    network.set(lines={0: AccessLink(mtu=1200)})
    assert arrivals(network, links, size=1472) == {(2, 1)}


def test_cuts_leave_the_losses_and_the_counters_of_links_as_they_are(lab: MakeLab) -> None:
    network = lab(2, loss=0.5, probe=False)
    for cut in ((), {0}, (), {0, 1}, ()):
        network.set(cut=cut)
        words = [sys.executable, "-ISs", TRAFFIC, "send", network.address(1), "4000", "40", "0", "100"]
        assert network.start(0, words).wait(10) == 0
    (link,) = (link for link in network.measured().links if (link.source, link.target) == (0, 1))
    assert link.seen == 120
    assert 30 < link.lost < 90


@pytest.mark.thorough
def test_signals_reach_the_command_and_not_the_program_that_entered_the_host(lab: MakeLab) -> None:
    network = lab(2, probe=False)
    script = "import time\nwhile True: print(1, flush=True); time.sleep(0.05)"
    process = network.start(0, [sys.executable, "-ISc", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)

    def talks() -> bool:
        time.sleep(0.2)
        process.stdout.read()  # type: ignore[union-attr]
        time.sleep(0.4)
        return bool(process.stdout.read())  # type: ignore[union-attr]

    assert talks()
    network.signal(process, signal.SIGSTOP)
    assert not talks()
    network.signal(process, signal.SIGCONT)
    assert talks()
    network.signal(process, signal.SIGKILL)
    assert process.wait(5) in (-signal.SIGKILL, 128 + signal.SIGKILL)
    network.signal(process, signal.SIGKILL)  # it has ended: nothing happens
    process.stdout.close()


@pytest.mark.thorough
def test_a_command_that_is_stopped_ends_with_the_lab(lab: MakeLab) -> None:
    network = lab(2, probe=False)
    process = network.start(1, ["sleep", "60"])
    time.sleep(0.3)
    network.signal(process, signal.SIGSTOP)
    time.sleep(0.3)
    network.close()
    assert process.wait(5) != 0
