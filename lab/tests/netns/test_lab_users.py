"""Labs of unprivileged users."""

import ctypes
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stormtorch_lab.netns.access import LabUnavailable, find_access
from stormtorch_lab.netns.fixtures import lab_or_skip
from stormtorch_lab.netns.lab import Lab, try_lab

pytestmark = pytest.mark.lab
_USER = 54_321
_PR_SET_DUMPABLE = 4


def _become(user: int, home: str) -> None:
    """Switches this process to another user, permanently."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    # The kernel hides the /proc files of a process that has changed its user; of one that a shell starts it does not.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    find_access.cache_clear()
    os.environ.update(HOME=home, XDG_RUNTIME_DIR=home)
    os.chdir(home)


def as_another_user(do: Callable[[], Any]) -> Any:
    """Calls a function in a process of an ordinary user, who has no rights on this one's files, and returns the result.

    The process is forked: this Python may lie where another user cannot read.
    """
    if os.getuid() != 0:
        return do()
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(False)
    with tempfile.TemporaryDirectory() as home:
        os.chown(home, _USER, _USER)

        def work() -> None:
            try:
                _become(_USER, home)
                there.send(do())
            except BaseException as error:
                there.send(error)

        process = context.Process(target=work)
        process.start()
        there.close()
        found = here.recv()
        process.join(10)
    if isinstance(found, BaseException):
        raise found
    return found


@pytest.fixture(autouse=True)
def _possible() -> None:
    lab_or_skip()
    words = ["unshare", "--user", "--map-root-user", "--net", "true"]
    if as_another_user(lambda: subprocess.run(words, capture_output=True).returncode) != 0:
        pytest.skip("this kernel lets only root make user namespaces")


@pytest.mark.thorough
def test_an_ordinary_user_has_named_hosts_whose_network_loses() -> None:
    def use() -> Any:
        sent, port = 2000, 9999
        lines: list[str] = []
        with Lab(3, loss=0.1, probe=False) as lab:
            statuses = lab.run(["sh", "-c", "hostname; id -u"], write=lambda line: lines.append(line.text))
            # Sent in the shell: another user may not be able to read this Python.
            script = f"for i in $(seq {sent}); do echo x > /dev/udp/{lab.address(1)}/{port}; done"
            lab.run(["bash", "-c", f"[ $RANK = 0 ] || exit 0; {script}"], timeout_s=60)
            counts = {(each.source, each.target): each for each in lab.measured().links}
            lab.set(loss=0.5)  # the largest trace
            return statuses, lines, counts[0, 1].seen, counts[0, 1].lost

    statuses, lines, seen, lost = as_another_user(use)
    assert statuses == [0, 0, 0]
    assert sorted(lines) == ["0", "0", "0", "h0", "h1", "h2"]
    assert seen >= 2000
    assert 0.07 < lost / seen < 0.13


def test_a_trial_names_what_a_lab_cannot_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A step that fails after the hosts exist, such as setting the host name without root.
    fails = tmp_path / "hostname"
    fails.write_text("#!/bin/sh\necho 'hostname: you must be root' >&2; exit 1\n")
    fails.chmod(0o755)
    monkeypatch.setattr("stormtorch_lab.netns.access._PATH", f"{tmp_path}:{os.environ['PATH']}:/usr/sbin:/sbin")
    with pytest.raises(LabUnavailable, match="you must be root") as caught:
        try_lab()
    assert "stormtorch.faults(" in str(caught.value)
