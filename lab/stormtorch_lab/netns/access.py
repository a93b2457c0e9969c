"""Access to namespaces: whether this machine can run a lab, as root or in a user namespace.

Both ways run the same commands. As root, they act on namespaces that no other process sees. Without root, the lab first
makes a user namespace, in which this user is root for the namespaces made inside.
"""

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stormtorch.checks import CommandFailed

_PACKAGES = {"unshare": "util-linux", "nsenter": "util-linux", "env": "coreutils", "cat": "coreutils"}
_PACKAGES |= {"mount": "util-linux", "hostname": "hostname"}
_PACKAGES |= {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "ethtool": "ethtool"}
# Debian keeps administrators' tools in folders that are not in an ordinary user's PATH.
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
WITHOUT_LAB = (
    "Without a lab, `with stormtorch.faults(loss=0.1):` drops datagrams of stormtorch's own transports on loopback, "
    "and `stormtorch bench allreduce --faults 0.1` measures with it."
)


class LabError(CommandFailed):
    """A failure in the lab."""


class LabUnavailable(LabError):
    """This machine cannot run a lab; the message says what is missing and what to do."""


class NotForThisUser(LabUnavailable):
    """Root could make this lab here, and this user cannot; the message says what root may allow."""


@dataclass(frozen=True)
class Access:
    """How this machine makes and enters namespaces: as root, or in a user namespace."""

    user_namespace: bool
    """Whether a user namespace stands in for root."""

    @property
    def name(self) -> str:
        """Name for messages."""
        return "user namespace" if self.user_namespace else "root"

    def unshare(self) -> list[str]:
        """Command prefix that makes the lab's first namespace."""
        return [tool("unshare"), "--user", "--map-root-user"] if self.user_namespace else [tool("unshare")]

    def enter(self, pid: int, *namespaces: str) -> list[str]:
        """Command prefix that enters namespaces ("net", "pid", "mount") of another process."""
        command = [tool("nsenter"), f"--target={pid}", *(f"--{name}" for name in namespaces)]
        if self.user_namespace:
            command += ["--user", "--preserve-credentials"]
        return [*command, "--"]


def tool(name: str) -> str:
    """Path of a command that the lab needs."""
    path = shutil.which(name, path=_PATH)
    if path is None:
        raise LabUnavailable(_missing([name]))
    return path


@functools.cache
def find_access() -> Access:
    """Finds the kind of access that works on this machine.

    Raises:
        LabUnavailable: None works, or tools are missing.
    """
    if missing := [name for name in _PACKAGES if shutil.which(name, path=_PATH) is None]:
        raise LabUnavailable(_missing(missing))
    problems = []
    for access in (Access(user_namespace=False), Access(user_namespace=True)):
        # Try all that a lab needs from the kernel, in a namespace that ends with the command.
        trial = "ip link add t0 type veth peer name t1 && nft add table bridge t"
        command = [*access.unshare(), "--net", "--pid", "--fork", "--mount-proc", "sh", "-c", trial]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | {"PATH": _PATH}, timeout=30
        )
        if done.returncode == 0:
            return access
        problems.append(f"by {access.name} ({(done.stderr.strip().splitlines() or ['no reason given'])[-1]})")
    raise LabUnavailable(
        "a lab needs root, or a kernel that lets users make user namespaces "
        "(sysctl kernel.unprivileged_userns_clone=1 on Debian, kernel.apparmor_restrict_unprivileged_userns=0 on "
        f"Ubuntu, --privileged in a container). It failed {' and '.join(problems)}. {WITHOUT_LAB}"
    )


@functools.cache
def has_netem() -> bool:
    """Whether the kernel has netem, which delays packets."""
    trial = "ip link set lo up && tc qdisc add dev lo root netem delay 1ms"
    command = [*find_access().unshare(), "--net", "sh", "-c", trial]
    environment = os.environ | {"PATH": _PATH}
    return subprocess.run(command, capture_output=True, check=False, env=environment, timeout=30).returncode == 0


def available_tcp() -> tuple[str, ...]:
    """TCP congestion controls of this kernel."""
    return tuple(Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split())


def checked_tcp(name: str) -> str:
    """Returns `name` if the kernel has that congestion control; raises LabUnavailable otherwise."""
    known = available_tcp()
    if name not in known:
        raise LabUnavailable(f"this kernel has no TCP congestion control {name!r}; it has {', '.join(known)}")
    return name


@contextlib.contextmanager
def allowed_tcp(name: str) -> Iterator[None]:
    """Allows namespaces a congestion control within the block: by default, the kernel allows them only a few."""
    path = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    allowed = path.read_text().split()
    changed = name not in allowed and os.access(path, os.W_OK)
    with contextlib.suppress(OSError):
        if changed:
            path.write_text(" ".join([*allowed, name]))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if changed:
                path.write_text(" ".join(allowed))


def _missing(names: list[str]) -> str:
    packages = " ".join(sorted({_PACKAGES[name] for name in names}))
    return f"a lab needs {', '.join(names)}: apt-get install {packages}. {WITHOUT_LAB}"
