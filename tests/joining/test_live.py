"""A running job serves its records to watchers, and its status as plain text to processes on the same machine."""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
from test_admission import QUICK, address, connected

from stormtorch.errors import NotAdmitted
from stormtorch.joining import admission, live
from stormtorch.joining.live import LiveJob
from stormtorch.telemetry.records import ProcessId
from stormtorch.udp import rpc
from stormtorch.udp.udp import UdpTransport

KEY = bytes(range(32))


class StatusReporter:
    """Tells what it was given, as a recorder does."""

    def __init__(self, rank: int, count: int, pid: int = 7) -> None:
        self._rank, self._pid = rank, pid
        self.records = [{"kind": "event", "time": 1.0, "n": n, "step": n, "text": str(rank)} for n in range(count)]

    def report(self, since: int) -> tuple[dict[str, Any], list[bytes]]:
        told = [json.dumps(each).encode() + b"\n" for each in self.records[since : since + 4]]
        following = since + len(told)
        return {"pid": self._pid, "next": following, "more": following < len(self.records)}, told

    def status(self) -> str:
        return f"rank {self._rank} is fine\n"


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[list[UdpTransport]]:
    transports = connected(3, replace(QUICK, key=getattr(request, "param", None)))
    for transport in transports:
        transport.reporter = StatusReporter(transport.rank, 10)
    yield transports
    for transport in transports:
        transport.close(0.0)


def where(transport: UdpTransport) -> str:
    return "{}:{}".format(*address(transport))


def request(transport: UdpTransport, question: dict[str, Any]) -> dict[str, Any]:
    return rpc.request(address(transport), question, key=transport.options.key, version=version("stormtorch"))


@pytest.mark.parametrize("job", [None, KEY], indirect=True)
def test_one_address_is_enough_to_hear_all_ranks(job: list[UdpTransport]) -> None:
    watcher = LiveJob(where(job[1]), key=job[0].options.key)
    try:
        found = watcher.read() | watcher.read()
        assert sorted(found) == [ProcessId(rank, 0, 7) for rank in range(3)]
        assert watcher.ways() == dict.fromkeys(range(3), "direct")
        assert watcher.read() == {}
        job[2].reporter.records.append({"kind": "end", "time": 2.0, "why": "done"})  # type: ignore[union-attr]
        assert watcher.read() == {ProcessId(2, 0, 7): [{"kind": "end", "time": 2.0, "why": "done"}]}
    finally:
        watcher.close()


def test_every_record_comes_once_however_many_answers_it_takes(job: list[UdpTransport]) -> None:
    watcher = LiveJob(where(job[0]))
    found: dict[ProcessId, list[int]] = {}
    for _ in range(3):
        for who, records in watcher.read().items():
            found.setdefault(who, []).extend(each["n"] for each in records)
    watcher.close()
    assert found == {ProcessId(rank, 0, 7): list(range(10)) for rank in range(3)}


