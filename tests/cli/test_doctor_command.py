"""`stormtorch doctor` from the command line: this machine, working hosts, and hosts with all kinds of faults."""

import json
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commands import ENVIRONMENT, call
from stormtorch import __version__

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
DOCTOR = (sys.executable, "-m", "stormtorch", "doctor")


def script(path: Path, *lines: str) -> str:
    """Makes a command that replaces ssh: it gets a host and a command line."""
    path.write_text("\n".join(["#!/bin/sh", "host=$1; shift", *lines]) + "\n")
    path.chmod(0o700)
    return str(path)


def run(*arguments: str, within_s: float = 40.0, variables: dict[str, str] | None = None) -> tuple[int, str, float]:
    begin = time.monotonic()
    done = subprocess.run(
        [*DOCTOR, *arguments],
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
        env={**ENVIRONMENT, **(variables or {})},
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr, time.monotonic() - begin


def test_this_machine_gets_a_line_for_each_check(tmp_path: Path) -> None:
    out = tmp_path / "machine.json"
    code, text, _ = run("--json", str(out))
    findings = json.loads(out.read_text())["findings"]
    subjects = {each["subject"] for each in findings}
    assert {"kernel", "receive buffer", "UDP GSO", "UDP GRO", "clock", "cores", "memory", "versions", "lab"} <= subjects
    assert code == int(any(each["level"] == "problem" for each in findings))
    for each in findings:
        assert each["text"] in text
    assert f"stormtorch {__version__}" in text


def test_two_hosts_are_examined_and_the_losses_kept(tmp_path: Path) -> None:
    ssh = script(tmp_path / "ssh", "echo Welcome to $host", 'exec sh -c "$*"')
    kept, out = tmp_path / "links.json", tmp_path / "out.json"
    options = ("--seconds", "2", "--interface", "lo", "--capture", str(kept), "--json", str(out), "--params-m", "1")
    code, text, _ = run("a", "b", "--ssh", ssh, *options)
    assert code == 0, text
    assert "All 2 links among 2 ranks are fine" in text
    assert "round 1 of 1" in text
    assert "1 M parameters on 2 ranks: a prediction" in text
    assert [(each["from"], each["to"]) for each in json.loads(kept.read_text())["links"]] == [(0, 1), (1, 0)]
    told = json.loads(out.read_text())
    assert [each["udp"] for each in told["measured"]["links"]] == [True, True]
    assert told["advice"]["policy_text"] == "BoundedDrift(reliability=EXACT)"


BAD_HOSTS = {
    "unknown": (
        'echo "ssh: Could not resolve hostname unknown: Name or service not known" >&2; exit 255',
        "unknown is an unknown host: no address is known for this name.",
    ),
    "guarded": (
        'echo "guarded: Permission denied (publickey)." >&2; exit 255',
        "guarded refuses this user: make `ssh guarded true` work without a password.",
    ),
    "closed": (
        'echo "ssh: connect to host closed port 22: Connection refused" >&2; exit 255',
        "closed cannot be reached by ssh: ssh: connect to host closed port 22: Connection refused.",
    ),
    "bare": (
        f"exec {sys.executable} -I -S -m stormtorch doctor --rank 1",
        f"bare has no stormtorch for {sys.executable}: install it there, or choose another Python by --python.",
    ),
    "empty": (
        "exec /no/such/python -m stormtorch",
        f"empty has no Python at {sys.executable}: name a Python with stormtorch by --python.",
    ),
    "silent": ("exec sleep 60", "silent: did not report within 6 s."),
}


@pytest.mark.thorough
def test_hosts_that_cannot_take_part_are_named_with_the_reason_and_the_others_examined(tmp_path: Path) -> None:
    cases = [f"{host}) {line} ;;" for host, (line, _) in BAD_HOSTS.items()]
    ssh = script(tmp_path / "ssh", "case $host in", *cases, 'good*) exec sh -c "$*" ;;', "esac")
    options = ("--interface", "lo", "--wait-s", "6", "--seconds", "1")
    code, text, seconds = run("good0", *BAD_HOSTS, "good1", "--ssh", ssh, *options)
    assert code == 1
    assert [message for _, message in BAD_HOSTS.values() if message not in text] == [], text
    assert "6 problems" in text
    assert "2 links in" in text
    assert seconds < 30


@pytest.mark.thorough
def test_the_real_ssh_names_an_unknown_host() -> None:
    code, text, _ = run("localhost", "no-such-host.invalid", "--interface", "lo", "--wait-s", "10")
    assert code == 1
    assert "no-such-host.invalid is an unknown host" in text
    assert "1 of 2 ranks reported: too few to measure a link." in text


@pytest.mark.thorough
def test_versions_that_differ_are_a_problem(tmp_path: Path) -> None:
    other = tmp_path / "stormtorch-9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: stormtorch\nVersion: 9.9\n")
    ssh = script(
        tmp_path / "ssh", f"[ $host = a ] || export PYTHONPATH={shlex.quote(str(tmp_path))}", 'exec sh -c "$*"'
    )
    code, text, _ = run("a", "b", "--ssh", ssh, "--interface", "lo", "--seconds", "1")
    assert code == 1
    assert f"Versions of stormtorch differ: {__version__} on" in text and "9.9 on" in text


