"""Background threads for tasks that may block, such as completing a future."""

import atexit
import os
import queue
import threading
from collections.abc import Callable

# How long the process waits for tasks at exit: long enough for a task that has its result, and short enough for one
# that waits for a silent rank.
_EXIT_WAIT_S = 1.0


class _Pool:
    """Thread pool that grows to one thread per running task, because a task may wait for a later one."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all threads and tasks."""
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
                del task  # release the tensors that it holds
                with self._lock:
                    self._busy -= 1
                    self._lock.notify_all()
            with self._lock:
                self._idle += 1

    def settle(self) -> None:
        """Waits a moment for tasks at exit: the process aborts if Python stops a daemon thread while it runs C++."""
        with self._lock:
            self._lock.wait_for(lambda: self._busy == 0, _EXIT_WAIT_S)


_pool = _Pool()
atexit.register(_pool.settle)
# A forked child inherits the counts but not the threads.
os.register_at_fork(after_in_child=_pool.reset)


def run_soon(task: Callable[[], None]) -> None:
    """Runs a task on a background thread. The task may block."""
    _pool.run(task)
