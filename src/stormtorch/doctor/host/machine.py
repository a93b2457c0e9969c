"""Checks of this machine: kernel, socket buffers, offloads, clock, cores, memory, versions; the lab adds its own."""

import contextlib
import ctypes
import os
import platform
import resource
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

from stormtorch.doctor.diagnosis import Diagnosis, Level
from stormtorch.doctor.host.interfaces import check_interfaces
from stormtorch.doctor.sockets import REQUESTED_BUFFER_BYTES, UDP_GRO, UDP_SEGMENT, granted, set_buffers
from stormtorch.doctor.verdict import LEAST_BUFFER_BYTES
from stormtorch.doctor.worker import cuda_version, versions
from stormtorch.telemetry.text import size_text

_OLDEST_KERNEL = (5, 0)
"""First kernel with both UDP_SEGMENT and UDP_GRO."""
_LEAST_MEMORY = 1 << 30
_TIME_ERROR = 5  # of adjtimex: the clock is not synchronised
_SEGMENT_BYTES, _SEGMENTS = 1000, 8


def examine_machine() -> list[Diagnosis]:
    """Runs all checks."""
    checks: tuple[Callable[[], Iterator[Diagnosis]], ...] = (
        _check_kernel,
        _check_buffers,
        _check_drops,
        _check_offloads,
        check_interfaces,
        _check_clock,
        _check_cores,
        _check_memory,
        _check_locked_memory,
        _check_versions,
        *(entry.load() for entry in entry_points(group="stormtorch.doctor")),
    )
    return [diagnosis for check in checks for diagnosis in check()]


def _check_kernel() -> Iterator[Diagnosis]:
    release = platform.release()
    digits = release.replace("-", ".").split(".")
    with contextlib.suppress(ValueError, IndexError):
        if (int(digits[0]), int(digits[1])) < _OLDEST_KERNEL:
            yield Diagnosis(
                subject="kernel",
                level=Level.NOTE,
                text=f"Linux {release} is older than 5.0 and sends datagrams one by one.",
                remedy="Upgrade the kernel: it then needs less processor time per byte.",
            )
            return
    yield Diagnosis(subject="kernel", level=Level.OK, text=f"Linux {release}, {platform.machine()}")


def _check_buffers() -> Iterator[Diagnosis]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        set_buffers(trial, REQUESTED_BUFFER_BYTES, REQUESTED_BUFFER_BYTES)
        buffers = granted(trial)
    for subject, name, got in (
        ("receive buffer", "rmem_max", buffers.receive),
        ("send buffer", "wmem_max", buffers.send),
    ):
        limit = _number(f"/proc/sys/net/core/{name}")
        limits = "" if limit is None else f" (net.core.{name} is {limit:,})"
        if got >= REQUESTED_BUFFER_BYTES:
            passed = limit is not None and limit < REQUESTED_BUFFER_BYTES
            why = f"; this user may exceed net.core.{name}, which is {limit:,}" if passed else limits
            yield Diagnosis(
                subject=subject, level=Level.OK, text=f"{size_text(got)}, all that the engine requests{why}"
            )
            continue
        # Only the receive buffer must be large: it holds what several peers send at once.
        tiny = name == "rmem_max" and got < LEAST_BUFFER_BYTES
        yield Diagnosis(
            subject=subject,
            level=Level.PROBLEM if tiny else Level.NOTE,
            text=f"{size_text(got)}, where the engine requests {size_text(REQUESTED_BUFFER_BYTES)}{limits}"
            + (": peers that send at once overflow it" if name == "rmem_max" else ""),
            remedy=f"sysctl -w net.core.{name}={REQUESTED_BUFFER_BYTES}",
        )


def _check_drops() -> Iterator[Diagnosis]:
    counters = _udp_counters()
    errors, received = counters.get("RcvbufErrors", 0), counters.get("InDatagrams", 0)
    if errors > 0.001 * max(received, 1) and errors > 100:
        yield Diagnosis(
            subject="overflow",
            level=Level.NOTE,
            text=f"{errors:,} datagrams of any program were dropped at a full buffer since boot, {received:,} arrived",
            remedy=f"sysctl -w net.core.rmem_max={REQUESTED_BUFFER_BYTES}",
        )
    else:
        yield Diagnosis(
            subject="overflow",
            level=Level.OK,
            text=f"{errors:,} datagrams dropped since boot, {received:,} arrived",
        )


def _check_offloads() -> Iterator[Diagnosis]:
    for subject, saves, works in (
        ("UDP GSO", "sending", _gso_works()),
        ("UDP GRO", "receiving", _gro_works()),
    ):
        yield Diagnosis(
            subject=subject,
            level=Level.OK if works else Level.NOTE,
            text="works (tested on loopback)"
            if works
            else f"does not work: {saves} needs one system call per datagram",
            remedy="" if works else "Use Linux 5.0 or newer, outside sandboxes that emulate the kernel.",
        )


