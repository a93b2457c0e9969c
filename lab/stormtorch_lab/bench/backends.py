"""Backends of the all-reduce benchmark: stormtorch, gloo, MPI and a copy, each with its own connections."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch

from stormtorch.checks import BadSetting, check_subset
from stormtorch.collectives import Group, Pending, all_reduce
from stormtorch.collectives.all_reduce import all_reduce as flat_all_reduce
from stormtorch.exchange.options import Options
from stormtorch.exchange.reliability import EXACT, LOSSY, Reliability
from stormtorch.joining.rendezvous import connect
from stormtorch_lab.bench.tcp import opened_by
from stormtorch_lab.jobs.control import CallTimeout
from stormtorch_lab.jobs.counters import Delivery
from stormtorch_lab.jobs.gloo import GlooGroup, gloo_group
from stormtorch_lab.jobs.mpi import check_mpi
from stormtorch_lab.jobs.ranks import Member
from stormtorch_lab.netns.conditions import Conditions

BACKENDS = ("storm", "storm-lossy", "gloo")
"""Backends that can be chosen."""

MPI = "mpi"
"""Backend on one host, where Open MPI and mpi4py are installed: mpirun then starts all ranks."""

FLAT = "storm-flat"
"""Backend in a lab: storm without its hierarchy on hosts with several ranks."""

ONE_LANE = "storm-one-lane"
"""Backend anywhere: storm with a single lane, where it would choose several by cores and link rate."""

BY_TCP = ("gloo-bbr", "gloo-cubic")
"""Further backends in a lab, where TCP has real loss: "gloo-" and the name of a congestion control."""

LAB_DEFAULT = ("storm", "storm-lossy", "gloo-bbr", "gloo-cubic")
"""Backends that a lab compares by default."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Number formats that all backends can sum."""

# Size of the kernel's buffer for a stream; it fits into a core's cache.
_IN_FLIGHT_BYTES = 1 << 20


# Groups with an aborted call. Freeing one could wait minutes for that call; they end with the process.
_ABORTED: list[GlooGroup] = []


class Backend(Protocol):
    """Backend that can all-reduce."""

    name: str
    exact: bool
    """Whether its results are exact under packet loss."""
    limit_s: float | None
    """A call over TCP that takes longer raises `CallTimeout`; other calls always end by themselves."""

    def all_reduce(self, tensor: torch.Tensor) -> Delivery:
        """Sums `tensor` over the ranks, in place, and returns when this rank is done."""
        ...

    def close(self) -> None:
        """Frees everything."""
        ...


class Storm:
    """stormtorch over UDP, with its own transport, so that its counters count nothing else."""

    def __init__(self, name: str, member: Member, options: Options, reliability: Reliability) -> None:
        self.name = name
        self.exact = reliability.exact
        self.limit_s: float | None = None
        self.transport = connect(member.store, member.rank, member.world, options, prefix=name)
        self.group = Group(self.transport)
        self._reliability = reliability
        self._begin: Callable[..., Pending] = flat_all_reduce if name == FLAT else all_reduce

    def all_reduce(self, tensor: torch.Tensor) -> Delivery:
        """Sums `tensor` over the ranks, in place, and returns when this rank is done."""
        return Delivery.of(self._begin(self.group, tensor, reliability=self._reliability).wait())

    def close(self) -> None:
        """Frees everything."""
        self.transport.close()


class Gloo:
    """torch's gloo over TCP, called directly: without the few microseconds that torch.distributed adds in Python."""

    exact = True

    def __init__(self, name: str, member: Member) -> None:
        self.name = name
        self.limit_s: float | None = None
        self._group, self.connections = opened_by(lambda: _after_barrier(gloo_group(member, name)), chosen_tcp(name))

    def all_reduce(self, tensor: torch.Tensor) -> Delivery:
        """Sums `tensor` over the ranks, in place, and returns when this rank is done."""
        begin = time.monotonic()
        work = self._group.allreduce([tensor])
        if self.limit_s is None:
            work.wait()
            return Delivery()
        try:
            work.wait(timedelta(seconds=self.limit_s))
        except RuntimeError as error:
            if time.monotonic() - begin < self.limit_s:
                raise  # a failure of another kind
            _ABORTED.append(self._group)
            raise CallTimeout(f"{self.name} did not end within {self.limit_s:g} s: raise --patience-s") from error
        return Delivery()

    def close(self) -> None:
        """Closes its connections: an aborted call would otherwise go on and disturb others."""
        self.connections.abort()


class Mpi:
    """MPI_Allreduce of the MPI that mpirun has started this process with, on the tensor's own memory."""

    name = MPI
    exact = True

    def __init__(self) -> None:
        import mpi4py

        mpi4py.rc.thread_level = "single"  # the cheapest level
        from mpi4py import MPI as mpi

        self.limit_s: float | None = None
        self._in_place = mpi.IN_PLACE
        self._all_reduce = mpi.COMM_WORLD.Allreduce

    def all_reduce(self, tensor: torch.Tensor) -> Delivery:
        """Sums `tensor` over the ranks, in place, and returns when this rank is done."""
        self._all_reduce(self._in_place, tensor.numpy())
        return Delivery()

    def close(self) -> None:
        """Does nothing: MPI shuts down with the process, on all ranks together."""


class Copies:
    """A memory copy of as many bytes as an all-reduce moves: the ideal with which backends are compared.

    Each rank copies 2(n-1)/n of the tensor, as much as it has to send, into a buffer as small as the kernel's and out
    of it again. There are no sums, no headers, no system calls, and no waiting for other ranks.
    """

    name = "copies"
    exact = False
    MEANING = (
        "measured in the same rounds: all ranks at once copy 2(n-1)/n x bytes, the data that each must send, into a "
        "1 MiB buffer and out again, the least that the kernel must do; slowest rank, median. "
        "No sums, no system calls."
    )

    def __init__(self, world: int) -> None:
        self.limit_s: float | None = None
        self._share = 2 * (world - 1) / world
        self._buffer = torch.empty(_IN_FLIGHT_BYTES, dtype=torch.uint8)

    def all_reduce(self, tensor: torch.Tensor) -> Delivery:
        """Copies as many bytes of `tensor` as an all-reduce has to move, without changing its values."""
        raw = tensor.view(torch.uint8)
        left = round(raw.numel() * self._share)
        while left > 0:
            for first in range(0, min(left, raw.numel()), _IN_FLIGHT_BYTES):
                piece = raw[first : first + min(_IN_FLIGHT_BYTES, left)]
                buffer = self._buffer[: piece.numel()]
                buffer.copy_(piece)
                piece.copy_(buffer)
                left -= piece.numel()
        return Delivery()

    def close(self) -> None:
        """Frees everything."""


def chosen_tcp(name: str) -> str | None:
    """Congestion control in a backend's name; None leaves the system's."""
    return name.removeprefix("gloo").removeprefix("-") or None


def congestion_controls(names: Sequence[str]) -> tuple[str, ...]:
    """Congestion controls in the names of these backends."""
    return tuple(name.removeprefix("gloo-") for name in names if name in BY_TCP)


def check_backends(
    names: Sequence[str],
    network: Conditions | None,
    known: Sequence[str] = BACKENDS,
    further: Sequence[str] = (),
    here: Sequence[str] = (),
) -> None:
    """Raises `BadSetting` unless all of these backends can be compared there.

    Args:
        names: Chosen backends.
        network: Conditions of a lab; None is loopback, where the congestion control is fixed.
        known: Names that loopback has.
        further: Names that a lab has in addition, beside those by TCP's congestion control.
        here: Names that loopback has in addition.
    """
    check_subset("backends", names, (*known, *here, *BY_TCP, *further))
    for name in names:
        if network is None and name not in (*known, *here):
            raise BadSetting("backends", f"has {name} only in a lab; here it must be one of {', '.join(known)}")
        if network is not None and name in here:
            raise BadSetting("backends", f"has {name} only on one host: mpirun does not reach the hosts of a lab")
    if MPI in names:
        check_mpi()


def open_backends(names: Sequence[str], member: Member, datagram_bytes: int | None = None) -> list[Backend]:
    """Connects the backends of those names, of `BACKENDS`, `BY_TCP` and further ones; all ranks call this together."""
    return [_open_backend(name, member, datagram_bytes) for name in names]


def _open_backend(name: str, member: Member, datagram_bytes: int | None) -> Backend:
    if name.startswith("gloo"):
        return Gloo(name, member)
    if name == MPI:
        return Mpi()
    options = Options(interface=member.interface, datagram_bytes=datagram_bytes, lanes=1 if name == ONE_LANE else None)
    return Storm(name, member, options, LOSSY if name == "storm-lossy" else EXACT)


def _after_barrier(group: GlooGroup) -> GlooGroup:
    group.barrier().wait()  # by now, all ranks are connected
    return group
