"""The end of a process: after an exception, it tells the others at once why; otherwise it waits for ranks that need it.

Python waits for all threads before a process ends. Until then, the engine's thread would answer for a rank that no
longer trains, and the other ranks would wait for it until `timeout_s`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from types import TracebackType
from typing import Any

# Longest time that a failing process waits until the others have heard of it.
_LINGER_S = 0.5
_MOST_LETTERS = 300

_transports: weakref.WeakSet[Any] = weakref.WeakSet()
_installed_in = -1


def say_goodbye_on_error(transport: Any) -> None:
    """Has the transport closed first if an exception ends this process.

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
    atexit.register(_part)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        before(kind, error, traceback)
        # A forked child must not speak for its parent; at an interactive prompt, the process goes on.
        if os.getpid() == _installed_in and not _at_a_prompt():
            leave(f"{kind.__name__}: {error}")

    sys.excepthook = hook


def _at_a_prompt() -> bool:
    """Whether commands are typed in this process, now or after the script has ended, as with `python -i`."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _part() -> None:
    """Parts from the other ranks when a program ends without closing its transports."""
    if os.getpid() == _installed_in:
        for transport in list(_transports):
            with contextlib.suppress(Exception):  # the program has ended, and its exit status must not change
                transport.part()


def leave(why: str) -> None:
    """Closes all transports given to `say_goodbye_on_error`, and writes the reason into the store for other ranks."""
    for transport in list(_transports):
        if not transport.closed:
            with contextlib.suppress(Exception):  # the process already ends with another error
                transport.store.set(_key(transport, transport.rank), why[:_MOST_LETTERS])
            with contextlib.suppress(Exception):
                transport.close(_LINGER_S)


def why_left(transport: Any, rank: int) -> str:
    """Reason that a rank gave when it left; empty if it gave none."""
    with contextlib.suppress(RuntimeError):  # the store may be gone as well
        if transport.store.check([_key(transport, rank)]):
            return str(transport.store.get(_key(transport, rank)).decode())
    return ""


def _key(transport: Any, rank: int) -> str:
    # The incarnation is part of the key: a process that takes the rank's place has not left.
    return f"{transport.prefix}/left/{rank}/{transport.incarnation(rank)}"
