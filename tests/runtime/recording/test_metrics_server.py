"""Prometheus metrics of a training, and ledgers that log to Weights & Biases."""

import logging
import os
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from conftest import local_world
from test_recorder import train

from stormtorch import BoundedDrift
from stormtorch.runtime.recording import metrics_server, recorder
from stormtorch.runtime.recording.metrics_server import MetricsServer
from stormtorch.telemetry.ledger import Ledger, LedgerRow
from stormtorch.udp.udp import UdpTransport


def test_a_training_serves_its_metrics_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    monkeypatch.setenv(recorder.EVERY_VARIABLE, "0.05")
    monkeypatch.setenv(metrics_server.VARIABLE, "0")

    def work(transport: UdpTransport) -> tuple[str, str] | None:
        optimizer = train(transport, BoundedDrift(), 12)
        serving = optimizer.session.recorder.metrics
        if serving is None:  # ranks are threads here, and one rank of a process serves
            return None
        address = serving.address
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            return address, answer.read().decode()

    found = [(rank, *each) for rank, each in enumerate(local_world(2, work)) if each is not None]
    assert found
    for rank, address, text in found:
        assert address.startswith("127.0.0.1:")
        assert f'stormtorch_steps_total{{rank="{rank}"}}' in text
        assert f'stormtorch_info{{group="world",host="{socket.gethostname()}",' in text
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"http://{address}/metrics", timeout=5)


@pytest.mark.pure
def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ValueError, match=r"STORM_METRICS=9100 needs .* pip install prometheus_client"):
        MetricsServer("9100", 0)


@pytest.mark.pure
@pytest.mark.parametrize("text", ["", "x", "host:", "70000", "1:2:x", "-1"])
def test_a_strange_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="STORM_METRICS must be a port or host:port"):
        metrics_server._address(text)


@pytest.mark.pure
def test_processes_of_a_machine_take_ports_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert metrics_server._address("9100") == ("127.0.0.1", 9103)
    assert metrics_server._address("0.0.0.0:9100") == ("0.0.0.0", 9103)
    assert metrics_server._address("[::1]:0") == ("::1", 0)
    with pytest.raises(ValueError, match="leaves no port for LOCAL_RANK 3"):
        metrics_server._address("65534")


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"rank 4: cannot serve metrics at 127.0.0.1:{port}: .*STORM_METRICS"):
            MetricsServer(str(port), 4)


def test_a_forked_process_keeps_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    server = MetricsServer("0", 0)
    port = int(server.address.rpartition(":")[2])
    ready, written = os.pipe()
    child = os.fork()
    if child == 0:  # like a data loader's worker, which may outlive the training
        os.write(written, b"x")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(ready, 1)
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=5) as answer:
            assert answer.status == 200, "the parent serves on"
        server.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5).close()
        MetricsServer(str(port), 1).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(written)


class Run:
    """A stand-in for a Weights & Biases run, without the package."""

    def __init__(self, fails: bool = False) -> None:
        self.logged: list[dict[str, Any]] = []
        self.defined: list[str] = []
        self.fails = fails

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.defined.append(f"{name} over {step_metric}")

    def log(self, numbers: dict[str, Any]) -> None:
        if self.fails:
            raise ConnectionError("gone")
        self.logged.append(numbers)


@pytest.mark.pure
def test_a_ledger_logs_its_rows_and_goes_on_when_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    ledger, run = Ledger(), Run()
    ledger.to_wandb(run)
    ledger.add(LedgerRow(3, gradients={1: 0.5}, gradient_wait_s=0.25))
    assert run.defined == ["storm/step over None", "storm/* over storm/step"]
    assert run.logged[0]["storm/step"] == 3
    assert run.logged[0]["storm/gradients/from_1"] == 0.5
    assert run.logged[0]["storm/gradient_wait_s"] == 0.25
    run.fails = True
    with caplog.at_level(logging.WARNING, "stormtorch"):
        ledger.add(LedgerRow(4))
        ledger.add(LedgerRow(5))
    assert caplog.text.count("cannot log rows to Weights & Biases: gone") == 1
    assert len(ledger) == 3


@pytest.mark.slow
def test_weights_and_biases_takes_the_rows_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="storm", dir=str(tmp_path), settings=wandb.Settings(init_timeout=60))
    ledger = Ledger()
    ledger.to_wandb(run)
    for step in range(3):
        ledger.add(LedgerRow(step, gradients={1: 0.5}, bytes_sent=10 * step))
    # The next row sends the one before it.
    run.log({})
    assert run.summary["storm/step"] == 2
    assert run.summary["storm/bytes_sent"] == 20
    run.finish()
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