def _gso_works() -> bool:
    return len(_bundle(coalesce=False)) == _SEGMENTS


def _gro_works() -> bool:
    return max(_bundle(coalesce=True), default=0) > _SEGMENT_BYTES


def _bundle(*, coalesce: bool) -> list[int]:
    """Sends a GSO bundle on loopback and returns the sizes of what arrives."""
    sizes: list[int] = []
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(0.2)
        if coalesce:
            receiver.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
        segment = [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", _SEGMENT_BYTES))]
        sender.sendmsg([bytes(_SEGMENT_BYTES * _SEGMENTS)], segment, 0, receiver.getsockname())
        while sum(sizes) < _SEGMENT_BYTES * _SEGMENTS:
            sizes.append(len(receiver.recv(65536)))
    return sizes


def _check_clock() -> Iterator[Diagnosis]:
    state = -1
    with contextlib.suppress(OSError, AttributeError):
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    if state == _TIME_ERROR:
        yield Diagnosis(
            subject="clock",
            level=Level.NOTE,
            text="not synchronised: timestamps of logs from several machines cannot be compared",
            remedy="timedatectl set-ntp true",
        )
    else:
        known = "synchronised" if state >= 0 else "the kernel does not report whether it is synchronised"
        yield Diagnosis(subject="clock", level=Level.OK, text=known)


def _check_cores() -> Iterator[Diagnosis]:
    usable, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = _cpu_quota()
    text = f"{usable} usable" + (f" of {all_cores}" if usable != all_cores else "")
    if quota is not None and quota < usable:
        yield Diagnosis(
            subject="cores",
            level=Level.PROBLEM if quota < 1 else Level.NOTE,
            text=f"{text}, but the cgroup allows {quota:.2g} cores of time: a throttled process pauses, and its peers "
            "wait",
            remedy="Raise the container's limit (docker --cpus, Kubernetes resources.limits.cpu), or remove it.",
        )
    elif usable < 2:
        yield Diagnosis(
            subject="cores",
            level=Level.NOTE,
            text=f"{text}: the engine's thread and the training share one core",
            remedy="Give the process two cores or more.",
        )
    else:
        yield Diagnosis(subject="cores", level=Level.OK, text=f"{text}, no cgroup limit")


def _cpu_quota() -> float | None:
    """Cores that the cgroup allows; None without a limit."""
    for folder in _cgroup_folders():
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                return int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        first = Path("/sys/fs/cgroup/cpu")
        quota_us = int((first / "cpu.cfs_quota_us").read_text())
        if quota_us > 0:
            return quota_us / int((first / "cpu.cfs_period_us").read_text())
    return None


def _cgroup_folders() -> list[Path]:
    """Folders of this process's cgroup and of its parents."""
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                own = root / line[3:].lstrip("/")
                return [each for each in (own, *own.parents) if each.is_relative_to(root)]
    return [root]


def _check_memory() -> Iterator[Diagnosis]:
    free = _meminfo("MemAvailable")
    total = _meminfo("MemTotal")
    limit = None
    for folder in _cgroup_folders():
        with contextlib.suppress(OSError, ValueError):
            limit = min(int((folder / "memory.max").read_text()), limit or sys.maxsize)
    text = f"{size_text(free)} free of {size_text(total)}"
    if limit is not None and limit < total:
        text += f", cgroup limit {size_text(limit)}"
    low = min(free, limit or free) < _LEAST_MEMORY
    yield Diagnosis(
        subject="memory",
        level=Level.NOTE if low else Level.OK,
        text=text,
        remedy="Free some memory: torch alone needs about 1 GB per process." if low else "",
    )


def _check_locked_memory() -> Iterator[Diagnosis]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Diagnosis(subject="locked memory", level=Level.OK, text="no limit")
        return
    yield Diagnosis(
        subject="locked memory",
        level=Level.OK if cuda_version() is None else Level.NOTE,
        text=f"at most {size_text(soft)}" + ("" if cuda_version() is None else ", which pinned memory may exceed"),
        remedy="" if cuda_version() is None else "ulimit -l unlimited",
    )


def _check_versions() -> Iterator[Diagnosis]:
    found = versions()
    cuda = cuda_version()
    text = f"stormtorch {found['stormtorch']}, torch {found['torch']}, Python {found['python']}"
    text += f", CUDA {cuda}" if cuda else ", torch without CUDA"
    if found["torch"] == "none":
        yield Diagnosis(
            subject="versions",
            level=Level.PROBLEM,
            text=f"torch is missing ({text})",
            remedy="pip install 'torch>=2.11,<2.14'",
        )
    else:
        yield Diagnosis(subject="versions", level=Level.OK, text=text)


def _udp_counters() -> dict[str, int]:
    with contextlib.suppress(OSError, ValueError):
        rows = [
            line.split()[1:] for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Udp: ")
        ]
        return dict(zip(rows[0], map(int, rows[1]), strict=True))
    return {}


def _meminfo(name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def _number(path: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(Path(path).read_text())
    return None
