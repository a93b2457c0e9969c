"""Prober: measures the path to one peer in a fixed time, by packet trains. The peer probes this rank at the same time.

The time is divided into slots, which both sides begin at about the same moment:

    echoes      round trip, jitter, clocks, and whether UDP gets through at all
    two slots   the lower rank measures the rate, the higher one the path MTU; then the other way round
    losses      a steady train at a fraction of the measured rate, so that congestion causes none of the loss

Only the peer knows what arrived. It answers short requests about that; the rest is in its final report.
"""

import contextlib
import queue
import socket
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from stormtorch.doctor.datagrams import ECHO_BYTES, HEADER_BYTES, TALLY_BYTES, Header, Kind, Tally, pack
from stormtorch.doctor.receiver import MOST_IN_TRAIN, Receiver, Reply
from stormtorch.doctor.sockets import family_of, granted, header_bytes, socket_address

TCP_BANNER = b"stormtorch doctor\n"
"""Banner that a rank sends on every TCP connection."""
_ECHOES = 40
_ECHO_SHARE, _FIRST_SHARE, _SECOND_SHARE, _LOSS_SHARE = 0.16, 0.17, 0.17, 0.42
# UDP payload sizes to try first: the usual MTUs of Ethernet, tunnels, VPNs and old links.
_LADDER = (8972, 4472, 1472, 1452, 1432, 1412, 1392, 1372, 1352, 1312, 1252, 1172, 1072, 972, 772, 548)
_TOP_COPIES, _COPIES = 6, 4
_FIRST_RATE_TRAIN, _MOST_RATE_TRAIN = 32, 2000
_RATE_TRAIN_S = 0.05
# Upper bound of the send-buffer bytes that the kernel charges for a datagram of Ethernet's size.
_CHARGED_BYTES = 3000
_ETHERNET_BYTES = 14
_LOSS_PER_S, _BLIND_PER_S = 1000.0, 300.0
_LOSS_BYTES, _BLIND_BYTES = 1200, 256
_LOSS_RATE_SHARE = 0.3
_FEWEST_STEADY = 400  # datagrams: fewer say little about loss
_TALLY_WAIT_S, _TALLY_TRIES = 0.25, 6
_TCP_WAIT_S = 3.5


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Address of another rank."""

    rank: int
    host: str
    port: int
    """UDP port."""
    tcp_port: int


@dataclass
class ProbeResult:
    """Measurements of the path to a peer, taken by the sender alone."""

    echoes: int = 0
    """Echo requests that were sent."""
    round_trips_s: list[float] = field(default_factory=list)
    clock_ahead_s: float | None = None
    """Time by which the peer's clock is ahead of this rank's, from the fastest echo."""
    seen: str = ""
    """Address of this rank as the peer sees it; empty if no echo came back."""
    tcp: bool = False
    """Whether the peer takes a TCP connection."""
    path_bytes: int = 0
    """Largest IP packet that arrives; 0 if unknown."""
    rate_bits: float = 0.0
    """Bits per second at which a back-to-back train arrived, Ethernet headers included; 0 if unknown."""
    sent_bits: float = 0.0
    """Bits per second at which that train was sent: if the two are close, the link may carry more."""
    train: int = 0
    """Number of the train that measures losses."""
    sent: int = 0
    """Datagrams of that train."""
    seconds: float = 0.0
    """Duration of the whole probe."""

    def to_json(self) -> dict[str, Any]:
        """Result as plain data."""
        return asdict(self)


class Prober:
    """Measures the paths from this rank to others.

    Args:
        opened: Socket of this rank; `receiver` reads it.
        receiver: Receiver of the answers.
        cookie: Secret of this examination.
        rank: This rank.
        mtu: MTU of this rank's interface.
    """

    def __init__(self, opened: socket.socket, receiver: Receiver, cookie: bytes, rank: int, mtu: int) -> None:
        self._socket, self._receiver, self._cookie, self._rank, self._mtu = opened, receiver, cookie, rank, mtu
        self._trains = 0

    def probe(self, peer: Peer, seconds: float) -> ProbeResult:
        """Measures the path to a peer, in about `seconds`."""
        begin = time.monotonic()
        result = ProbeResult()
        self._receiver.forget_others(peer.rank)
        tcp = threading.Thread(target=_try_tcp, args=(peer, min(_TCP_WAIT_S, seconds), result), daemon=True)
        tcp.start()
        target = socket_address(peer.host, peer.port)
        self._echo(peer.rank, target, _ECHO_SHARE * seconds, result)
        if result.round_trips_s:
            slots = [lambda: self._find_rate(target, peer, result), lambda: self._find_path(target, peer, result)]
            if self._rank > peer.rank:
                slots.reverse()
            slots[0]()
            _sleep_until(begin + (_ECHO_SHARE + _FIRST_SHARE) * seconds)
            slots[1]()
        _sleep_until(begin + (_ECHO_SHARE + _FIRST_SHARE + _SECOND_SHARE) * seconds)
        self._send_steadily(target, peer, _LOSS_SHARE * seconds, result)
        tcp.join(max(begin + max(seconds, _TCP_WAIT_S) - time.monotonic(), 0.0))
        result.seconds = time.monotonic() - begin
        return result

    # --- round trips --------------------------------------------------------------------------------------------------

    def _echo(self, peer: int, target: tuple[object, ...], seconds: float, result: ProbeResult) -> None:
        train = self._next_train()
        begin = time.monotonic()
        quickest = float("inf")
        found: dict[int, float] = {}
        for number in range(_ECHOES):
            _sleep_until(begin + 0.8 * seconds * number / _ECHOES)
            header = Header(Kind.ECHO_REQUEST, self._rank, train, number, time.time_ns())
            self._send(pack(self._cookie, header, size=ECHO_BYTES), target)
            result.echoes += 1
        deadline = begin + seconds
        while len(found) < _ECHOES and (answer := self._answer(peer, train, deadline)) is not None:
            echo = answer.body
            if isinstance(echo, Tally) or answer.header.number in found:
                continue
            # Kernel timestamps at both ends: they exclude the time that a process waits for a core.
            there_ns = echo.received_ns - answer.header.time_ns
            back_ns = answer.time_ns - echo.answered_ns
            trip = max(there_ns + back_ns, 1) / 1e9
            found[answer.header.number] = trip
            result.seen = echo.seen
            if trip < quickest:
                quickest = trip
                result.clock_ahead_s = (there_ns - back_ns) / 2e9
        result.round_trips_s = [found[number] for number in sorted(found)]

    # --- path MTU -----------------------------------------------------------------------------------------------------

    def _find_path(self, target: tuple[object, ...], peer: Peer, result: ProbeResult) -> None:
        """Path MTU discovery: narrows down the largest datagram that arrives, a few sizes at a time."""
        headers = header_bytes(peer.host)
        top = self._mtu - headers
        low, high = 0, top + 1
        sizes = [top, *(size for size in _LADDER if size < top)]
        for _ in range(5):
            arrived = self._try_sizes(target, peer, sizes, top)
            if arrived is None:
                break
            if arrived >= top:
                low = top
                break
            low = max(low, arrived)
            high = min([size for size in sizes if size > low] + [high])
            if high - low <= 1:
                break
            step = max((high - low) // 9, 1)
            # Try the largest size again: all its copies may have been lost by chance.
            sizes = [top, *range(high - 1, low, -step)][:12]
        result.path_bytes = low + headers if low else 0

    def _try_sizes(self, target: tuple[object, ...], peer: Peer, sizes: list[int], top: int) -> int | None:
        train = self._next_train()
        number = 0
        for copy in range(_TOP_COPIES):
            for size in sizes:
                if copy < _COPIES or size == top:
                    header = Header(Kind.TRAIN, self._rank, train, number, 0)
                    self._send(pack(self._cookie, header, size=max(size, HEADER_BYTES)), target)
                    number += 1
            time.sleep(0.004)
        tally = self._tally(target, peer, train)
        return None if tally is None else tally.largest

    # --- rate ---------------------------------------------------------------------------------------------------------

    def _find_rate(self, target: tuple[object, ...], peer: Peer, result: ProbeResult) -> None:
        """Sends back-to-back trains; the first one determines the length of the second."""
        size = min(self._mtu - header_bytes(peer.host), 1472)
        if result.path_bytes:
            size = min(size, result.path_bytes - header_bytes(peer.host))
        # A train longer than the send buffer would block this rank, which would then look like the bottleneck.
        most = min(_MOST_RATE_TRAIN, max(granted(self._socket).send * 2 // _CHARGED_BYTES, _FIRST_RATE_TRAIN))
        count = _FIRST_RATE_TRAIN
        for _ in range(3):
            tally = self._rush(target, peer, count, size)
            if tally is None:
                return
            if tally.bytes_per_s == 0.0:
                # Full packets did not arrive: small ones measure the rate, too.
                if size <= 548:
                    return
                size = 548
                continue
            wire = (size + header_bytes(peer.host) + _ETHERNET_BYTES) / size
            result.rate_bits, result.sent_bits = 8 * wire * tally.bytes_per_s, 8 * wire * tally.sent_per_s
            needed = min(int(tally.bytes_per_s * _RATE_TRAIN_S / size), most)
            if needed <= 2 * count:
                return
            count = needed

    def _rush(self, target: tuple[object, ...], peer: Peer, count: int, size: int) -> Tally | None:
        train = self._next_train()
        for number in range(count):
            header = Header(Kind.TRAIN, self._rank, train, number, time.time_ns())
            self._send(pack(self._cookie, header, size=size), target)
        return self._tally(target, peer, train)

    # --- losses -------------------------------------------------------------------------------------------------------

    def _send_steadily(self, target: tuple[object, ...], peer: Peer, seconds: float, result: ProbeResult) -> None:
        """Sends a train well below the measured rate, or a slow one if the rate is unknown.

        A busy machine may delay the sender, and gets up to twice the time.
        """
        if result.rate_bits:
            per_s, size = _LOSS_PER_S, _LOSS_BYTES
            if result.path_bytes:
                size = min(size, result.path_bytes - header_bytes(peer.host))
            share = _LOSS_RATE_SHARE * result.rate_bits / 8
            overhead = header_bytes(peer.host) + _ETHERNET_BYTES
            size = max(min(size, int(share / per_s) - overhead), 2 * HEADER_BYTES)
            per_s = min(per_s, max(share / (size + overhead), 20.0))
        else:
            per_s, size = _BLIND_PER_S, _BLIND_BYTES
        result.train = train = self._next_train()
        begin = time.monotonic()
        number, end_at = 0, begin + seconds
        fewest = min(_FEWEST_STEADY, int(seconds * per_s))
        while (now := time.monotonic()) < end_at or (number < fewest and now < end_at + seconds):
            if number >= MOST_IN_TRAIN:
                break
            # After a pause on a busy machine, catch up by a few at a time: a burst would fill queues.
            for _ in range(4):
                if number / per_s > now - begin:
                    break
                header = Header(Kind.TRAIN, self._rank, train, number, 0)
                self._send(pack(self._cookie, header, size=size), target)
                number += 1
            time.sleep(0.0005 if number / per_s < now - begin else min(1 / per_s, 0.01))
        result.sent = number

    # --- datagrams ----------------------------------------------------------------------------------------------------

    def _tally(self, target: tuple[object, ...], peer: Peer, train: int) -> Tally | None:
        for number in range(_TALLY_TRIES):
            header = Header(Kind.TALLY_REQUEST, self._rank, train, number, 0)
            self._send(pack(self._cookie, header, size=TALLY_BYTES), target)
            answer = self._answer(peer.rank, train, time.monotonic() + _TALLY_WAIT_S)
            if answer is not None and isinstance(answer.body, Tally):
                return answer.body
        return None

    def _answer(self, peer: int, train: int, deadline: float) -> Reply | None:
        """Next answer of a peer about a train; None on timeout. Late answers about other trains are dropped."""
        with contextlib.suppress(queue.Empty):
            while True:
                answer = self._receiver.answers.get(timeout=max(deadline - time.monotonic(), 0.001))
                if (answer.header.source, answer.header.train) == (peer, train):
                    return answer
        return None

    def _next_train(self) -> int:
        self._trains += 1
        return self._trains

    def _send(self, datagram: bytes, target: tuple[object, ...]) -> None:
        # A datagram that this machine refuses to send (too large, no route, queue full) is lost like any other.
        with contextlib.suppress(OSError):
            self._socket.sendto(datagram, target)


def _try_tcp(peer: Peer, seconds: float, result: ProbeResult) -> None:
    with contextlib.suppress(OSError), socket.socket(family_of(peer.host), socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        connection.connect(socket_address(peer.host, peer.tcp_port))
        result.tcp = connection.recv(len(TCP_BANNER)) == TCP_BANNER


def _sleep_until(moment: float) -> None:
    time.sleep(max(moment - time.monotonic(), 0.0))
