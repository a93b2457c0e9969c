"""Open-loop HTTP load generator; run as a script on lab hosts, needs only Python and aiohttp.

service_client.py HOST ADDRESS:PORT/PATH ...

It prints "ready" once every server has answered, and then takes commands, one line of JSON each:
    {"do": "begin", "at": monotonic seconds, "rate": requests per second, "seed": 0, "bytes": 100000, "timeout_s": 5}
    {"do": "stop"}      prints the outcome of all requests as one line of JSON, when the last one has ended

Requests arrive as a seeded Poisson process, each for a random server. A request is sent when it is due, without waiting
for earlier ones, and its latency counts from when it was *due*: a stall of a server, the network or a processor shows
in every request that was due meanwhile, not only in the one that it delayed.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import aiohttp

_ANSWER_S = 20.0
"""Seconds within which every server must reply for the first time."""
_FOR_EVER_S = 86_400.0


class Request(NamedTuple):
    """Outcome of one request."""

    due_s: float
    """Due time in seconds since the beginning."""
    late_s: float
    """Delay from due time to sending, in seconds: this process was busy or had no processor."""
    latency_s: float
    """Seconds from the due time to the last byte of the response, or to the failure."""
    failure: str = ""
    """Kind of the failure: "timeout", "length", "status", "connection"; empty for a complete response."""


def arrivals(rate: float, seed: int, servers: int) -> Iterator[tuple[float, int]]:
    """Yields the due time of each request, in seconds since the beginning, and the number of its server; for ever."""
    draw = random.Random(seed)
    due_s = 0.0
    while True:
        due_s += draw.expovariate(rate)
        yield due_s, draw.randrange(servers)


class Load:
    """Requests from one host: a Poisson process that goes on until `stop`.

    Args:
        servers: Address of the fetched file on each server.
        begin_s: Start, on the monotonic clock.
        rate: Requests per second.
        seed: Random seed of the arrivals.
        size: Bytes of a complete response.
        timeout_s: Seconds after which a request counts as failed.
    """

    def __init__(
        self, servers: Sequence[str], *, begin_s: float, rate: float, seed: int, size: int, timeout_s: float
    ) -> None:
        self._servers = servers
        self._begin_s, self._rate, self._seed = begin_s, rate, seed
        self._size, self._timeout_s = size, timeout_s
        self._requests: list[Request] = []
        self._under_way: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Sends no further requests; those in flight are waited for."""
        self._stopping.set()

    async def run(self) -> list[Request]:
        """Sends requests until `stop`; returns their outcomes in the order of completion."""
        async with open_session(self._timeout_s) as session:
            for due_s, server in arrivals(self._rate, self._seed, len(self._servers)):
                wait_s = self._begin_s + due_s - time.monotonic()
                # Yield to other tasks even if requests are due faster than they are sent.
                await self._pause(wait_s) if wait_s > 0.0 else await asyncio.sleep(0)
                if self._stopping.is_set():
                    break
                task = asyncio.create_task(self._fetch(session, due_s, self._servers[server]))
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)
            while self._under_way:
                await asyncio.wait(self._under_way)
        return self._requests

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    async def _fetch(self, session: aiohttp.ClientSession, due_s: float, server: str) -> None:
        late_s = time.monotonic() - self._begin_s - due_s
        failure = ""
        try:
            async with session.get(server) as answer:
                size = len(await answer.read())
                failure = "status" if answer.status != 200 else "length" if size != self._size else ""
        except TimeoutError:
            failure = "timeout"
        except aiohttp.ClientPayloadError:
            failure = "length"
        except (aiohttp.ClientError, OSError):
            failure = "connection"
        self._requests.append(Request(due_s, late_s, time.monotonic() - self._begin_s - due_s, failure))


def open_session(timeout_s: float) -> aiohttp.ClientSession:
    """A session of unlimited persistent connections, as between services; no proxy, no cookies."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=_FOR_EVER_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )


async def _await_servers(servers: Sequence[str]) -> None:
    deadline = time.monotonic() + _ANSWER_S
    async with open_session(5.0) as session:
        for server in servers:
            while True:
                try:
                    async with session.get(server) as answer:
                        await answer.read()
                    break
                except (aiohttp.ClientError, OSError, TimeoutError):
                    if time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(0.05)


async def _serve_commands(host: int, servers: Sequence[str]) -> None:
    commands = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    await _await_servers(servers)
    _send({"ready": True, "nice": os.getpriority(os.PRIO_PROCESS, 0)})
    load: Load | None = None
    running: asyncio.Task[list[Request]] | None = None
    while line := await commands.readline():
        command: dict[str, Any] = json.loads(line)
        if command["do"] == "begin":
            load = Load(
                servers,
                begin_s=command["at"],
                rate=command["rate"],
                seed=1_000_003 * command["seed"] + host,
                size=command["bytes"],
                timeout_s=command["timeout_s"],
            )
            running = asyncio.create_task(load.run())
        elif load is not None and running is not None:
            load.stop()
            _send({"requests": [[*map(_rounded, request[:3]), request.failure] for request in await running]})
            load = running = None


def _rounded(seconds: float) -> float:
    return round(seconds, 6)


def _send(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def main(arguments: Sequence[str]) -> None:
    """Serves the commands of the parent until its pipe closes."""
    host, *servers = arguments
    asyncio.run(_serve_commands(int(host), servers))


if __name__ == "__main__":
    main(sys.argv[1:])
