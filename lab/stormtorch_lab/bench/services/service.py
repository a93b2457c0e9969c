"""A web service on the hosts of a lab: nginx on each host, and requests from every host to every other.

with Service(lab) as service:
    service.begin(rate=200.0, seed=0)
    ...                                         # a training on the same links
    service.stop()
    requests = service.wait()
    summary = ServiceResult.of(requests, seconds=10.0)
"""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from stormtorch.checks import check_between
from stormtorch.telemetry.statistics import mean, percentile
from stormtorch_lab.netns.access import LabError, LabUnavailable
from stormtorch_lab.netns.lab import Lab

PORT = 8080
"""Port of nginx on every host."""
PREFERRED_NICE = -10
"""Niceness requested for nginx and its clients; not every user may set it."""
_FILE = "file"
_START_S, _ANSWER_S = 60.0, 30.0
_BEGIN_S = 0.3
"""Seconds from the command to the first requests, so that all clients have received it by then."""
# Raises the limit of open files, as connections have no limit, and lowers the niceness if that is allowed. Under
# autogroup, niceness counts only inside a session, so the niceness of the session is lowered as well.
_PREFERRED = (
    'ulimit -n "$(ulimit -Hn)"; { echo "$1" > /proc/self/autogroup; } 2>/dev/null; '
    'n=$1; shift; nice -n "$n" true 2>/dev/null || n=0; exec nice -n "$n" "$@"'
)


@dataclass(frozen=True, kw_only=True)
class Done:
    """One request, as its client saw it; times in seconds."""

    host: int
    due_s: float
    late_s: float
    latency_s: float
    failure: str


@dataclass(frozen=True, kw_only=True)
class ServiceResult:
    """Summary of the requests of a measured time. Latencies count from the due time; failed requests have none."""

    requests: int
    """Requests that were due."""
    failed: dict[str, int]
    """Failed requests, by kind of failure."""
    per_s: float
    """Complete responses per second."""
    mean_s: float | None
    p50_s: float | None
    p99_s: float | None
    max_s: float | None
    late_mean_s: float
    """Mean delay from due time to sending, by the clients themselves; a part of each latency."""
    late_p99_s: float
    late_max_s: float

    @property
    def done(self) -> int:
        """Number of complete responses."""
        return self.requests - sum(self.failed.values())

    @classmethod
    def of(cls, requests: Sequence[Done], *, seconds: float, first_s: float = 0.0) -> "ServiceResult":
        """Summarises the requests due from `first_s` to `seconds`."""
        counted = [request for request in requests if first_s <= request.due_s < seconds]
        latencies = [request.latency_s for request in counted if not request.failure]
        late = [request.late_s for request in counted] or [0.0]
        return cls(
            requests=len(counted),
            failed=dict(sorted(Counter(request.failure for request in counted if request.failure).items())),
            per_s=len(latencies) / (seconds - first_s),
            mean_s=mean(latencies) if latencies else None,
            p50_s=percentile(latencies, 50) if latencies else None,
            p99_s=percentile(latencies, 99) if latencies else None,
            max_s=max(latencies) if latencies else None,
            late_mean_s=mean(late),
            late_p99_s=percentile(late, 99),
            late_max_s=max(late),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in ("requests", "done", *list(self.__dataclass_fields__)[1:])}


def find_nginx() -> str:
    """Path of nginx.

    Raises:
        LabUnavailable: nginx or aiohttp is not installed; the message has the command that installs it.
    """
    # Debian keeps it in a folder that is not in an ordinary user's PATH.
    path = shutil.which("nginx", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))
    if path is None:
        raise LabUnavailable(
            "the web service needs nginx, which is not installed: apt-get install nginx-light (or nginx)"
        )
    if importlib.util.find_spec("aiohttp") is None:
        raise LabUnavailable(
            "the web service's clients need aiohttp, which is not installed: pip install 'stormtorch-lab[colocate]'"
        )
    return path


