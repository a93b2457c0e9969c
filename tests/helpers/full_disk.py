"""Disks that are full: files that may not grow, and a small file system that only this process sees."""

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

_NEW_MOUNTS, _PRIVATE = 0x20000, (1 << 18) | (1 << 14)


@contextlib.contextmanager
def files_up_to(most_bytes: int) -> Iterator[None]:
    """Within this context, no file of this process gets larger: the kernel writes a part, and then refuses."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def may_mount() -> bool:
    """Whether this process may mount private file systems."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/tmp"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def mount_small(place: Path, most_bytes: int) -> None:
    """Mounts an empty file system of a few bytes, visible only to this process, which ends with it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(what: int) -> None:
        if what != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    call(libc.unshare(_NEW_MOUNTS))
    call(libc.mount(b"none", b"/", None, _PRIVATE, None))
    call(libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, f"size={most_bytes}".encode()))


def fill(place: Path) -> Path:
    """Fills the remaining space there, and returns the file to delete."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler
