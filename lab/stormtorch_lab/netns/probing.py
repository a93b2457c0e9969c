"""Measures rates and round trips when a lab opens: runs probe.py on every host, each towards the next."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from stormtorch_lab.netns.access import LabError
from stormtorch_lab.netns.links.kernel_network import address

_PROBE_PACKETS = 10
_PROBE_S = 0.4
# At higher rates, the probe would measure the processor of its sender, not the link.
_MOST_PROBED_BITS = 2e9


def probe_commands(bits: Sequence[float], now_s: float) -> list[list[str]]:
    """Command of each host, for access links of these rates; 0 is unlimited."""
    hosts = len(bits)
    if max(bits) > _MOST_PROBED_BITS:
        bits = [0.0] * hosts
    start_at = now_s + 0.2 + 0.05 * hosts
    script = Path(__file__).with_name("probe.py")
    return [
        [
            sys.executable,
            "-ISs",
            str(script),
            address(host),
            address((host + 1) % hosts),
            *(str(value) for value in (start_at, _PROBE_PACKETS, bits[host], _PROBE_S)),
        ]
        for host in range(hosts)
    ]


def run_probes(commands: Sequence[Sequence[str]]) -> dict[str, list[float]]:
    """Runs the commands at once, and returns the rates and round trips that they found."""
    probes = [
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for command in commands
    ]
    found = []
    for host, probe in enumerate(probes):
        output, problem = probe.communicate(timeout=30)
        if probe.returncode != 0:
            raise LabError(f"the probe of host {host} failed: {problem.strip()}")
        found.append(json.loads(output))
    return {
        "rates_bits": [each["rate_bits"] for each in found if each["rate_bits"] is not None],
        "round_trips_s": [sorted(times)[len(times) // 2] for each in found if (times := each["round_trips_s"])],
    }
