"""The web service of `bench colocate`: requests in an open loop, against a real nginx and servers that misbehave."""

import asyncio
import itertools
import math
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backend_job import free_ports
from stormtorch_lab.bench.services.service import Done, Service, ServiceResult, find_nginx, nginx_command, write_file
from stormtorch_lab.netns import Lab
from stormtorch_lab.netns.access import LabUnavailable

pytest.importorskip("aiohttp")

from stormtorch_lab.bench.services.service_client import Load, Request, arrivals, open_session

pytestmark = pytest.mark.alone

SIZE = 100_000


def nginx_or_skip() -> str:
    try:
        return find_nginx()
    except LabUnavailable as error:
        pytest.skip(str(error))


@contextmanager
def nginx(folder: Path) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A server on loopback: the address of its file, and its process."""
    found, (port,) = nginx_or_skip(), free_ports(1)
    name = write_file(folder, SIZE)
    process = subprocess.Popen(nginx_command(found, folder, "nginx", f"127.0.0.1:{port}"), stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/{name}", process
    finally:
        process.kill()
        process.wait()


async def answers(address: str) -> None:
    async with open_session(5.0) as session:
        for _ in range(100):
            try:
                async with session.get(address) as answer:
                    await answer.read()
                return
            except OSError:
                await asyncio.sleep(0.05)
    pytest.fail(f"nothing answers at {address}")


def load_of(address: str, *, rate: float, seed: int = 1, size: int = SIZE, timeout_s: float = 5.0) -> Load:
    return Load([address], begin_s=time.monotonic(), rate=rate, seed=seed, size=size, timeout_s=timeout_s)


async def offered(load: Load, seconds: float, meanwhile: Callable[[], Awaitable[None]] | None = None) -> list[Request]:
    running = asyncio.create_task(load.run())
    if meanwhile is not None:
        await meanwhile()
    await asyncio.sleep(seconds)
    load.stop()
    return await running


@pytest.mark.pure
def test_arrivals_are_a_poisson_process_that_the_seed_fixes() -> None:
    def drawn(seed: int) -> list[tuple[float, int]]:
        return list(itertools.islice(arrivals(50.0, seed, 7), 20_000))

    first = drawn(3)
    assert first == drawn(3)
    assert first != drawn(4)
    times = [due_s for due_s, _ in first]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    # Exponential gaps: mean and standard deviation are both 1/rate; and as many exceed the mean as 1/e says.
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.03)
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(1 / 50, rel=0.05)
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.015)
    # All servers alike.
    counts = [sum(server == each for _, server in first) for each in range(7)]
    assert min(counts) > 0.9 * len(first) / 7


def test_nginx_answers_over_connections_that_are_kept(tmp_path: Path) -> None:
    async def body() -> list[Request]:
        await answers(address)
        return await offered(load_of(address, rate=100.0), 1.0)

    with nginx(tmp_path) as (address, process):
        requests = asyncio.run(body())
        opened = Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()
    assert 60 < len(requests) < 150
    assert [request.failure for request in requests if request.failure] == []
    assert all(0.0 < request.latency_s < 1.0 for request in requests)
    # Closed connections would stand there for a minute, in TIME_WAIT (06): one for each request.
    port = f"{int(address.rpartition(':')[2].partition('/')[0]):04X}"
    assert sum(line.split()[1].endswith(f":{port}") and line.split()[3] == "06" for line in opened[1:]) < 10


@pytest.mark.thorough
def test_a_server_that_stalls_shows_in_all_requests_that_were_due_meanwhile(tmp_path: Path) -> None:
    """A closed-loop client would send one request into the stall, and report one long latency."""
    stall_s = 0.4
    stalled: list[float] = []

    async def body() -> tuple[float, list[Request]]:
        await answers(address)
        load, begin_s = load_of(address, rate=200.0), time.monotonic()

        async def stall() -> None:
            await asyncio.sleep(0.4)
            process.send_signal(signal.SIGSTOP)
            stalled.append(time.monotonic())
            await asyncio.sleep(stall_s)
            process.send_signal(signal.SIGCONT)
            stalled.append(time.monotonic())

        return begin_s, await offered(load, 0.4, stall)

    with nginx(tmp_path) as (address, process):
        begin_s, requests = asyncio.run(body())
    begun_s, ended_s = (moment - begin_s for moment in stalled)
    meanwhile = [request for request in requests if begun_s < request.due_s < ended_s]
    assert len(meanwhile) > 0.6 * 200 * stall_s
    # Sent when they were due, although no server replied.
    assert sorted(request.late_s for request in meanwhile)[len(meanwhile) // 2] < 0.05
    # Each waited at least for the rest of the stall, counted from when it was due.
    assert all(request.due_s + request.latency_s > ended_s for request in meanwhile)
    mean_s = sum(request.latency_s for request in meanwhile) / len(meanwhile)
    assert mean_s > 0.8 * stall_s / 2
    before = [request.latency_s for request in requests if request.due_s < begun_s - 0.1]
    assert sorted(before)[len(before) // 2] < 0.1


@pytest.mark.thorough
def test_failures_are_counted_by_kind() -> None:
    """Servers that close the connection, send too little or an error, or never reply."""
    answers_of = {
        "connection": b"",
        "length": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
        "status": b"HTTP/1.1 500 Oops\r\nContent-Length: 10\r\n\r\n0123456789",
        "timeout": None,
        "": b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123456789",
    }

    async def kinds(answer: bytes | None) -> set[str]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while await reader.read(4096):
                if answer is None:
                    continue
                writer.write(answer)
                if not answer:
                    break
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        requests = await offered(load_of(f"http://127.0.0.1:{port}/", rate=50.0, size=10, timeout_s=0.3), 0.3)
        server.close()
        assert len(requests) > 3
        return {request.failure for request in requests}

    for kind, answer in answers_of.items():
        assert asyncio.run(kinds(answer)) == {kind}


def test_a_client_that_has_no_processor_says_how_late_it_was() -> None:
    async def body() -> list[Request]:
        async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async def busy() -> None:
            await asyncio.sleep(0.1)
            time.sleep(0.2)  # that is the point: nothing else runs in this process meanwhile

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        return await offered(load_of(f"http://127.0.0.1:{port}/", rate=100.0), 0.2, busy)

    requests = asyncio.run(body())
    meanwhile = [request for request in requests if 0.12 < request.due_s < 0.28]
    assert len(meanwhile) > 3
    assert all(request.due_s + request.late_s > 0.28 for request in meanwhile)
    assert all(request.latency_s >= request.late_s for request in requests)


@pytest.mark.pure
def test_a_summary_counts_what_was_due_in_the_measured_time() -> None:
    def done(due_s: float, latency_s: float, failure: str = "", late_s: float = 0.001) -> Done:
        return Done(host=0, due_s=due_s, late_s=late_s, latency_s=latency_s, failure=failure)

    requests = [done(0.1, 9.0), done(1.0, 0.01), done(2.0, 0.03, late_s=0.005), done(2.5, 5.0, "timeout")]
    requests += [done(3.0, 9.0)]
    result = ServiceResult.of(requests, seconds=3.0, first_s=0.5)
    assert (result.requests, result.done, result.failed) == (3, 2, {"timeout": 1})
    assert result.mean_s == pytest.approx(0.02)
    assert result.per_s == pytest.approx(2 / 2.5)
    assert result.max_s == 0.03
    assert result.late_max_s == 0.005
    assert result.to_json()["done"] == 2
    nothing = ServiceResult.of([], seconds=1.0)
    assert (nothing.requests, nothing.mean_s, nothing.late_max_s) == (0, None, 0.0)


@pytest.mark.pure
def test_without_nginx_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _name, path=None: None)
    with pytest.raises(LabUnavailable, match="apt-get install nginx-light"):
        find_nginx()


@pytest.mark.pure
def test_without_aiohttp_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: f"/usr/sbin/{name}")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(LabUnavailable, match=r"pip install 'stormtorch-lab\[colocate\]'"):
        find_nginx()


@pytest.mark.thorough
@pytest.mark.lab
def test_hosts_of_a_lab_fetch_from_each_other_and_leave_nothing_behind(lab: Callable[..., Lab]) -> None:
    nginx_or_skip()
    made = lab(hosts=3, rate="100mbit")
    with Service(made) as service:
        folder = Path(service._folder.name) if service._folder else Path("/nowhere")
        made.reset()
        service.begin(rate=60.0, seed=5)
        time.sleep(1.5)
        service.stop()
        requests = service.wait()
        # Responses crossed the access links of all hosts.
        bytes_up = [line.packets * 1500 for line in made.measured().lines if line.direction == "up"]
        processes = [*service.servers, *(client.process for client in service._clients)]
    result = ServiceResult.of(requests, seconds=1.2)
    assert {request.host for request in requests} == {0, 1, 2}
    assert 40 < result.requests < 110
    assert result.failed == {}
    assert result.mean_s is not None
    assert result.mean_s > SIZE * 8 / 100e6  # the capacity of the link
    assert sum(bytes_up) > 0.9 * len(requests) * SIZE
    assert not folder.exists()
    assert all(process.poll() is not None for process in processes)
