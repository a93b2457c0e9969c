"""How a process ends: by an exception it says goodbye at once, and why; else it first waits for ranks that need it.

Python waits for all threads of a process before it ends. Until then the engine's own thread would answer for a rank
that trains no more, and the others would wait for it until `timeout_s`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from types import TracebackType
from typing import Any

# How long a dying process waits until the others have heard it.
_LINGER_S = 0.5
_MOST_LETTERS = 300

_transports: weakref.WeakSet[Any] = weakref.WeakSet()
_installed_in = -1


def say_goodbye_on_error(transport: Any) -> None:
    """From now on, an exception that ends this process closes the transport first.

    Args:
        transport: One over UDP; others end with their process anyway.
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
        # A forked child must not speak for its parent, and at a prompt the process goes on.
        if os.getpid() == _installed_in and not _at_a_prompt():
            leave(f"{kind.__name__}: {error}")

    sys.excepthook = hook


def _at_a_prompt() -> bool:
    """Whether a person types commands here, or will when the script has ended, as with `python -i`."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _part() -> None:
    """Of programs that end without closing anything."""
    if os.getpid() == _installed_in:
        for transport in list(_transports):
            with contextlib.suppress(Exception):  # the program is over, and its status is its own
                transport.part()


def leave(why: str) -> None:
    """Closes all transports of this process that are known here; the others can read why."""
    for transport in list(_transports):
        if not transport.closed:
            with contextlib.suppress(Exception):  # the process ends by another error
                transport.store.set(_key(transport, transport.rank), why[:_MOST_LETTERS])
            with contextlib.suppress(Exception):
                transport.close(_LINGER_S)


def why_left(transport: Any, rank: int) -> str:
    """What a rank has said when it left; empty if nothing."""
    with contextlib.suppress(RuntimeError):  # the store may be gone as well
        if transport.store.check([_key(transport, rank)]):
            return str(transport.store.get(_key(transport, rank)).decode())
    return ""


def _key(transport: Any, rank: int) -> str:
    # The process that takes its place has said nothing yet.
    return f"{transport.prefix}/left/{rank}/{transport.incarnation(rank)}"
