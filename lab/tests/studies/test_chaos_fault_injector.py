"""Faults injected into real processes of a lab; these do not train, so that only faults can stop them."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stormtorch_lab.netns import Lab
from stormtorch_lab.studies.chaos.fault_injector import FaultInjector
from stormtorch_lab.studies.chaos.faults import KINDS, Fault
from stormtorch_lab.studies.chaos.run import run_chaos
from stormtorch_lab.studies.chaos.settings import ChaosSettings

pytestmark = pytest.mark.lab
MakeLab = Callable[..., Lab]
COMMAND = (sys.executable, "-ISs", str(Path(__file__).parents[3] / "tests" / "helpers" / "chaos_steps.py"))


def steps_between(injector: FaultInjector, host: int, begin: float, end: float) -> int:
    return sum(begin < step.t < end for process_log in injector.history().of_host(host) for step in process_log.steps)


def wait_for_steps(injector: FaultInjector, host: int, after: float) -> float:
    """Waits until a host makes steps, and returns the time of the first."""
    deadline = time.monotonic() + 10
    while (found := injector.history().stepped(host, after)) is None:
        assert time.monotonic() < deadline, f"h{host} makes no steps"
        injector.restart_exited(time.monotonic())
        time.sleep(0.02)
    return found


@pytest.mark.thorough
def test_processes_are_killed_stopped_asked_to_leave_and_started_again(lab: MakeLab, tmp_path: Path) -> None:
    settings = ChaosSettings(hosts=3, spares=1)
    injector = FaultInjector(lab(4, probe=False), settings, tmp_path, pace_s=0.0, command=COMMAND)
    for host in range(3):
        injector.start(host)
    for host in range(3):
        wait_for_steps(injector, host, 0.0)
    kinds = {"kill": 0, "pause": 1, "leave": 2, "join": 3}
    faults = [Fault(kind=kind, at_s=0, lasts_s=1, hosts=(host,)) for kind, host in kinds.items()]
    for fault in faults:
        injector.begin(fault)
    wait_for_steps(injector, 3, 0.0)
    quiet_s = time.monotonic() + 0.2
    time.sleep(0.8)
    assert [steps_between(injector, host, quiet_s, quiet_s + 0.6) > 0 for host in range(4)] == [
        False,
        False,
        False,
        True,
    ]
    injector.restart_exited(time.monotonic())
    assert all(injector.end(fault) for fault in faults)
    ended_s = time.monotonic()
    for host in range(3):
        wait_for_steps(injector, host, ended_s)
    injector.restart_exited(time.monotonic())
    time.sleep(0.5)
    assert steps_between(injector, 3, time.monotonic() - 0.2, time.monotonic()) == 0, "it joined and has left again"
    assert [len(injector.history().of_host(host)) for host in range(4)] == [2, 1, 2, 1]
    assert [process_log.left for process_log in injector.history().of_host(2)] == [True, False]
    assert [each.fault.kind for each in injector.struck] == list(kinds)
    assert not injector.ended and not injector.active
    injector.kill()
    assert not any(injector.runs(host) for host in range(4))


def test_network_faults_reach_the_lab_and_leave_it_as_it_was(lab: MakeLab, tmp_path: Path) -> None:
    network = lab(4, probe=False, loss=0.1)
    injector = FaultInjector(
        network, ChaosSettings(hosts=3, spares=1, network=network.conditions), tmp_path, pace_s=0.0
    )
    before = network.conditions
    cut = Fault(kind="cut", at_s=0, lasts_s=1, hosts=(1,))
    storm = Fault(kind="storm", at_s=0, lasts_s=1)
    injector.begin(cut)
    injector.begin(storm)
    assert network.conditions.cut == {1} and network.conditions.to_json()["loss"] == 0.5
    injector.end(cut)
    assert network.conditions.cut == frozenset() and network.conditions.to_json()["loss"] == 0.5
    injector.end(storm)
    assert network.conditions == before


def test_a_process_that_fails_is_noted_and_started_again(lab: MakeLab, tmp_path: Path) -> None:
    settings = ChaosSettings(hosts=3, spares=0)
    injector = FaultInjector(lab(3, probe=False), settings, tmp_path, pace_s=0.0, command=[*COMMAND, "--fragile", "5"])
    injector.start(1)
    first = wait_for_steps(injector, 1, 0.0)
    wait_for_steps(injector, 1, first + 1.0)
    assert [(each.host, each.status, each.error) for each in injector.ended] == [(1, 3, "RuntimeError: it was fragile")]
    injector.kill()


@pytest.mark.thorough
def test_a_process_that_does_not_leave_is_killed_and_noted(
    lab: MakeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stormtorch_lab.studies.chaos.fault_injector.LEAVE_S", 0.5)
    settings = ChaosSettings(hosts=3, spares=0)
    injector = FaultInjector(lab(3, probe=False), settings, tmp_path, pace_s=0.0, command=[*COMMAND, "--stubborn"])
    injector.start(2)
    wait_for_steps(injector, 2, 0.0)
    leave = Fault(kind="leave", at_s=0, lasts_s=0.1, hosts=(2,))
    injector.begin(leave)
    deadline = time.monotonic() + 10
    while not injector.end(leave):
        assert time.monotonic() < deadline
        injector.restart_exited(time.monotonic())
        time.sleep(0.05)
    assert [each.host for each in injector.ended] == [2]
    wait_for_steps(injector, 2, time.monotonic())
    injector.kill()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_of_all_kinds_passes_where_nothing_minds(tmp_path: Path) -> None:
    from stormtorch_lab.netns.fixtures import lab_or_skip

    lab_or_skip()
    # A seed whose first minute has all kinds.
    settings = ChaosSettings(hosts=5, minutes=1.0, seed=5, patience_s=10, baseline=False)
    report = run_chaos(settings, tmp_path, command=COMMAND)
    assert report.passed, [check for check in report.checks if not check.holds]
    assert {each.struck.fault.kind for each in report.recoveries} == set(KINDS)
    for recovery in report.recoveries:
        fault, struck = recovery.struck.fault, recovery.struck
        assert struck.began_s - report.start_s == pytest.approx(fault.at_s, abs=1.5)
        assert struck.ended_s - struck.began_s == pytest.approx(fault.lasts_s, abs=1.5)
        assert recovery.pause_s is not None and recovery.pause_s < 2.0
