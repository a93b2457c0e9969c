"""Graceful shutdown and goodbye: how a rank leaves, by an exception, by `leave()` or SIGTERM, or at the program's end.

After an exception it notifies the peers at once. On `leave()` or SIGTERM it first transfers the state that it owns. At
the program's end it waits until no other rank needs it. Without a goodbye, the engine's thread would keep answering for
a rank that no longer trains, because Python joins all threads before it exits, and peers would wait until `timeout_s`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.util
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_log = logging.getLogger("stormtorch")

# Longest time that a failing process waits for the peers to acknowledge its goodbye.
_LINGER_S = 0.5
_MOST_LETTERS = 300

# Exit status of a process ended by SIGTERM, as shells report it.
_TERMINATED = 128 + signal.SIGTERM

_transports: weakref.WeakSet[Any] = weakref.WeakSet()
_installed_in = -1
_leaving: weakref.WeakSet[Any] = weakref.WeakSet()
_listens_in = -1
_before: Any = signal.SIG_DFL


def say_goodbye_on_error(transport: Any) -> None:
    """Closes the transport, with a goodbye, if an exception ends this process.

    Args:
        transport: A transport over UDP; others end with their process anyway.
    """
    global _installed_in
    if not hasattr(transport, "store"):
        return
    _transports.add(transport)
    if _installed_in == os.getpid():
        return
    _installed_in = os.getpid()
    atexit.register(_drain_at_exit)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        before(kind, error, traceback)
        # A forked child must not leave on behalf of its parent; at an interactive prompt, the process goes on.
        if os.getpid() == _installed_in and not _at_a_prompt():
            say_goodbye(f"{kind.__name__}: {error}")

    sys.excepthook = hook
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, _end_of_child, exitpriority=0)


def _end_of_child() -> None:
    """Says goodbye when an exception ends a multiprocessing child, which does not call sys.excepthook."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        error = error.__context__ if error.code else None  # torch.multiprocessing exits where it has caught one
    if error is not None and os.getpid() == _installed_in:
        say_goodbye(f"{type(error).__name__}: {error}")


def _at_a_prompt() -> bool:
    """Whether commands are typed in this process, now or after the script has ended, as with `python -i`."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _drain_at_exit() -> None:
    """Drains the transports of a program that ends without closing them."""
    if os.getpid() == _installed_in:
        for transport in list(_transports):
            with contextlib.suppress(Exception):  # the program has ended, and its exit status must not change
                transport.drain()


def leave() -> None:
    """Leaves the job: transfers the shards that this process owns to the other ranks, and closes its transports.

    The other ranks go on in a view without this rank. Call it between two steps of the training. It covers the
    transports of `prepare` and `join`.
    """
    for transport in [*_transports]:
        if transport.closed or transport.inherited:
            continue
        _request_leave(transport)
        transfer_all(transport)


def install_sigterm(transport: Any) -> None:
    """Makes this process leave the job on SIGTERM, as spot instances receive it.

    The peers are notified at once. At its next wait, the training transfers its state and ends the process by
    SystemExit; after `leave_s` the process ends in any case. The program's own handler is called too. Only the main
    thread can install a handler: elsewhere this function does nothing.

    Args:
        transport: A transport over UDP; others are ignored.
    """
    global _listens_in, _before
    if not hasattr(transport, "on_leave") or threading.current_thread() is not threading.main_thread():
        return
    _transports.add(transport)
    _leaving.add(transport)
    if _listens_in == os.getpid() and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        return
    if _listens_in == -1:
        os.register_at_fork(after_in_child=_forget_in_child)
    _listens_in = os.getpid()
    _before = signal.signal(signal.SIGTERM, _on_sigterm)


def add_leave_handler(transport: Any, hand_over: Callable[[], None]) -> None:
    """Registers a method, held weakly, to be called before a rank leaves.

    Args:
        transport: A transport over UDP; others are ignored.
        hand_over: Method that returns once the state is transferred.
    """
    if hasattr(transport, "on_leave"):
        found = weakref.WeakMethod(hand_over)
        transport.on_leave.append(lambda: (method := found()) is not None and method())


def transfer_all(transport: Any) -> None:
    """Transfers the state that a process owns, and closes its transport."""
    try:
        for hand_over in list(transport.on_leave):
            hand_over()
    finally:
        transport.close()


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    here = [each for each in _leaving if not each.closed and not each.inherited]
    if not here:  # no job to leave: restore the earlier handler and raise the signal again
        _restore()
        os.kill(os.getpid(), number)
        return
    grace_s = min(each.options.leave_s for each in here)
    if not all(each.leaving for each in here):
        _log.warning("SIGTERM: leaving the job; the process ends within %g s (leave_s)", grace_s)
        timer = threading.Timer(grace_s, _end)
        timer.daemon = True
        timer.start()
    for transport in here:
        _request_leave(transport, at_once=transport.resting())
    if callable(_before):
        _before(number, frame)


def _request_leave(transport: Any, *, at_once: bool = True) -> None:
    """Notifies the peers that this rank leaves: at once, or at the next round boundary where it can transfer state."""
    transport.leaving = True
    transport.leaves_later = not at_once
    if not at_once:
        return
    with contextlib.suppress(RuntimeError):  # closed meanwhile
        transport.endpoint.request_leave()


def _end() -> None:
    """Ends this process although its training has not transferred its state."""
    _log.warning("leave_s is over: the process ends without having transferred its state")
    say_goodbye("SIGTERM")
    os._exit(_TERMINATED)


def _restore() -> None:
    with contextlib.suppress(ValueError, TypeError):  # not the main thread; a handler that is not Python's
        signal.signal(signal.SIGTERM, _before)


def _forget_in_child() -> None:
    """Restores the earlier handler in a forked process: it is not in the job, so SIGTERM must end it."""
    if _listens_in != os.getpid() and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        _restore()


def say_goodbye(why: str) -> None:
    """Closes all transports given to `say_goodbye_on_error`, and writes the reason into the store for the peers."""
    for transport in list(_transports):
        if not transport.closed:
            with contextlib.suppress(Exception):  # the process already ends with another error
                transport.store.set(_key(transport, transport.rank), why[:_MOST_LETTERS])
            transport.why = why
            with contextlib.suppress(Exception):
                transport.close(_LINGER_S)


def why_left(transport: Any, rank: int) -> str:
    """Reason that a rank gave when it left; empty if it gave none."""
    with contextlib.suppress(RuntimeError):  # the store may be gone as well
        if transport.store.check([_key(transport, rank)]):
            return str(transport.store.get(_key(transport, rank)).decode())
    return ""


def _key(transport: Any, rank: int) -> str:
    # The incarnation is part of the key: the next process of this rank has not left.
    return f"{transport.prefix}/left/{rank}/{transport.incarnation(rank)}"
