"""Labs with real packets: the network has the requested conditions."""

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stormtorch.network.loss import Bernoulli, GilbertElliott, PerLink, Trace
from stormtorch_lab.netns import BadCondition, Lab, LabError
from stormtorch_lab.netns.running import OutputLine

pytestmark = pytest.mark.lab
MakeLab = Callable[..., Lab]
TRAFFIC = str(Path(__file__).parents[3] / "tests" / "helpers" / "lab_traffic.py")


def exchanged(
    network: Lab, source: int, target: int, count: int, *, pause_s: float = 50e-6, size: int = 100
) -> list[int]:
    """Sends numbered datagrams from one host to another and returns the numbers that arrived."""
    receiver = network.start(
        target, [sys.executable, "-ISs", TRAFFIC, "receive", "4000", "0.5"], stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "ready\n"
    words = [sys.executable, "-ISs", TRAFFIC, "send", network.address(target), "4000", count, pause_s, size]
    assert network.start(source, [str(word) for word in words]).wait(30) == 0
    numbers: list[int] = json.loads(receiver.stdout.readline())
    receiver.stdout.close()
    receiver.wait(10)
    return numbers


def runs_of_losses(numbers: list[int]) -> list[int]:
    return [after - before - 1 for before, after in itertools.pairwise(numbers) if after - before > 1]


def output_of(network: Lab, words: list[str], per_node: int = 1) -> tuple[list[int], list[OutputLine]]:
    lines: list[OutputLine] = []
    return network.run(words, per_node=per_node, write=lines.append, timeout_s=60), lines


def with_rates(make: MakeLab, hosts: int, **conditions: Any) -> Lab:
    """A lab whose probe filled the links in spite of other load on the machine."""
    for _ in range(5):
        network = make(hosts, **conditions)
        asked = network.conditions.line(0).up_bits
        rates = network.measured().rates_bits
        assert asked is not None and len(rates) == hosts and max(rates) < 1.15 * asked
        if min(rates) > 0.9 * asked:
            return network
        network.close()
    pytest.fail(f"five probes did not fill links of {asked} bit/s: {rates}")


def test_every_rank_has_torchruns_variables_and_its_own_host(lab: MakeLab) -> None:
    script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $(hostname)"
    statuses, lines = output_of(lab(2, probe=False), ["sh", "-c", script], per_node=2)
    assert statuses == [0] * 4
    assert sorted(line.text for line in lines) == [
        f"{2 * h + k} {k} 4 2 198.18.0.1 h{h}" for h in (0, 1) for k in (0, 1)
    ]


def test_statuses_are_those_of_the_ranks(lab: MakeLab) -> None:
    statuses, lines = output_of(
        lab(3, probe=False), ["sh", "-c", "[ $RANK != 1 ] || kill -9 $$; echo e >&2; exit $RANK"]
    )
    assert statuses == [0, 137, 2]
    assert [line.error for line in lines] == [True, True]


@pytest.mark.thorough
def test_rank_that_does_not_end_is_ended_by_the_timeout(lab: MakeLab) -> None:
    begin = time.monotonic()
    assert lab(2, probe=False).run(["sh", "-c", "[ $RANK = 0 ] || sleep 60"], timeout_s=0.5) == [0, 124]
    assert time.monotonic() - begin < 20


def test_random_loss_is_what_was_asked_and_what_is_reported(lab: MakeLab) -> None:
    network = lab(2, loss=0.1, probe=False)
    sent = 20_000
    arrived = exchanged(network, 0, 1, sent, pause_s=0)
    link = next(link for link in network.measured().links if (link.source, link.target) == (0, 1))
    # Four standard deviations of a binomial; only the lab may lose packets.
    assert abs(sent - len(arrived) - 0.1 * sent) < 4 * (sent * 0.09) ** 0.5
    assert (link.seen, link.lost) == (sent, sent - len(arrived))


@pytest.mark.thorough
def test_bursts_have_the_length_that_was_asked(lab: MakeLab) -> None:
    arrived = exchanged(lab(2, loss=0.1, burst=8, probe=False), 0, 1, 20_000, pause_s=0)
    runs = runs_of_losses(arrived)
    assert 1 - len(arrived) / 20_000 == pytest.approx(0.1, abs=0.025)
    assert sum(runs) / len(runs) == pytest.approx(8, abs=2)


@pytest.mark.thorough
def test_same_seed_loses_the_same_packets(lab: MakeLab) -> None:
    first, again, other = (exchanged(lab(2, loss=0.2, seed=seed, probe=False), 0, 1, 300) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.thorough
def test_trace_is_replayed_in_order(lab: MakeLab) -> None:
    bits = "0001101000"
    arrived = exchanged(lab(2, loss=Trace(bits=bits), probe=False), 0, 1, 100)
    fates = "".join("0" if number in arrived else "1" for number in range(100))
    assert fates in bits * 11 and arrived


@pytest.mark.thorough
def test_links_lose_each_for_itself(lab: MakeLab) -> None:
    model = PerLink(links={(0, 1): Bernoulli(p=1.0), (1, 2): GilbertElliott(p=0.5, burst=4)})
    network = lab(3, loss=model, probe=False)
    assert len(exchanged(network, 1, 0, 200)) == 200
    assert 20 < len(exchanged(network, 1, 2, 200)) < 180
    words = [sys.executable, "-ISs", TRAFFIC, "send", network.address(1), "4000", "50", "0", "100"]
    assert network.start(0, words).wait(10) == 0
    assert {(link.source, link.target): link.lost for link in network.measured().links}[0, 1] == 50


def test_bundles_of_segments_are_lost_packet_by_packet(lab: MakeLab) -> None:
    network = lab(2, loss=0.1, probe=False)
    script = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.setsockopt(17, 103, 1000)\n"
        f"for _ in range(100): s.sendto(bytes(20000), ('{network.address(1)}', 4000))"
    )
    assert network.start(0, [sys.executable, "-ISc", script]).wait(10) == 0
    link = next(link for link in network.measured().links if (link.source, link.target) == (0, 1))
    assert link.seen == 2000
    assert 100 < link.lost < 300


def test_rate_is_measured_and_overflow_is_counted(lab: MakeLab) -> None:
    network = with_rates(lab, 2, rate="50mbit", queue="32kb")
    measured = network.measured()
    assert all(seconds < 0.02 for seconds in measured.round_trips_s)
    assert measured.overflow == 0.0  # the probe's overflow is not counted
    arrived = exchanged(network, 0, 1, 2000, pause_s=0, size=1472)
    overflowed = {(line.host, line.direction): line.overflowed for line in network.measured().lines}
    # All packets that did not arrive found a full queue of the lab.
    assert overflowed[0, "up"] + overflowed[1, "down"] == 2000 - len(arrived)


@pytest.mark.thorough
def test_conditions_change_while_it_runs(lab: MakeLab) -> None:
    network = lab(2, rate="100mbit", probe=False)
    assert len(exchanged(network, 0, 1, 500)) == 500
    network.set(loss=0.5)
    assert 150 < len(exchanged(network, 0, 1, 500)) < 350
    network.set(loss=0.0, rate="20mbit", queue="1mb")
    begin = time.monotonic()
    assert len(exchanged(network, 0, 1, 600, pause_s=0, size=1472)) == 600
    assert time.monotonic() - begin > 600 * 1514 * 8 / 20e6
    network.set(rate=None)
    links = network.measured().links
    assert {(link.source, link.target): link.seen for link in links}[0, 1] == 1600
    lines = network.measured().lines
    assert {(line.host, line.direction): line.packets for line in lines}[0, "up"] >= 1600


def test_host_that_is_cut_off_comes_back(lab: MakeLab) -> None:
    network = lab(3, probe=False)
    network.set(cut={1})
    words = [sys.executable, "-ISs", TRAFFIC, "send", network.address(1), "4000", "50", "0", "100"]
    assert network.start(0, words).wait(10) == 0
    assert len(exchanged(network, 0, 2, 50)) == 50
    network.set(cut=())
    assert len(exchanged(network, 0, 1, 50)) == 50


def test_bad_change_is_refused_and_changes_nothing(lab: MakeLab) -> None:
    network = lab(2, loss=0.1, probe=False)
    for changes in ({"loss": 2.0}, {"cut": {5}}, {"rat": "1mbit"}):
        with pytest.raises(BadCondition):
            network.set(**changes)
    assert network.conditions.model(0, 1) == Bernoulli(p=0.1)


@pytest.mark.thorough
def test_management_network_loses_nothing(lab: MakeLab) -> None:
    network = lab(2, loss=1.0, management=True, probe=False)
    script = (
        "import os, socket; s = socket.create_server(('198.19.0.1', 5)) if os.environ['RANK'] == '0' else None\n"
        "import time\n"
        "for _ in range(50):\n"
        "  try: c = s.accept()[0] if s else socket.create_connection(('198.19.0.1', 5)); break\n"
        "  except OSError: time.sleep(0.1)\n"
        "c.sendall(b'x'); assert c.recv(1) == b'x'"
    )
    assert network.run([sys.executable, "-ISc", script], timeout_s=30) == [0, 0]


@pytest.mark.thorough
def test_tcp_uses_the_congestion_control_that_was_asked(lab: MakeLab) -> None:
    # Namespaces may use only one of them on a machine whose default is the other.
    for name in ("cubic", "bbr"):
        if name not in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split():
            continue
        _, lines = output_of(lab(2, tcp=name, probe=False), ["cat", "/proc/sys/net/ipv4/tcp_congestion_control"])
        assert [line.text for line in lines] == [name, name]
    with pytest.raises(LabError, match="no TCP congestion control"):
        lab(2, tcp="warp")


@pytest.mark.thorough
def test_two_labs_do_not_see_each_other(lab: MakeLab) -> None:
    lossy, clean = lab(2, loss=1.0, probe=False), lab(2, probe=False)
    assert len(exchanged(clean, 0, 1, 100)) == 100
    assert sum(link.seen for link in lossy.measured().links) == 0


def test_closed_lab_says_so(lab: MakeLab) -> None:
    network = lab(2, probe=False)
    network.close()
    network.close()
    with pytest.raises(LabError, match="not open"):
        network.run(["true"])


def test_labs_can_be_made_from_several_threads(lab: MakeLab) -> None:
    found: list[list[int]] = []

    def work() -> None:
        with Lab(2, probe=False) as network:
            found.append(network.run(["true"]))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [[0, 0]] * 3
