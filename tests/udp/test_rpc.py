"""RPC between a join client and a rank: the key, versions, malformed input, and forked processes."""

import contextlib
import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from stormtorch.errors import NotAdmitted
from stormtorch.udp import rpc
from stormtorch.udp.rpc import MalformedMessage, RpcServer, request

KEY = b"a job key of any length from sixteen bytes"
OTHER = b"another key, as long as the first one is."
VERSION = "1.2.3"


def echo(question: dict[str, Any]) -> dict[str, Any]:
    return {"heard": question}


@contextmanager
def listening(key: bytes | None = None, answer: rpc.Answer = echo) -> Iterator[RpcServer]:
    listener = RpcServer("127.0.0.1", 0, key=key, version=VERSION, answer=answer)
    try:
        yield listener
    finally:
        listener.close()


def asked(listener: RpcServer, key: bytes | None = None, version: str = VERSION) -> dict[str, Any]:
    return request(("127.0.0.1", listener.port), {"op": "learn"}, key=key, version=version)


def rejected(listener: RpcServer, talks: int) -> bool:
    """Whether so many requests are rejected: the client may know it before they are counted."""
    end = time.monotonic() + 5.0
    while listener.rejected < talks and time.monotonic() < end:
        time.sleep(0.01)
    return listener.rejected == talks


@pytest.mark.parametrize("key", [None, KEY])
def test_a_question_is_answered(key: bytes | None) -> None:
    with listening(key) as listener:
        assert asked(listener, key) == {"heard": {"op": "learn"}}
        assert listener.rejected == 0


@pytest.mark.parametrize(
    ("theirs", "ours", "says"),
    [(KEY, OTHER, "another key"), (KEY, None, "has a key, and this process has none"), (None, KEY, "has no key")],
)
def test_a_wrong_key_is_refused_by_name(theirs: bytes | None, ours: bytes | None, says: str) -> None:
    questions: list[Any] = []

    def hear(question: dict[str, Any]) -> dict[str, Any]:
        questions.append(question)
        return {}

    with listening(theirs, hear) as listener:
        with pytest.raises(NotAdmitted, match=says) as error:
            asked(listener, ours)
        assert f"127.0.0.1:{listener.port}" in str(error.value)
    assert questions == []


def test_another_version_is_refused_by_name() -> None:
    with listening() as listener, pytest.raises(NotAdmitted, match=r"runs stormtorch 1\.2\.3, and this process 9\.9"):
        asked(listener, version="9.9")


def test_a_rank_that_does_not_have_the_key_is_not_believed() -> None:
    """Anyone may listen where the rank did, and claim to have the key."""
    with listening(OTHER) as listener, pytest.raises(NotAdmitted, match="another key"):
        asked(listener, KEY)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(200),
        os.urandom(5000),
        struct.pack("!BI", 0, 1 << 31),
        struct.pack("!BI", 0, 4) + b"null",
        struct.pack("!BI", 0, 2) + b"{}" + struct.pack("!BI", 1, 34) + bytes(34),
        struct.pack("!BI", 0, 2) + b"{}" + struct.pack("!BI", 0, 3) + b"\xff\xfe{",
        struct.pack("!BI", 0, 4000) + b"[" * 4000,
    ],
)
@pytest.mark.parametrize("key", [None, KEY])
def test_strangers_are_counted_and_raise_nothing(said: bytes, key: bytes | None) -> None:
    with listening(key) as listener:
        with socket.create_connection(("127.0.0.1", listener.port), timeout=5.0) as stranger:
            stranger.sendall(said)
            with contextlib.suppress(OSError):  # it may be closed already
                stranger.shutdown(socket.SHUT_WR)
            while True:
                try:
                    if not stranger.recv(1 << 16):
                        break
                except ConnectionResetError:  # closed before all was read
                    break
        assert asked(listener, key)["heard"] == {"op": "learn"}
        assert rejected(listener, 1)


def test_an_answer_that_fails_is_counted_and_raises_nothing() -> None:
    def fail(_: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("no such thing")

    with listening(answer=fail) as listener:
        with pytest.raises(MalformedMessage):
            asked(listener)
        assert rejected(listener, 1)


@pytest.mark.thorough
def test_those_who_say_nothing_keep_nobody_out_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "RPC_TIMEOUT_S", 0.3)
    with listening() as listener:
        idle = [socket.create_connection(("127.0.0.1", listener.port), timeout=5.0) for _ in range(20)]
        assert rejected(listener, len(idle))
        assert asked(listener)["heard"] == {"op": "learn"}
        for each in idle:
            each.close()


def test_a_port_that_is_taken_is_replaced_by_another() -> None:
    with listening() as first:
        second = RpcServer("127.0.0.1", first.port, key=None, version=VERSION, answer=echo)
        try:
            assert second.port not in (0, first.port)
        finally:
            second.close()


@pytest.mark.thorough
def test_a_port_is_free_once_its_listener_is_closed_or_gone() -> None:
    for drops in (False, True):
        listener = RpcServer("127.0.0.1", 0, key=None, version=VERSION, answer=echo)
        port = listener.port
        if not drops:
            listener.close()
        del listener
        gc.collect()
        with pytest.raises(OSError, match="refused"):
            request(("127.0.0.1", port), {}, key=None, version=VERSION)
    assert not [each for each in threading.enumerate() if each.name == "reception"]


def test_a_forked_process_does_not_hold_the_port() -> None:
    listener = RpcServer("127.0.0.1", 0, key=None, version=VERSION, answer=echo)
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(told, 1)
        os._exit(0)
    try:
        assert asked(listener)["heard"] == {"op": "learn"}  # the child's copy took nothing away
        listener.close()
        with pytest.raises(OSError, match="refused"):
            asked(listener)
    finally:
        os.write(tells, b"x")
        os.waitpid(child, 0)
        os.close(told)
        os.close(tells)