def test_a_rank_that_cannot_be_reached_is_told_of_by_another(
    job: list[UdpTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher, cut = LiveJob(where(job[0])), address(job[2])
    plain = LiveJob._request

    def refuse(self: LiveJob, there: tuple[str, int], question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if there == cut:
            raise TimeoutError("a firewall")
        return plain(self, there, question, timeout_s)

    monkeypatch.setattr(LiveJob, "_request", refuse)
    found: dict[ProcessId, list[Any]] = {}
    for _ in range(3):
        found |= watcher.read()
    watcher.close()
    assert len(found[ProcessId(2, 0, 7)]) == 10
    assert watcher.ways()[2].startswith("through rank")


@pytest.mark.thorough
def test_one_rank_tells_of_many_that_cannot_be_reached_and_none_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = 14
    transports = connected(world, QUICK)
    plain = LiveJob._request

    def refuse(self: LiveJob, there: tuple[str, int], question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if there != address(transports[0]):
            raise TimeoutError("a firewall")
        return plain(self, there, question, timeout_s)

    monkeypatch.setattr(LiveJob, "_request", refuse)
    watcher = LiveJob(where(transports[0]))
    try:
        for transport in transports:
            transport.reporter = StatusReporter(transport.rank, 10)
        found = watcher.read()
        for who, records in watcher.read().items():
            found.setdefault(who, []).extend(records)
        assert {who.rank: len(records) for who, records in found.items()} == dict.fromkeys(range(world), 10)
        assert watcher.ways() == {0: "direct"} | dict.fromkeys(range(1, world), "through rank 0")
    finally:
        watcher.close()
        for transport in transports:
            transport.close(0.0)


@pytest.mark.thorough
def test_a_rank_that_is_busy_is_asked_again(job: list[UdpTransport], monkeypatch: pytest.MonkeyPatch) -> None:
    desk, plain = job[0]._reception, LiveJob._request
    assert isinstance(desk, admission.AdmissionService)

    def refuse(self: LiveJob, there: tuple[str, int], question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if there != address(job[0]):
            raise TimeoutError("a firewall")
        return plain(self, there, question, timeout_s)

    monkeypatch.setattr(LiveJob, "_request", refuse)
    watcher = LiveJob(where(job[0]))
    for _ in range(admission.MOST_FORWARDED_REQUESTS):
        desk._forwards.acquire()
    later = threading.Timer(0.6, desk._forwards.release)
    later.start()
    try:
        found = watcher.read() | watcher.read()
        assert sorted(who.rank for who in found) == [0, 1, 2]
    finally:
        later.join()
        watcher.close()


def test_an_answer_is_passed_on_as_it_is(job: list[UdpTransport]) -> None:
    class Blind(StatusReporter):
        def report(self, since: int) -> tuple[dict[str, Any], list[bytes]]:
            return {"pid": 7, "next": 1, "more": False}, [b'{"kind": "event", "text": "\\u00e4", "x":  1}\n']

    job[1].reporter = Blind(1, 1)
    answer = rpc.request_bytes(address(job[0]), {"op": "tell", "for": 1}, key=None, version=version("stormtorch"))
    assert answer.endswith(b',"records":[{"kind": "event", "text": "\\u00e4", "x":  1}\n]}')
    assert json.loads(answer)["rank"] == 1


def test_a_rank_that_dies_is_named_and_the_others_go_on(job: list[UdpTransport]) -> None:
    watcher = LiveJob(where(job[0]))
    watcher.read()
    watcher.read()
    job[0].close(0.0)
    job[1].reporter.records.append({"kind": "end", "time": 2.0, "why": "done"})  # type: ignore[union-attr]
    found = watcher.read()
    watcher.close()
    assert found == {ProcessId(1, 0, 7): [{"kind": "end", "time": 2.0, "why": "done"}]}
    assert watcher.ways()[1] == watcher.ways()[2] == "direct"
    assert watcher.ways()[0] not in ("", "direct")


def test_a_process_that_takes_a_place_is_heard_from_its_first_record_on(job: list[UdpTransport]) -> None:
    watcher = LiveJob(where(job[0]))
    watcher.read()
    watcher.read()
    job[1].reporter = StatusReporter(1, 3, pid=8)
    found = watcher.read()
    watcher.close()
    assert [each["n"] for each in found[ProcessId(1, 0, 8)]] == [0, 1, 2]


def test_nobody_at_the_address_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectionError, match=rf"no rank of a job answers \(127.0.0.1:{port}: .*STORM_RECORD"):
        LiveJob(f"127.0.0.1:{port}").read()


@pytest.mark.parametrize("job", [KEY], indirect=True)
def test_without_the_key_nobody_hears_anything(job: list[UdpTransport]) -> None:
    with pytest.raises(NotAdmitted, match="has a key, and this process has none"):
        LiveJob(where(job[0])).read()
    with pytest.raises(NotAdmitted, match="another key"):
        LiveJob(where(job[0]), key=bytes(range(1, 33))).read()


def test_strange_questions_for_records_get_nothing(job: list[UdpTransport]) -> None:
    for strange in ({"since": "0"}, {"since": -1}, {"since": 1 << 63}, {"since": True}, {"for": "1"}, {"for": None}):
        with pytest.raises((rpc.MalformedMessage, OSError)):
            request(job[0], {"op": "tell", **strange})
    for nobody in (-1, 99, 10**30):
        answer = request(job[0], {"op": "tell", "for": nobody})
        assert answer["state"] == "unreachable"
    assert request(job[0], {"op": "tell"})["state"] == "running"


def test_only_some_errands_run_at_a_time(job: list[UdpTransport]) -> None:
    desk = job[0]._reception
    assert isinstance(desk, admission.AdmissionService)
    for _ in range(admission.MOST_FORWARDED_REQUESTS):
        assert desk._forwards.acquire(blocking=False)
    assert request(job[0], {"op": "tell", "for": 1}) == {"state": "busy"}
    desk._forwards.release()
    assert request(job[0], {"op": "tell", "for": 1})["rank"] == 1


@pytest.mark.pure
@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"state": "running"},
        {"state": "running", "rank": 0, "incarnation": 0, "pid": 1, "next": -1, "records": []},
        {"state": "running", "rank": 0, "incarnation": 0, "pid": 1, "next": 1, "records": "all"},
        {"state": "running", "rank": 0, "incarnation": 0, "pid": 1, "next": 1, "records": [None, 5, {"kind": "x"}]},
        {"state": "running", "rank": "0", "incarnation": None, "pid": [], "next": 1, "records": []},
    ],
)
def test_a_rank_that_tells_nonsense_adds_nothing(answer: dict[str, Any]) -> None:
    watcher, found = LiveJob("127.0.0.1:1"), dict[ProcessId, list[Any]]()
    answer = {**answer, "receptions": {"1": ["example.org", 80, 0], "2": ["::1", 0, 0], "x": 5, "3": ["10.0.0.1"]}}
    assert not watcher._take(live._Rank(("127.0.0.1", 1)), answer, found, "direct")
    watcher.close()
    assert found == {}
    assert watcher.ways() == {}


def say(there: tuple[str, int], what: bytes, after_s: float = 0.0) -> bytes:
    came = b""
    # A rank that does not answer closes the connection, also while something is under way to it.
    with contextlib.suppress(OSError), socket.create_connection(there, timeout=5.0) as connection:
        time.sleep(after_s)
        connection.sendall(what)
        while piece := connection.recv(4096):
            came += piece
    return came


def test_the_plain_line_status_is_answered_in_text(job: list[UdpTransport]) -> None:
    assert say(address(job[1]), b"STATUS\n") == b"rank 1 is fine\n"
    typed = say(address(job[1]), b"STATUS\r\n", after_s=0.3)
    assert typed.endswith(b"\nrank 1 is fine\n"), "also from somebody who types, and has been greeted meanwhile"
    job[1].reporter = None
    assert b"nothing is prepared yet" in say(address(job[1]), b"STATUS\n")


@pytest.mark.parametrize("job", [KEY], indirect=True)
def test_a_job_with_a_key_tells_its_status_only_where_it_is_told_to(
    job: list[UdpTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert b"fine" not in say(address(job[0]), b"STATUS\n")
    monkeypatch.setenv(rpc.STATUS_VARIABLE, "1")
    assert say(address(job[0]), b"STATUS\n") == b"rank 0 is fine\n"


def test_another_machine_gets_no_status(job: list[UdpTransport], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "_is_local", lambda _connection: False)
    for after_s in (0.0, 0.3):
        greeting = say(address(job[0]), b"STATUS\n", after_s)
        assert b"fine" not in greeting
        if greeting:
            _, length = struct.unpack("!BI", greeting[:5])
            assert len(greeting) == 5 + length, "it is greeted as everybody, and gets nothing more"


def test_a_machine_is_here_by_any_of_its_own_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        there = ("127.0.0.1", listening.getsockname()[1])
        with socket.create_connection(there) as connection, listening.accept()[0] as accepted:
            assert rpc._is_local(connection)
            assert rpc._is_local(accepted)
