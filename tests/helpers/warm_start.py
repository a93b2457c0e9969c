"""Starts the processes of a test by forking one that has imported torch, instead of importing it in each of them.

A spawned process spends a second or two of CPU time on imports before its test begins, and most tests take less. Here
Python's own fork server imports once and is forked for every process. Each still has its own memory, sockets and
threads, and the environment, directory and signal mask of its parent, as a spawned one has. It lacks a fresh
interpreter only: tests of that start a command or a script. Ranks on hosts of a lab are spawned as ever.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import context, popen_forkserver, popen_spawn_posix, spawn
from typing import Any

# What ranks import. The server is forked while it has one thread, so none of these may start another.
PRELOADED = ["torch.distributed", "torch._dynamo", "stormtorch.runtime.prepare", "stormtorch.backend", "pytest"]


def _begin(target: Callable[..., Any], environment: dict[str, str], folder: str, held: set[int], args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
    target(*args)


class _WarmProcess(context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        # A host of a lab is entered by an executable of its own.
        if os.fsdecode(spawn.get_executable()) != sys.executable:
            return popen_spawn_posix.Popen(process_obj)
        held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        target, args = process_obj._target, process_obj._args
        process_obj._args = (target, dict(os.environ), os.getcwd(), held, args)
        process_obj._target = _begin
        return popen_forkserver.Popen(process_obj)


class _WarmContext(context.SpawnContext):
    Process = _WarmProcess


def use() -> None:
    """Makes every process that this one spawns from now on a warm one."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    context._concrete_contexts["spawn"] = _WarmContext()  # type: ignore[attr-defined]  # typeshed does not know it
