"""Environment of a measurement, recorded with every result: machine, versions, commit, steal time."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def surroundings() -> dict[str, Any]:
    """Machine, kernel, versions, commit and date, ready for JSON."""
    return {
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "cores_usable": len(os.sched_getaffinity(0)),
            "architecture": platform.machine(),
            "kernel": platform.release(),
            "gpu": _gpu(),
            "load_before": os.getloadavg()[0],
        },
        "tcp_congestion_control": _first_line("/proc/sys/net/ipv4/tcp_congestion_control"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "stormtorch": version("stormtorch"),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "commit": commit(),
    }


def _gpu() -> str | None:
    """Name of the GPU, if this process uses one: otherwise the query itself would allocate memory on it."""
    cuda: Any = torch.cuda  # torch's type stubs are incomplete
    return str(cuda.get_device_name()) if cuda.is_initialized() else None


class StealTime:
    """Measures, from construction on, the processor time that a hypervisor withheld from this machine (steal)."""

    def __init__(self, stat: str = "/proc/stat") -> None:
        self._stat = stat
        self._before = _processor_times(stat)

    def share(self) -> float | None:
        """Fraction of the time that this machine asked for; None if the kernel does not report it."""
        now = _processor_times(self._stat)
        if self._before is None or now is None:
            return None
        withheld, wanted = (after - before for before, after in zip(self._before, now, strict=True))
        return max(withheld, 0) / wanted if wanted > 0 else 0.0


def _processor_times(stat: str) -> tuple[int, int] | None:
    """Ticks of all processors so far: withheld ones, and all that were not idle."""
    line = _first_line(stat)
    if line is None:
        return None
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = map(int, line.split()[1:9])
    return stolen, user + nice + system + interrupts + soft_interrupts + stolen


def cpu_model() -> str:
    """Name of the processor, or its architecture if the kernel does not report it (as on many ARM machines)."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit(here: Path = Path(__file__).parents[1]) -> str | None:
    """Commit of the source tree this runs from, with "+changes" if code differs from it; None outside of git."""
    head = _git(here, "rev-parse", "--short=12", "HEAD")
    # If installed inside another project's tree, that project's commit would be reported.
    if not head or not _git(here, "ls-files", "--", "*.py"):
        return None
    # Results and documentation do not change what is computed.
    code = [":/", *(f":(top,exclude,glob)**/*.{kind}" for kind in ("json", "png", "md"))]
    return head + ("+changes" if _git(here, "status", "--porcelain", "--untracked-files=no", "--", *code) else "")


def _git(where: Path, *command: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(where), *command], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip().partition("\n")[0]
    except OSError:
        return None
