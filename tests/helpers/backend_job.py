"""Ranks of torch.distributed jobs as processes that a test may kill or interrupt, and what they leave behind."""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import warm_scripts

HERE = Path(__file__).parent


def free_ports(count: int) -> list[int]:
    """Ports that are free for TCP and for UDP."""
    ports: list[int] = []
    while len(ports) < count:
        with socket.socket() as probe, socket.socket(type=socket.SOCK_DGRAM) as twin:
            probe.bind(("127.0.0.1", 0))
            try:
                twin.bind(probe.getsockname())
            except OSError:
                continue
            ports.append(int(probe.getsockname()[1]))
    return ports


class Job:
    """Runs `script scenario` once per rank. Each says things as lines of JSON.

    Args:
        script: A file beside this one.
        scenario: Its argument.
        world: Number of ranks.
        ports: One for the store and one for each rank.
        environment: Further variables.
    """

    def __init__(self, script: str, scenario: str, world: int, ports: list[int], **environment: str) -> None:
        self.ports = ports
        self._folder = tempfile.TemporaryDirectory()
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0]), "WORLD_SIZE": str(world)}
        self.ranks: list[warm_scripts.Script] = []
        for rank in range(world):
            own = {"RANK": str(rank), "STORM_PORT": str(ports[1 + rank])}
            with self._file(rank, "out").open("wb") as out, self._file(rank, "err").open("wb") as err:
                # Each in a session of its own: whatever a rank starts can be found by it.
                rank_process = warm_scripts.start(
                    [str(HERE / script), scenario],
                    env=os.environ | environment | own,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            self.ranks.append(rank_process)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
        self._folder.cleanup()

    def _file(self, rank: int, what: str) -> Path:
        return Path(self._folder.name) / f"{rank}.{what}"

    def said(self, rank: int) -> dict[str, Any]:
        """All that a rank has said, as one."""
        lines = self._file(rank, "out").read_text().splitlines()
        return {key: value for line in lines if line.endswith("}") for key, value in json.loads(line).items()}

    def await_message(self, rank: int, what: str, within_s: float = 60.0) -> None:
        """Blocks until a rank has said something of that name."""
        deadline = time.monotonic() + within_s
        while what not in self.said(rank):
            if self.ranks[rank].poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"rank {rank} did not say {what}: {self._file(rank, 'err').read_text()}")
            time.sleep(0.02)

    def interrupt(self, *ranks: int) -> float:
        """Presses Ctrl-C, and returns when."""
        at = time.monotonic()
        for rank in ranks:
            self.ranks[rank].send_signal(signal.SIGINT)
        return at

    def end(self, within_s: float = 60.0) -> list[dict[str, Any]]:
        """Blocks until all have ended, and returns what they said, by rank."""
        deadline = time.monotonic() + within_s
        for rank, process in enumerate(self.ranks):
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                said = [self.said(each) for each in range(len(self.ranks))]
                pytest.fail(f"rank {rank} has not ended after {within_s} s: {said}")
        return [
            self.said(rank) | {"exit": process.returncode, "stderr": self._file(rank, "err").read_text()}
            for rank, process in enumerate(self.ranks)
        ]

    def check_nothing_is_left(self) -> None:
        """No process, and no port that could not be used again at once."""
        for rank in self.ranks:
            with pytest.raises(ProcessLookupError):
                os.killpg(rank.pid, 0)
        with socket.socket() as store:
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(("127.0.0.1", self.ports[0]))
            store.listen()
        for port in self.ports[1:]:
            with socket.socket(type=socket.SOCK_DGRAM) as endpoint:
                endpoint.bind(("127.0.0.1", port))
