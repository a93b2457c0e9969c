"""Creates process groups (communicators). All groups of a job share one transport, with its sockets and threads."""
# mypy: disable-error-code="attr-defined"

import dataclasses
import math
import os
import threading
from typing import Any, Literal

from torch.distributed.distributed_c10d import Store, _DistributedBackendOptions

from stormtorch.backend.process_group import StormProcessGroup
from stormtorch.collectives import Group
from stormtorch.exchange.keys import VARIABLE as KEY_VARIABLE
from stormtorch.exchange.options import Options
from stormtorch.exchange.reliability import Priority
from stormtorch.joining.rendezvous import connect
from stormtorch.udp.store_rendezvous import StoreRendezvous
from stormtorch.udp.udp import UdpTransport

INTERFACE_VARIABLE = "STORM_SOCKET_IFNAME"
"""Environment variable with the interface or address to use if the options name none, like GLOO_SOCKET_IFNAME."""

INTERFACES_VARIABLE = "STORM_INTERFACES"
"""Environment variable with several interfaces or addresses to use together, separated by commas."""

PRIORITY_VARIABLE = "STORM_PRIORITY"
"""Environment variable with the priority of jobs that give no options: normal, low or both."""

REJOIN_VARIABLE = "STORM_REJOIN"
"""Environment variable: "auto" or "1" sets `rejoin` of groups whose options do not."""


class SharedTransport:
    """Transport shared by several groups; the last group to leave closes it.

    Args:
        transport: The transport that they share.
        timeout_limit_s: Longest time for a collective, from the options; torch's own timeouts may only be shorter.
    """

    def __init__(self, transport: UdpTransport, timeout_limit_s: float) -> None:
        self.transport = transport
        self.timeout_limit_s = timeout_limit_s
        self._users = 0
        self._lock = threading.Lock()

    def enter(self) -> None:
        """Adds a group."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Drops one group; the last one sends a goodbye and closes the transport."""
        if self.transport.inherited:
            # Close this forked copy without a goodbye. Take no lock: a thread of the parent may have held it.
            self._close(None)
            return
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self.transport.drain()
            self._close(None)

    def abort(self) -> None:
        """Closes the transport and ends all operations on it, without waiting for peers, which may be dead."""
        self._close(0.0)

    def _close(self, linger_s: float | None) -> None:
        global _job
        if _job is self:
            _job = None
        self.transport.close(linger_s)


_job: SharedTransport | None = None


def create(how: _DistributedBackendOptions, options: Any) -> StormProcessGroup:
    """Creates a process group for torch.distributed.

    Args:
        how: Store, rank, size, timeout and name, from torch.
        options: The caller's `pg_options`: a `stormtorch.Options`, or None.
    """
    global _job
    members = list(how.global_ranks_in_group)
    shared = _job
    priority = _priority_alone(options, shared)
    own_options = options is not None and priority is None
    if shared is None or not members or own_options or max(members) >= shared.transport.world:
        # The first group, or one with its own options, gets a new transport, whose ranks are the group's.
        transport = _connect(how.store, how.group_rank, how.group_size, options, how.timeout.total_seconds())
        shared = SharedTransport(transport, math.inf if options is None else options.timeout_s)
        if not members:
            _job = shared  # later groups name their members by ranks of this one
            transport.name = how.group_id  # late joiners make the group of all ranks by this name
        members = list(range(how.group_size))
    group = Group(shared.transport, members, name=how.group_id, priority=priority)
    return StormProcessGroup(
        group, how.store, how.timeout, shared.timeout_limit_s, shared.enter, shared.leave, shared.abort
    )


def _priority_alone(options: Any, shared: SharedTransport | None) -> Priority | None:
    """Returns the priority in a group's options, if they set nothing else and the job has both priorities."""
    if shared is None or not isinstance(options, Options) or not shared.transport.options.has_low_lane:
        return None
    if options.priority == "both" or dataclasses.replace(options, priority="normal") != Options():
        return None
    return options.priority


def _connect(store: Store, rank: int, size: int, options: Any, timeout_s: float) -> UdpTransport:
    rejoin = _rejoin(options)
    if rejoin == "auto":
        prefix = "storm/auto"  # `connect` numbers the generations itself
    elif rejoin:
        prefix = f"storm/{_generation_of_others(store, rank, size)}"
    else:
        # A store may outlive a group, as torchrun's does: do not read what an earlier group has left there.
        prefix = f"storm/{store.add(f'generation/{rank}', 1)}"
    with StoreRendezvous(store, prefix, rank, size, timeout_s).publish_failure():
        options = _checked(options, timeout_s)
    return connect(store, rank, size, options, prefix=prefix)


def _checked(options: Any, timeout_s: float) -> Options:
    options = _default(timeout_s) if options is None else options
    if not isinstance(options, Options):
        raise TypeError(f"pg_options must be a stormtorch.Options, got {type(options).__name__}")
    key = os.environ.get(KEY_VARIABLE)
    with_interfaces = options if options.interface or options.interfaces else _with_interfaces(options)
    return dataclasses.replace(
        with_interfaces,
        key=key.encode() if key and options.key is None else options.key,
        rejoin=_rejoin(options),
        timeout_s=min(options.timeout_s, timeout_s),
    )


def _default(timeout_s: float) -> Options:
    requested: Any = os.environ.get(PRIORITY_VARIABLE) or "normal"
    if requested not in ("normal", "low", "both"):
        raise ValueError(f"{PRIORITY_VARIABLE} must be normal, low or both, got {requested!r}")
    return Options(timeout_s=timeout_s, priority=requested)


def _rejoin(options: Any) -> bool | Literal["auto"]:
    if isinstance(options, Options) and options.rejoin:
        return options.rejoin
    requested = os.environ.get(REJOIN_VARIABLE, "")
    if requested not in ("", "0", "1", "auto"):
        raise ValueError(f"{REJOIN_VARIABLE} must be auto, 1 or 0, got {requested!r}")
    return "auto" if requested == "auto" else requested == "1"


def _generation_of_others(store: Store, rank: int, size: int) -> int:
    """Returns the job's generation. This rank's own count may be too high: a process may have died after counting."""
    counters = [f"generation/{peer}" for peer in range(size) if peer != rank]
    generation = max((int(store.get(each)) for each in counters if store.check([each])), default=0)
    if generation == 0:
        raise ValueError(f"rank {rank}: there is no job to rejoin in this store: is it the store that the others use?")
    return generation


def _with_interfaces(options: Options) -> Options:
    one, several = os.environ.get(INTERFACE_VARIABLE), os.environ.get(INTERFACES_VARIABLE)
    if one and several:
        raise ValueError(f"set either {INTERFACE_VARIABLE} or {INTERFACES_VARIABLE}, got {one!r} and {several!r}")
    if not several:
        return dataclasses.replace(options, interface=one)
    try:
        return dataclasses.replace(options, interfaces=tuple(each.strip() for each in several.split(",")))
    except ValueError as error:
        raise ValueError(f"{INTERFACES_VARIABLE}: {error}") from error
