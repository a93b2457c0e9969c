"""Membership thread of a transport: admits the members of each new view, and follows changes of this host's address."""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import Any

# Longest time until the thread notices that the program ends, or that its transport was collected.
_SLICE_S = 0.2

_installers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_ending = threading.Event()


def install_views(transport: Any) -> None:
    """Starts a thread that installs each new view, until the transport is closed or collected."""
    installer = threading.Thread(target=_run, args=(weakref.ref(transport),), name="keeper", daemon=True)
    _installers.add(installer)
    installer.start()


def _run(found: weakref.ref[Any]) -> None:
    number = 0
    while not _ending.is_set() and (transport := found()) is not None and not transport.closed:
        endpoint = transport.endpoint
        try:
            if transport.roaming is not None:
                transport.roaming.look(transport)
            del transport  # a reference would keep it alive
            if endpoint.wait_view(number, _SLICE_S):
                view, transport = endpoint.view(), found()
                if transport is not None and view is not None:
                    transport.install(view)
                    number = view.number
        except ValueError:
            continue  # another thread has readmitted the process meanwhile
        except RuntimeError:
            return  # closed


@atexit.register
def _end() -> None:
    """Ends all such threads: none may be inside the engine while the interpreter shuts down."""
    _ending.set()
    for installer in list(_installers):
        installer.join(5 * _SLICE_S)
