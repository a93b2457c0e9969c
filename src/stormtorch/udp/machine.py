"""Which machine a process runs on, as far as other processes can tell."""

import functools
import hashlib
import os
from pathlib import Path


@functools.cache
def machine_id() -> str:
    """Identifies this machine since it was started, the process's network namespace and its user.

    Processes with the same identity can share memory. A container or a virtual host of the lab has a network of its
    own, so it counts as another machine: what passes between them is meant to pass through that network.
    Empty where the kernel does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net")
    except OSError:
        return ""
    text = f"{boot} {namespace.st_dev} {namespace.st_ino} {os.getuid()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