def nginx_config(folder: Path, name: str, address: str) -> str:
    """Configuration of one nginx that serves a folder and writes nowhere else.

    It is a single process: a master that drops root for its workers would need more privileges than a user namespace
    has. It stays root: otherwise it would chown its folders to another user, and an unprivileged namespace has none.
    """
    scratch = "\n".join(
        f"    {kind}_temp_path {folder}/{name}-{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""daemon off;
user root root;
master_process off;
pid {folder}/{name}.pid;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    sendfile on;
    tcp_nodelay on;
    keepalive_timeout 1d;
    keepalive_requests 1000000000;
    default_type application/octet-stream;
{scratch}
    server {{
        listen {address} backlog=4096;
        root {folder};
    }}
}}
"""


def nginx_command(nginx: str, folder: Path, name: str, address: str) -> list[str]:
    """Writes the configuration of one nginx into the folder, and returns the command that starts it."""
    path = folder / f"{name}.conf"
    path.write_text(nginx_config(folder, name, address), encoding="utf-8")
    return [nginx, "-p", str(folder), "-e", str(folder / f"{name}.log"), "-c", str(path)]


def write_file(folder: Path, size: int) -> str:
    """Writes the served file; returns its name."""
    (folder / _FILE).write_bytes(os.urandom(size))
    return _FILE


class _Client:
    """The load generator of one host, and a thread that reads its replies."""

    def __init__(self, process: "subprocess.Popen[str]", host: int) -> None:
        self.process, self.host = process, host
        self.said: dict[str, Any] | None = None
        self._received = threading.Condition()
        threading.Thread(target=self._read, name=f"client {host}", daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._received, contextlib.suppress(json.JSONDecodeError):
                self.said = json.loads(line)
                self._received.notify_all()
        with self._received:
            self._received.notify_all()

    def send_command(self, **command: Any) -> None:
        self.said = None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def receive(self, within_s: float) -> dict[str, Any]:
        end = time.monotonic() + within_s
        with self._received:
            while self.said is None and self.process.poll() is None and time.monotonic() < end:
                self._received.wait(0.1)
            if self.said is None:
                raise LabError(f"the client of the web service on host {self.host} {_state(self.process, within_s)}")
            return self.said


def _state(process: "subprocess.Popen[Any]", within_s: float) -> str:
    code = process.poll()
    return f"did not answer within {within_s:g} s" if code is None else f"ended with status {code}"


class Service:
    """Servers and clients on all hosts of a lab. Use it in a `with` statement.

    Args:
        lab: Lab, open already.
        size: Bytes of a response.
        timeout_s: Seconds after which a request counts as failed.

    Raises:
        LabUnavailable: nginx or aiohttp is missing.
        LabError: A server or a client failed.
    """

    def __init__(self, lab: Lab, *, size: int = 100_000, timeout_s: float = 5.0) -> None:
        check_between("size", size, 1, 1 << 30)
        check_between("timeout_s", timeout_s, 0.01, 1e4)
        self._nginx = find_nginx()
        self._lab, self._size, self._timeout_s = lab, size, timeout_s
        self.servers: list[subprocess.Popen[Any]] = []
        """Processes of nginx by host, for `lab.signal`."""
        self.nice = 0
        """Actual niceness of nginx and the clients."""
        self._clients: list[_Client] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._begun_s: float | None = None
        self._stopped = False

    def __enter__(self) -> "Service":
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stormtorch-service-")
        folder, lab = Path(self._folder.name), self._lab
        name = write_file(folder, self._size)
        at = [f"{lab.address(host)}:{PORT}" for host in range(lab.size)]
        for host in range(lab.size):
            words = nginx_command(self._nginx, folder, f"nginx-{host}", at[host])
            self.servers.append(
                lab.start(host, _preferred(words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
        script = str(Path(__file__).with_name("service_client.py"))
        for host in range(lab.size):
            others = [f"http://{address}/{name}" for other, address in enumerate(at) if other != host]
            with (folder / f"client-{host}.log").open("w") as log:
                process = lab.start(
                    host,
                    _preferred([sys.executable, "-I", script, str(host), *others]),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            self._clients.append(_Client(process, host))
        try:
            self.nice = max(client.receive(_START_S)["nice"] for client in self._clients)
        except LabError as error:
            raise LabError(f"{error}{self._last_words()}") from error

    def _last_words(self) -> str:
        assert self._folder is not None
        logs = sorted(Path(self._folder.name).glob("*.log"))
        lines = [text[-1] for log in logs if (text := log.read_text(errors="replace").strip().splitlines())]
        return f": {lines[0]}" if lines else ""

    def begin(self, *, rate: float, seed: int) -> None:
        """Starts `rate` requests per second, of all hosts together, until `stop`."""
        check_between("rate", rate, 1e-3, 1e6)
        self._begun_s, self._stopped = time.monotonic() + _BEGIN_S, False
        for client in self._clients:
            client.send_command(
                do="begin",
                at=self._begun_s,
                rate=rate / len(self._clients),
                seed=seed,
                bytes=self._size,
                timeout_s=self._timeout_s,
            )

    @property
    def runs_for_s(self) -> float:
        """Seconds since requests began; 0 before that."""
        return 0.0 if self._begun_s is None else max(time.monotonic() - self._begun_s, 0.0)

    def stop(self) -> None:
        """Sends no further requests. Idempotent."""
        if not self._stopped:
            self._stopped = True
            for client in self._clients:
                client.send_command(do="stop")

    @property
    def ended(self) -> bool:
        """Whether all requests have ended after `stop`."""
        for host, server in enumerate(self.servers):
            if server.poll() is not None:
                raise LabError(f"nginx on host {host} {_state(server, 0.0)}{self._last_words()}")
        # A client that has exited never replies; `wait` raises the error.
        return self._stopped and all(
            client.said is not None or client.process.poll() is not None for client in self._clients
        )

    def wait(self) -> list[Done]:
        """Waits after `stop` until all requests have ended, and returns them."""
        found = []
        for client in self._clients:
            for due_s, late_s, latency_s, failure in client.receive(self._timeout_s + _ANSWER_S)["requests"]:
                found.append(Done(host=client.host, due_s=due_s, late_s=late_s, latency_s=latency_s, failure=failure))
        self._begun_s = None
        return found

    def close(self) -> None:
        """Ends servers and clients, and removes their folder. Idempotent."""
        processes = [*(client.process for client in self._clients), *self.servers]
        with contextlib.suppress(LabError):  # if the lab is closed, they have ended
            for process in processes:
                if process.poll() is None:
                    self._lab.signal(process, 9)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        self._clients.clear()
        self.servers.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _preferred(words: Sequence[str]) -> list[str]:
    return ["sh", "-c", _PREFERRED, "sh", str(PREFERRED_NICE), *words]
