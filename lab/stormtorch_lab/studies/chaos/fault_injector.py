"""Fault injection: starts and restarts the processes of a training in a lab, and applies and ends faults."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stormtorch_lab.netns.access import LabError
from stormtorch_lab.netns.lab import Lab
from stormtorch_lab.studies.chaos.faults import Fault, network
from stormtorch_lab.studies.chaos.logs import History, Reader
from stormtorch_lab.studies.chaos.settings import ChaosSettings
from stormtorch_lab.studies.chaos.timeline import InjectedFault, ProcessExit
from stormtorch_lab.studies.chaos.worker import STOP, STORE_HOST, STORE_PORT

WORKER = (sys.executable, "-m", "stormtorch_lab.studies.chaos.worker")
"""Command prefix of every process."""
# A process that has not left this many seconds after SIGTERM is killed, which counts as its failure.
LEAVE_S = 10.0
# Seconds until a process that exited by itself is restarted; doubled each time.
_RESTART_S = (1.0, 16.0)


class FaultInjector:
    """One training with fault injection, from the start of its processes to their end.

    Args:
        lab: Lab with a host for each process.
        settings: Settings of the run.
        folder: Folder for the logs, which must be empty.
        pace_s: Shortest time of a step.
        command: Command prefix of every process; accepts the options of worker.py and writes the same logs.
    """

    def __init__(
        self,
        lab: Lab,
        settings: ChaosSettings,
        folder: Path,
        *,
        pace_s: float,
        command: Sequence[str] = WORKER,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.struck: list[InjectedFault] = []
        """Faults that have ended."""
        self.ended: list[ProcessExit] = []
        """Exits of processes that were not caused by a fault."""
        self._lab = lab
        self._settings = settings
        self._folder = folder
        self._pace_s = pace_s
        self._command = command
        self._reader = Reader(folder)
        self._store: subprocess.Popen[Any] | None = None
        self._processes: dict[int, subprocess.Popen[Any]] = {}
        self._leaving: dict[int, float] = {}
        self._restarts: dict[int, float] = {}
        self._delays: dict[int, float] = {}
        self._active: dict[Fault, float] = {}

    def open_store(self) -> None:
        """Starts the store of the rendezvous, and waits until it serves."""
        store = "stormtorch_lab.studies.chaos.store"
        words = [sys.executable, "-m", store, self._lab.address(STORE_HOST), str(STORE_PORT)]
        self._store = self._lab.start(STORE_HOST, words, stdout=subprocess.PIPE)
        assert self._store.stdout is not None
        if not self._store.stdout.readline():
            raise LabError(f"the store on h{STORE_HOST} did not start: is port {STORE_PORT} in use?")

    # --- processes ----------------------------------------------------------------------------------------------------

    def start(self, host: int) -> None:
        """Starts the process of a host, always by the same command."""
        given = {
            "host": host,
            "hosts": self._settings.hosts,
            "folder": self._folder.absolute(),
            "policy": self._settings.policy,
            "seed": self._settings.seed,
            "silence-s": self._settings.silence_s,
            "pace-s": self._pace_s,
            "digest-every": self._settings.digest_every,
        }
        words = [f"--{name}={value}" for name, value in given.items()]
        with (self._folder / f"h{host}.txt").open("ab") as output:
            self._processes[host] = self._lab.start(
                host,
                [*self._command, *words],
                env={"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def runs(self, host: int) -> bool:
        """Whether the process of a host runs."""
        return host in self._processes and self._processes[host].poll() is None

    def history(self) -> History:
        """History of all processes so far, from their logs."""
        return self._reader.read()

    def last_output_line(self, host: int) -> str:
        """Last output line of a host's processes."""
        lines = (self._folder / f"h{host}.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"

    def restart_exited(self, now: float) -> None:
        """Records and restarts processes that exited by themselves; kills those that do not leave in time."""
        for host, process in list(self._processes.items()):
            status = process.poll()
            if host in self._leaving:
                if status is not None:
                    del self._leaving[host], self._processes[host]
                elif now > self._leaving[host] + LEAVE_S:
                    self._lab.signal(process, signal.SIGKILL)
                    self.ended.append(ProcessExit(host, now, -signal.SIGKILL, f"did not leave within {LEAVE_S:g} s"))
            elif status is not None:
                del self._processes[host]
                process_logs = self.history().of_host(host)
                error = process_logs[-1].error if process_logs else None
                self.ended.append(ProcessExit(host, now, status, error))
                delay = self._delays.get(host, _RESTART_S[0])
                self._delays[host] = min(2 * delay, _RESTART_S[1])
                if host < self._settings.hosts:
                    self._restarts[host] = now + delay
        for host, due in list(self._restarts.items()):
            if now >= due:
                del self._restarts[host]
                self.start(host)

    def announce_end(self, decay_at: int, stop_at: int) -> None:
        """Announces the last step to all processes."""
        path = self._folder / STOP
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"decay_at": decay_at, "stop_at": stop_at}), encoding="utf-8")
        partial.rename(path)

    def kill(self) -> None:
        """Ends all processes."""
        for process in self._processes.values():
            self._lab.signal(process, signal.SIGKILL)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
        self._processes.clear()
        if self._store is not None:
            self._lab.signal(self._store, signal.SIGKILL)
            self._store.wait(10.0)
            assert self._store.stdout is not None
            self._store.stdout.close()
            self._store = None

    # --- faults -------------------------------------------------------------------------------------------------------

    @property
    def active(self) -> dict[Fault, float]:
        """Active faults, and when each began."""
        return dict(self._active)

    def begin(self, fault: Fault) -> None:
        """Applies a fault."""
        self._active[fault] = time.monotonic()
        if fault.kind == "join":
            self._wait_for_exit(fault.hosts[0])
            self.start(fault.hosts[0])
        elif fault.kind == "leave":
            self._request_leave(fault.hosts[0])
        elif fault.kind == "pause":
            self._signal(fault.hosts[0], signal.SIGSTOP)
        elif fault.kind == "kill":
            self._restarts.pop(fault.hosts[0], None)
            self._signal(fault.hosts[0], signal.SIGKILL)
            self._wait_for_exit(fault.hosts[0])
        else:
            self._set_network()

    def end(self, fault: Fault) -> bool:
        """Ends a fault; False if it must stay active, as a process has not left yet."""
        host = fault.hosts[0] if fault.hosts else -1
        if fault.kind == "leave" and host in self._leaving:
            return False
        began_s = self._active.pop(fault)
        if fault.kind == "join":
            self._request_leave(host)
        elif fault.kind == "pause":
            self._signal(host, signal.SIGCONT)
        elif fault.kind in ("kill", "leave"):
            self._restarts.pop(host, None)
            if not self.runs(host):
                self.start(host)
        else:
            self._set_network()
        self.struck.append(InjectedFault(fault, began_s, time.monotonic()))
        return True

    def _set_network(self) -> None:
        self._lab.set(**network(self._settings.network, self._active, self._lab.size))

    def _request_leave(self, host: int) -> None:
        self._restarts.pop(host, None)
        if self.runs(host):
            self._leaving[host] = time.monotonic()
            self._signal(host, signal.SIGTERM)

    def _signal(self, host: int, number: int) -> None:
        if self.runs(host):
            self._lab.signal(self._processes[host], number)

    def _wait_for_exit(self, host: int) -> None:
        """Waits for a process that was killed or is leaving; kills it if it stays."""
        process = self._processes.pop(host, None)
        self._leaving.pop(host, None)
        if process is not None:
            try:
                process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._lab.signal(process, signal.SIGKILL)
                process.wait(10.0)
