"""Processes that compute runs at the same time, each on one core, and end with the command that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait

import torch


def pool(processes: int, *, runs_each: int | None = None) -> ProcessPoolExecutor:
    """Starts processes that are used as a context manager.

    Args:
        processes: Their number.
        runs_each: Runs after which another process takes the place of one, so that peaks of memory are those of a run.
    """
    return ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        max_tasks_per_child=runs_each,
    )


def _begin() -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when the command is gone: if it was killed, nobody wants the hour that a run may still take."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
