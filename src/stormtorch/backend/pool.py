"""Threads that nobody else needs."""

import queue
import threading
from collections.abc import Callable


class _Pool:
    """As many threads as there are tasks at once: a task may wait for a later one."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def run(self, task: Callable[[], None]) -> None:
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                threading.Thread(target=self._work, name="storm-futures", daemon=True).start()
        self._tasks.put(task)

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            task()
            del task  # it holds tensors
            with self._lock:
                self._idle += 1


_pool = _Pool()


def run_soon(task: Callable[[], None]) -> None:
    """Runs a task on a thread that nobody else needs."""
    _pool.run(task)
