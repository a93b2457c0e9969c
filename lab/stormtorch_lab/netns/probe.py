"""Measures round trip and rate from one host to the next. Runs on all hosts at once; needs only Python.

probe.py OWN NEXT START_AT_S PACKETS RATE_BITS SECONDS

prints {"round_trips_s": [...], "rate_bits": bits per second that this host received, or null}.
"""

import contextlib
import json
import socket
import sys
import threading
import time

_ECHO_PORT, _SINK_PORT = 7007, 9009
_DEVICE = "eth0"
_PAYLOAD = 1472
_MOST_FRAMES_PER_SEND = 16
# The fastest interval of this length gives the rate: on a busy machine, the sender is sometimes interrupted.
_STRETCH_S = 0.1
_UDP_SEGMENT = 103


def main() -> None:
    """Measures round trips; then sends at the given rate and counts the bytes that arrive."""
    own, following, start_at, packets, rate, seconds = (
        sys.argv[1],
        sys.argv[2],
        float(sys.argv[3]),
        int(sys.argv[4]),
        float(sys.argv[5]),
        float(sys.argv[6]),
    )
    echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    echo.bind((own, _ECHO_PORT))
    threading.Thread(target=_serve_echo, args=(echo,), daemon=True).start()
    _sleep_until(start_at)
    round_trips = _measure_round_trips(own, following, packets)
    received = None
    if rate > 0:
        # Wait for hosts that are late because of loss; this host still echoes meanwhile.
        _sleep_until(start_at + _ROUND_TRIPS_S)
        received = _flood(own, following, rate, seconds)
    else:
        _sleep_until(start_at + _ROUND_TRIPS_S)
    print(json.dumps({"round_trips_s": round_trips, "rate_bits": received}))


_ROUND_TRIPS_S = 0.6


def _serve_echo(echo: socket.socket) -> None:
    while True:
        data, source = echo.recvfrom(64)
        echo.sendto(data, source)


def _measure_round_trips(own: str, following: str, packets: int) -> list[float]:
    round_trips: list[float] = []
    deadline = time.monotonic() + _ROUND_TRIPS_S
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
        probe_socket.bind((own, 0))
        number = 0
        while len(round_trips) < packets and time.monotonic() < deadline:
            number += 1
            begin = time.monotonic()
            probe_socket.sendto(number.to_bytes(4, "big"), (following, _ECHO_PORT))
            probe_socket.settimeout(max(min(0.3, deadline - begin), 0.001))
            with contextlib.suppress(TimeoutError, ConnectionRefusedError):
                while int.from_bytes(probe_socket.recv(64), "big") != number:
                    pass
                round_trips.append(time.monotonic() - begin)
    return round_trips


def _flood(own: str, following: str, rate: float, seconds: float) -> float:
    """Sends a little faster than the link, and counts the bytes that arrive at the device, before loss at this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        sending.bind((own, _SINK_PORT))
        sending.setsockopt(socket.SOL_UDP, _UDP_SEGMENT, _PAYLOAD)
        # Bundles small enough for an even flow, and large enough to cost little.
        frames = max(1, min(_MOST_FRAMES_PER_SEND, int(rate * 1e-3 / 8 / _PAYLOAD)))
        bundle = bytes(_PAYLOAD * frames)
        pause = len(bundle) * 8 / (1.1 * rate)
        seen = [_count()]
        due = begin = time.monotonic()
        look_at, end_at = begin + 0.2 * _STRETCH_S, begin + seconds
        while (now := time.monotonic()) < end_at:
            if now >= look_at:
                seen.append(_count())
                look_at = now + 0.2 * _STRETCH_S
            if now >= due:
                with contextlib.suppress(OSError):  # the queue is full on purpose
                    sending.sendto(bundle, (following, _SINK_PORT))
                due = max(due + pause, now - 20 * pause)
            else:
                time.sleep(min(due - now, 0.001))
        seen.append(_count())
    return _fastest(seen)


def _fastest(seen: list[tuple[float, int]]) -> float:
    """Highest rate over any interval that is long enough, or over all if none is."""
    rates = [_rate(seen[0], seen[-1])]
    for index, start in enumerate(seen):
        end = next((each for each in seen[index:] if each[0] - start[0] >= _STRETCH_S), None)
        if end is not None:
            rates.append(_rate(start, end))
    return max(rates)


def _rate(start: tuple[float, int], end: tuple[float, int]) -> float:
    return 8 * (end[1] - start[1]) / max(end[0] - start[0], 1e-9)


def _count() -> tuple[float, int]:
    """Time, and bytes received by then; read again if too much time passed between the two."""
    for _ in range(5):
        before = time.monotonic()
        received = _received_bytes()
        if time.monotonic() - before < 5e-4:
            break
    return before, received


def _received_bytes() -> int:
    with open("/proc/self/net/dev") as table:
        for line in table:
            name, _, numbers = line.partition(":")
            if name.strip() == _DEVICE:
                return int(numbers.split()[0])
    raise SystemExit(f"no device {_DEVICE}")


def _sleep_until(moment: float) -> None:
    time.sleep(max(moment - time.monotonic(), 0.0))


if __name__ == "__main__":
    main()
