import secrets
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormtorch.doctor import datagrams
from stormtorch.doctor.datagrams import ECHO_BYTES, TALLY_BYTES, Echo, Header, Kind, Tally
from stormtorch.doctor.receiver import MOST_IN_TRAIN, Receiver, Train
from stormtorch.doctor.sockets import open_udp

COOKIE = bytes(range(16))


@pytest.mark.pure
@given(st.binary(max_size=200))
def test_bytes_of_a_stranger_are_nothing(data: bytes) -> None:
    assert datagrams.unpack(COOKIE, data) is None
    datagrams.read_echo(data)
    datagrams.read_tally(data)


@pytest.mark.pure
@given(st.binary(max_size=100), st.integers(0, 4))
def test_any_body_after_a_right_header_is_read_or_refused(body: bytes, kind: int) -> None:
    data = datagrams.pack(COOKIE, Header(Kind(kind), 1, 2, 3, 4), body)
    assert datagrams.unpack(COOKIE, data) == Header(Kind(kind), 1, 2, 3, 4)
    datagrams.read_echo(data)
    datagrams.read_tally(data)


@pytest.mark.pure
def test_what_is_packed_is_read_again() -> None:
    header = Header(Kind.ECHO_REPLY, 65535, 7, 9, time.time_ns())
    echo = Echo(1, 2, "fe80::1%eth0", 29500)
    packed = datagrams.pack(COOKIE, header, datagrams.echo_body(echo))
    assert (datagrams.unpack(COOKIE, packed), datagrams.read_echo(packed)) == (header, echo)
    tally = Tally(5, 1472, 1.25e7, 2.5e7)
    assert datagrams.read_tally(datagrams.pack(COOKIE, header, datagrams.tally_body(tally))) == tally
    assert datagrams.unpack(bytes(16), packed) is None


@pytest.mark.pure
def test_a_train_knows_losses_duplicates_and_order() -> None:
    train = Train()
    for number in (0, 1, 4, 3, 3, 6):
        train.add(number, 100, number)
    assert train.lost(8) == "00100101"
    assert (train.duplicates, train.reordered, train.largest) == (1, 1, 100)


@pytest.mark.pure
def test_a_train_remembers_no_more_than_its_bound() -> None:
    train = Train()
    for number in range(MOST_IN_TRAIN + 100):
        train.add(number, 100, number)
    assert len(train.numbers) == len(train.known) == MOST_IN_TRAIN


@pytest.mark.pure
def test_the_rate_of_a_train_is_that_of_the_line_and_not_of_a_bucket_or_a_pause() -> None:
    train = Train()
    for number in range(40):  # ten at once from a bucket, then one each millisecond
        train.add(number, 1250, max(number - 10, 0) * 1_000_000, number * 10_000)
    assert train.tally().bytes_per_s == pytest.approx(1_250_000, rel=0.05)
    assert train.tally().sent_per_s == pytest.approx(125_000_000, rel=0.05)
    paused = Train()
    for number in range(40):  # the sender pauses for 100 ms in the midst of it
        sent = number * 1_000_000 + (100_000_000 if number >= 25 else 0)
        paused.add(number, 1250, sent, sent)
    assert paused.tally().bytes_per_s == paused.tally().sent_per_s == pytest.approx(1_250_000, rel=0.05)


def test_a_receiver_answers_ranks_with_no_more_bytes_than_they_sent_and_strangers_not_at_all() -> None:
    with open_udp("127.0.0.1", 0) as opened, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        receiver = Receiver(opened, COOKIE, rank=0, world=2)
        try:
            asking.settimeout(5.0)
            place = opened.getsockname()
            for kind, size, answer in (
                (Kind.ECHO_REQUEST, ECHO_BYTES, Kind.ECHO_REPLY),
                (Kind.TALLY_REQUEST, TALLY_BYTES, Kind.TALLY_REPLY),
            ):
                asking.sendto(datagrams.pack(COOKIE, Header(kind, 1, 1, 0, 0), size=size), place)
                data = asking.recv(2048)
                header = datagrams.unpack(COOKIE, data)
                assert header is not None and (header.kind, header.source) == (answer, 0)
                assert len(data) <= size
            asking.settimeout(0.3)
            too_short = datagrams.pack(COOKIE, Header(Kind.ECHO_REQUEST, 1, 1, 0, 0))
            wrong_cookie = datagrams.pack(
                secrets.token_bytes(16), Header(Kind.ECHO_REQUEST, 1, 1, 0, 0), size=ECHO_BYTES
            )
            unknown_rank = datagrams.pack(COOKIE, Header(Kind.ECHO_REQUEST, 9, 1, 0, 0), size=ECHO_BYTES)
            for data in (too_short, wrong_cookie, unknown_rank, b"", secrets.token_bytes(1400)):
                asking.sendto(data, place)
            with pytest.raises(TimeoutError):
                asking.recv(2048)
            assert receiver.unknown_senders == 4
        finally:
            receiver.close()
