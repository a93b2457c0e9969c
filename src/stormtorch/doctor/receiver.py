"""Receiver of a rank: a thread that answers requests of other ranks and counts the datagrams of their trains."""

import contextlib
import queue
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from stormtorch.doctor.datagrams import (
    ECHO_BYTES,
    TALLY_BYTES,
    Echo,
    Header,
    Kind,
    Tally,
    echo_body,
    pack,
    read_echo,
    read_tally,
    tally_body,
    unpack,
)
from stormtorch.doctor.sockets import SO_TIMESTAMPNS, dropped

MOST_IN_TRAIN = 1 << 14
"""Most datagrams of a train that are counted: bounds the memory per peer."""
_MOST_TRAINS = 64
_LEAST_STRETCH = 6  # datagrams
_TIMESPEC = struct.Struct("=qq")
_SLICE_S = 0.2


class Reply(NamedTuple):
    """A reply that arrived at this rank."""

    header: Header
    body: Echo | Tally
    time_ns: int
    """Receive timestamp of the kernel."""


@dataclass
class Train:
    """Datagrams of a packet train, in order of arrival."""

    numbers: list[int] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)
    sent_ns: list[int] = field(default_factory=list)
    """Times at which they were sent, by the sender's clock."""
    known: set[int] = field(default_factory=set)
    duplicates: int = 0
    largest: int = 0
    size: int = 0
    """Bytes of the last datagram."""
    dropped_before: int = 0
    """Datagrams that the kernel had dropped at this socket when the train began."""

    def add(self, number: int, size: int, time_ns: int, sent_ns: int = 0) -> None:
        """Counts a datagram that arrived."""
        if number in self.known:
            self.duplicates += 1
        elif len(self.numbers) < MOST_IN_TRAIN:
            self.known.add(number)
            self.numbers.append(number)
            self.times_ns.append(time_ns)
            self.sent_ns.append(sent_ns)
            self.largest = max(self.largest, size)
            self.size = size

    def tally(self) -> Tally:
        """Sums up what has arrived."""
        # The first part may pass a rate limiter's token bucket; the rest arrives at the bottleneck rate. Of that, the
        # fastest stretch counts: on a busy machine, the sender is sometimes interrupted.
        begin = len(self.numbers) // 4
        stretch = max((len(self.numbers) - begin) // 3, _LEAST_STRETCH)
        best, sent = 0.0, 0.0
        for first in range(begin, len(self.numbers) - stretch):
            arrived_ns, left_ns = (times[first + stretch] - times[first] for times in (self.times_ns, self.sent_ns))
            rate, left = (stretch * self.size * 1e9 / max(span, 1000) for span in (arrived_ns, left_ns))
            if rate > best:
                best, sent = rate, left
        return Tally(len(self.numbers), self.largest, min(best, 1e11), min(sent, 1e11))

    @property
    def reordered(self) -> int:
        """Number of datagrams that arrived after one that was sent later."""
        late, highest = 0, -1
        for number in self.numbers:
            late += number < highest
            highest = max(highest, number)
        return late

    def lost(self, sent: int) -> str:
        """A digit for each datagram sent: 1 is lost."""
        return "".join("01"[number not in self.known] for number in range(sent))


class Receiver:
    """Reads a socket in a thread of its own until it is closed.

    Args:
        opened: Socket to read; the caller closes it.
        cookie: Secret of this examination.
        rank: This rank.
        world: Number of ranks.
    """

    def __init__(self, opened: socket.socket, cookie: bytes, rank: int, world: int) -> None:
        self._socket, self._cookie, self._rank, self._world = opened, cookie, rank, world
        self._trains: dict[tuple[int, int], Train] = {}
        self._received: set[int] = set()
        self.answers: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        """Replies to this rank's requests; the prober removes them."""
        self.unknown_senders = 0
        """Number of datagrams from senders outside this examination."""
        self._ending = threading.Event()
        opened.settimeout(_SLICE_S)
        self._thread = threading.Thread(target=self._read, name="doctor's receiver", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._ending.set()
        self._thread.join(5 * _SLICE_S)

    def received(self, peer: int) -> bool:
        """Whether any datagram of a peer has arrived."""
        return peer in self._received

    def train(self, peer: int, number: int) -> Train:
        """What has arrived of a peer's train."""
        return self._trains.get((peer, number), Train())

    def forget_others(self, peer: int) -> None:
        """Discards trains of ranks other than `peer`, and stale replies."""
        for key in [key for key in list(self._trains) if key[0] != peer]:
            self._trains.pop(key, None)
        with contextlib.suppress(queue.Empty):
            while True:
                self.answers.get_nowait()

    def _read(self) -> None:
        while not self._ending.is_set():
            try:
                datagram, ancillary, _, source = self._socket.recvmsg(65536, 128)
            except TimeoutError:
                continue
            except OSError:
                if self._socket.fileno() < 0:
                    return
                continue  # an ICMP error about an earlier datagram, such as "unreachable"
            header = unpack(self._cookie, datagram)
            if header is None or header.source >= self._world or header.source == self._rank:
                self.unknown_senders += 1
                continue
            self._received.add(header.source)
            with contextlib.suppress(OSError):  # a reply that cannot be sent counts as lost
                self._dispatch(header, datagram, _arrival_ns(ancillary), source)

    def _dispatch(self, header: Header, datagram: bytes, time_ns: int, source: tuple[object, ...]) -> None:
        key = header.source, header.train
        if header.kind is Kind.TRAIN:
            if key not in self._trains and len(self._trains) >= _MOST_TRAINS:
                return
            if key not in self._trains:
                self._trains[key] = Train(dropped_before=dropped(self._socket))
            self._trains[key].add(header.number, len(datagram), time_ns, header.time_ns)
        elif header.kind is Kind.ECHO_REQUEST and len(datagram) >= ECHO_BYTES:
            answer = header._replace(kind=Kind.ECHO_REPLY, source=self._rank)
            echo = Echo(time_ns, time.time_ns(), str(source[0]), int(str(source[1])))
            self._socket.sendto(pack(self._cookie, answer, echo_body(echo)), source)
        elif header.kind is Kind.TALLY_REQUEST and len(datagram) >= TALLY_BYTES:
            answer = header._replace(kind=Kind.TALLY_REPLY, source=self._rank)
            body = tally_body(self._trains.get(key, Train()).tally())
            self._socket.sendto(pack(self._cookie, answer, body), source)
        elif header.kind is Kind.ECHO_REPLY and (echoed := read_echo(datagram)) is not None:
            self._answer(Reply(header, echoed, time_ns))
        elif header.kind is Kind.TALLY_REPLY and (tally := read_tally(datagram)) is not None:
            self._answer(Reply(header, tally, time_ns))

    def _answer(self, reply: Reply) -> None:
        if self.answers.qsize() < MOST_IN_TRAIN:
            self.answers.put(reply)


def _arrival_ns(ancillary: list[tuple[int, int, bytes]]) -> int:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(data) == _TIMESPEC.size:
            seconds, ns = _TIMESPEC.unpack(data)
            return int(seconds) * 1_000_000_000 + int(ns)
    return time.time_ns()