@pytest.mark.thorough
def test_ranks_end_soon_after_their_director_is_killed(tmp_path: Path) -> None:
    ssh = script(tmp_path / "ssh", f"echo $$ >> {tmp_path}/pids", "exec $*")
    options = ("--ssh", ssh, "--interface", "lo", "--seconds", "60")
    director = subprocess.Popen([*DOCTOR, "a", "b", *options], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert director.stderr is not None
    while "round 1" not in director.stderr.readline():
        assert director.poll() is None
    director.kill()
    director.communicate(timeout=10)
    ranks = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(ranks) == 2
    give_up_at = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/cmdline").exists() for pid in ranks):
        assert time.monotonic() < give_up_at, "a rank outlives its director"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("one",), "must be 2 to 64, got 1: a link needs two ends"),
        (("a", "a"), "must name each host once, got a twice"),
        (("a", "b", "--ssh", "/no/such/ssh"), "cannot be run: No such file or directory: /no/such/ssh"),
        (("a", "b", "--seconds", "0"), "must lie in [1, 3600], got 0"),
        (("a", "b", "--port", "70000"), "must lie in [0, 65535], got 70000"),
        (("a", "b", "--capture", "/no/such/folder/x"), "there is no folder /no/such/folder"),
        (("--capture", "x.json"), "needs two hosts or more"),
        (("--params-m", "25"), "needs two hosts or more"),
        (("a", "b", "--params-m", "-1"), "must lie in"),
    ],
)
def test_a_wrong_input_is_one_message_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    code, text = call("doctor", *arguments)
    assert code == 2
    assert message in text


def launched(rank: int, world: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.thorough
def test_a_world_of_one_rank_is_told_so() -> None:
    code, text, _ = run(variables=launched(0, 1, 29500))
    assert code in (0, 1)
    assert "A world of 1 rank has no links: only this machine is checked." in text


@pytest.mark.thorough
def test_a_store_that_nobody_keeps_is_named() -> None:
    port = free_port()
    code, text, _ = run("--wait-s", "2", variables=launched(1, 2, port))
    assert code == 1
    assert f"rank 1: cannot reach the store at 127.0.0.1:{port}" in text


@pytest.mark.slow
def test_a_launched_rank_that_does_not_come_is_named() -> None:
    port = free_port()
    code, text, _ = run("--wait-s", "3", variables=launched(0, 2, port), within_s=60)
    assert code == 1
    assert "Rank 1 did not report within 3 s." in text


@pytest.mark.slow
def test_torchrun_examines_its_ranks() -> None:
    done = subprocess.run(
        [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "stormtorch", "doctor", "--seconds", "2"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**ENVIRONMENT, "STORM_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("All 2 links among 2 ranks are fine") == 1
