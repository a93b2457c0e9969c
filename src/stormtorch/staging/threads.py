"""Threads that nobody else needs."""

import atexit
import os
import queue
import threading
from collections.abc import Callable

# How long the end of the process waits for tasks. One that has its result needs a moment; one that waits for a rank
# that does not answer is not worth more.
_LAST_MOMENT_S = 1.0


class _Pool:
    """As many threads as there are tasks at once: a task may wait for a later one."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Without threads and tasks."""
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._idle = 0
        self._busy = 0

    def run(self, task: Callable[[], None]) -> None:
        with self._lock:
            self._busy += 1
            if self._idle > 0:
                self._idle -= 1
            else:
                threading.Thread(target=self._work, name="storm-futures", daemon=True).start()
        self._tasks.put(task)

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            try:
                task()
            finally:
                del task  # it holds tensors
                with self._lock:
                    self._busy -= 1
                    self._lock.notify_all()
            with self._lock:
                self._idle += 1

    def settle(self) -> None:
        """Lets tasks end before the interpreter does: a daemon thread that it stops in the midst of C++ aborts."""
        with self._lock:
            self._lock.wait_for(lambda: self._busy == 0, _LAST_MOMENT_S)


_pool = _Pool()
atexit.register(_pool.settle)
# A child has the counts, but not the threads.
os.register_at_fork(after_in_child=_pool.reset)


def run_soon(task: Callable[[], None]) -> None:
    """Runs a task on a thread that nobody else needs."""
    _pool.run(task)
