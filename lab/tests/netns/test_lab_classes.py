"""Labs with traffic classes: packets of low priority wait, and are dropped first."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from stormtorch_lab.netns import BadCondition, Conditions, Lab
from stormtorch_lab.netns.links.kernel_network import shape
from stormtorch_lab.netns.measured import AccessLinkCount, Measured

MakeLab = Callable[..., Lab]
# Sends datagrams of 1,400 bytes with a DSCP, at a rate in bits per second, for some seconds.
FLOOD = """
import socket, sys, time
target, (port, dscp), (rate, seconds) = sys.argv[1], map(int, sys.argv[2:4]), map(float, sys.argv[4:6])
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
begin, sent = time.monotonic(), 0
while (now := time.monotonic() - begin) < seconds:
    if sent * 1442 * 8 <= now * rate:
        sock.sendto(b"0" * 1400, (target, port))
        sent += 1
    else:
        time.sleep(0.001)
"""
# Counts bytes that arrive at two ports within some seconds.
COUNT = """
import select, socket, sys, time
socks = []
for port in (4000, 4001):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    sock.bind(("0.0.0.0", port))
    socks.append(sock)
print("ready", flush=True)
counts, until = [0, 0], time.monotonic() + float(sys.argv[1])
while (left := until - time.monotonic()) > 0:
    for sock in select.select(socks, [], [], left)[0]:
        counts[socks.index(sock)] += len(sock.recv(2000))
print(*counts, flush=True)
"""


def shares(network: Lab, *, plain: float, low: float, dscp: int = 1) -> tuple[float, float]:
    """Megabits per second that arrive at host 1, plain and of low priority, of what host 0 sends."""
    seconds = 2.0
    receiver = network.start(1, [sys.executable, "-ISc", COUNT, str(seconds)], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == b"ready\n"
    senders = [
        network.start(0, [sys.executable, "-ISc", FLOOD, network.address(1), port, mark, str(rate * 1e6), str(seconds)])
        for port, mark, rate in (("4000", "0", plain), ("4001", str(dscp), low))
        if rate
    ]
    found = [8e-6 * int(word) / seconds for word in receiver.stdout.readline().split()]
    receiver.stdout.close()
    for each in (receiver, *senders):
        each.wait(10)
    return found[0], found[1]


@pytest.mark.thorough
@pytest.mark.lab
def test_low_priority_waits_for_others_and_takes_what_is_free(lab: MakeLab) -> None:
    network = lab(2, rate="20mbit", low_share=0.1, low_queue="32kb", probe=False)
    assert "htb" in network.kind
    alone = shares(network, plain=0.0, low=30.0)
    assert 16.0 < alone[1] < 20.0, "it has the link to itself"
    before = network.measured()
    plain, low = shares(network, plain=30.0, low=30.0)
    assert 14.0 < plain < 19.0
    assert 1.0 < low < 3.0, "its share, and no more"
    measured = network.measured().since(before)
    assert measured.low_loss is not None
    assert 0.7 < measured.low_loss < 1.0
    up = next(line for line in measured.lines if (line.host, line.direction) == (0, "up"))
    assert up.low_packets is not None and up.low_overflowed is not None
    assert up.low_packets < up.packets
    assert up.low_overflowed == up.overflowed > 1000, "all that is dropped is of low priority"
    assert measured.to_json()["low_loss"] == measured.low_loss


@pytest.mark.thorough
@pytest.mark.lab
def test_classes_come_and_go_while_a_lab_runs_and_nothing_is_forgotten(lab: MakeLab) -> None:
    network = lab(2, rate="20mbit", probe=False)
    plain, low = shares(network, plain=30.0, low=30.0)
    assert 0.5 < low / plain < 2.0, "all packets alike"
    assert network.measured().low_loss is None
    counted = network.measured().lines[0]
    network.set(low_share=0.0, low_queue="16kb")
    plain, low = shares(network, plain=30.0, low=30.0, dscp=8)
    assert low < 0.05 * plain
    line = network.measured().lines[0]
    assert line.packets > counted.packets
    assert line.low_overflowed
    network.set(low_share=0.5)
    plain, low = shares(network, plain=30.0, low=30.0)
    assert 0.6 < low / plain < 1.6
    assert (network.measured().lines[0].low_packets or 0) > (line.low_packets or 0)
    network.set(low_share=None)
    plain, low = shares(network, plain=30.0, low=30.0)
    assert 0.5 < low / plain < 2.0


@pytest.mark.pure
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"low_share": 1.0, "rate": "1gbit"}, r"low_share must lie in \[0, 1\), got 1"),
        ({"low_share": -0.1, "rate": "1gbit"}, r"low_share must lie in \[0, 1\), got -0.1"),
        ({"low_share": 0.1}, "low_share needs a rate"),
        ({"low_share": 0.1, "rate": "1gbit", "delay": "5ms"}, "low_share needs the kernel's network"),
        ({"low_share": 0.1, "rate": "1gbit", "low_queue": 10}, "low_queue must lie in"),
    ],
)
def test_what_no_line_can_do_is_refused_by_name(given: dict[str, object], words: str) -> None:
    with pytest.raises(BadCondition, match=words):
        Conditions(**given)  # type: ignore[arg-type]


@pytest.mark.pure
def test_conditions_tell_of_classes_where_there_are_any() -> None:
    assert "low_share" not in Conditions(rate="1gbit").to_json()
    conditions = Conditions(rate="1gbit", low_share=0.1, low_queue="64kb")
    assert conditions.to_json()["low_share"] == 0.1
    assert conditions.to_json()["low_queue_bytes"] == 64 << 10
    assert conditions.changed(low_share=None).low_share is None
    commands = shape("eth0", 1e9, conditions.line(0), low=(0.1, 64 << 10))
    assert sum("htb rate" in command for command in commands) == 3
    assert sum("dsfield" in command for command in commands) == 2


@pytest.mark.pure
def test_losses_of_low_priority_are_counted_once() -> None:
    lines = [
        AccessLinkCount(0, "up", packets=100, overflowed=10, low_packets=40, low_overflowed=10),
        AccessLinkCount(1, "down", packets=90, overflowed=10, low_packets=30, low_overflowed=10),
    ]
    assert Measured(links=[], lines=lines).low_loss == pytest.approx(20 / 50)
    plain = [AccessLinkCount(0, "up", packets=100, overflowed=10)]
    assert Measured(links=[], lines=plain).low_loss is None
    assert Measured(links=[], lines=lines).since(Measured(links=[], lines=plain)).lines[0].low_packets == 40
