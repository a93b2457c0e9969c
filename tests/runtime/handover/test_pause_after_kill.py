"""Killed and stopped processes, and forged ICMP messages: how long ranks pause, and which rank they exclude."""

import os
import signal
import socket
import statistics
import struct
import time
from collections.abc import Iterator

import pytest

from pause_after_kill import Job, job, measure
from stormtorch_lab.netns.fixtures import lab_or_skip

WITHIN_S = 6.0
"""About five times of what it takes at rest; the silence alone is 10 s."""


@pytest.mark.thorough
def test_others_make_their_next_step_soon_after_a_process_is_killed() -> None:
    assert statistics.median(measure(3, 6, signal.SIGKILL, on_lab=False)) < WITHIN_S


@pytest.mark.slow
@pytest.mark.lab
def test_others_make_their_next_step_soon_after_a_process_on_another_host_is_killed() -> None:
    lab_or_skip()
    assert measure(1, 4, signal.SIGKILL, on_lab=True)[0] < WITHIN_S


@pytest.fixture
def raw() -> Iterator[socket.socket]:
    try:
        opened = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    except PermissionError:
        pytest.skip("only root may forge ICMP")
    with opened:
        yield opened


def refusal(port: int, refused: int, source: int, cookie: int) -> bytes:
    """An ICMP "port unreachable" message, in answer to a ping of a rank at another port."""
    # Version 2 and kind ping, flags, source, check, cookie; the rest is not read.
    ping = struct.pack("<BBHII20x", 2 << 4 | 7, 0, source, 0, cookie)
    host = socket.inet_aton("127.0.0.1")
    udp = struct.pack("!HHHH", port, refused, 8 + len(ping), 0)
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 28 + len(ping), 0, 0, 64, socket.IPPROTO_UDP, 0, host, host)
    message = struct.pack("!BBHI", 3, 3, 0, 0) + ip + udp + ping
    total = sum(struct.unpack(f"!{len(message) // 2}H", message))
    total = (total & 0xFFFF) + (total >> 16)
    return message[:2] + struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF) + message[4:]


def forge(raw: socket.socket, running: Job, cookie: int, seconds: float) -> None:
    """Sends rank 0 a forged "port unreachable" of rank 1's port, a hundred times a second."""
    message = refusal(running.port(0), running.port(1), 0, cookie)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        raw.sendto(message, ("127.0.0.1", 0))
        time.sleep(0.01)


@pytest.mark.thorough
def test_forged_refusals_leave_out_nobody_who_answers_and_without_the_cookie_nobody_at_all(raw: socket.socket) -> None:
    with job(4) as running:
        forge(raw, running, running.cookie(), 2.5)
        assert [running.view(rank) for rank in range(4)] == [1] * 4
        assert all(running.steps(rank)[-1] > time.monotonic() - 3.0 for rank in range(4))
        # Rank 1 is stopped for a while: an attacker that does not see its datagrams cannot quote them.
        running.send(running.processes[1], signal.SIGSTOP)
        forge(raw, running, running.cookie() ^ 1, 2.5)
        running.send(running.processes[1], signal.SIGCONT)
        at = time.monotonic()
        running.wait_for(lambda: all(running.steps(rank)[-1] > at for rank in range(4)))
        assert [running.view(rank) for rank in range(4)] == [1] * 4
        # Check that forgeries arrive: an attacker on the path, who could drop datagrams anyway, succeeds.
        running.send(running.processes[1], signal.SIGSTOP)
        at = time.monotonic()
        forge(raw, running, running.cookie(), 2.5)
        running.wait_for(lambda: running.view(0) > 1, 30.0)
        assert next(step for step in running.steps(0) if step > at + 0.25) < at + 8.0


@pytest.mark.thorough
def test_rank_that_pauses_for_less_than_the_silence_stays() -> None:
    with job(3) as running:
        running.send(running.processes[2], signal.SIGSTOP)
        time.sleep(5.0)
        running.send(running.processes[2], signal.SIGCONT)
        at = time.monotonic()
        running.wait_for(lambda: all(running.steps(rank)[-1] > at for rank in range(3)))
        assert [running.view(rank) for rank in range(3)] == [1] * 3


def test_child_that_was_forked_does_not_hold_the_ports_of_a_process_that_is_killed() -> None:
    with job(4, children=1) as running:
        assert running.strike(3, signal.SIGKILL) < WITHIN_S
        os.kill(int((running.folder / "child-3").read_text()), 0)  # it lives
