"""Labs for the doctor: a command that reaches their hosts as ssh does, and faults of single hosts and links."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stormtorch_lab.netns import Lab
from stormtorch_lab.netns.access import tool
from stormtorch_lab.netns.namespaces import Holder

DOCTOR = (sys.executable, "-m", "stormtorch", "doctor")


class Examined(NamedTuple):
    code: int
    text: str
    report: dict[str, Any]

    def problems(self) -> list[tuple[str, tuple[int, ...]]]:
        return [
            (each["subject"], tuple(each["ranks"])) for each in self.report["findings"] if each["level"] == "problem"
        ]


def reach(lab: Lab, folder: Path, added: dict[int, str] | None = None) -> Path:
    """A command like ssh for the lab's hosts h0 and so on; `added` are options that single hosts give their doctor."""
    cases = []
    for host in range(lab.size):
        words = [*lab.holders[host].enter(processes=True), tool("env"), f"--chdir={os.getcwd()}"]
        extra = (added or {}).get(host, "")
        cases.append(f'h{host}) exec {shlex.join(words)} sh -c "$* {extra}" ;;')
    path = folder / "reach"
    lines = ["#!/bin/sh", "host=$1; shift", "case $host in", *cases, "esac"]
    lines.append('echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255')
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o700)
    return path


def examine(ssh: Path, hosts: Sequence[str], *options: str, timeout_s: float = 100.0) -> Examined:
    """Runs `stormtorch doctor` on hosts of a lab."""
    out = ssh.with_name("doctor.json")
    out.unlink(missing_ok=True)
    done = subprocess.run(
        [*DOCTOR, *hosts, "--ssh", str(ssh), "--interface", "eth0", "--json", str(out), *options],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"},
    )
    report = json.loads(out.read_text()) if out.exists() else {}
    return Examined(done.returncode, done.stdout + done.stderr, report)


def block_udp(lab: Lab, host: int, port: int | None = None) -> None:
    """A firewall on a host that drops the UDP that comes in, all of it or that to one port."""
    rule = "meta l4proto udp drop" if port is None else f"udp dport {port} drop"
    _load(lab.holders[host], "inet wall", {"entry": ("input priority 0", rule)})


def translate(lab: Lab, host: int, seen: str) -> None:
    """A NAT before a host: others see it under another address."""
    own = lab.address(host)
    lab.holders[host].run([tool("ip"), "address", "add", f"{seen}/24", "dev", "eth0"])
    rules = {
        "leave": ("postrouting priority 0", f"ip saddr {own} ip saddr set {seen}"),
        "enter": ("prerouting priority -300", f"ip daddr {seen} ip daddr set {own}"),
    }
    _load(lab.holders[host], "ip translation", rules)


def narrow_link(lab: Lab, first: int, second: int, mtu: int) -> None:
    """A tunnel between two hosts, in which larger packets vanish."""
    a, b = lab.address(first), lab.address(second)
    rule = f"ip saddr . ip daddr {{ {a} . {b}, {b} . {a} }} ip length > {mtu} drop"
    _load(lab._holders[0], "bridge narrow", {"way": ("forward priority 10", rule)})


def slow_link(lab: Lab, first: int, second: int, rate: str) -> None:
    """A slow line of its own between two hosts, which takes the place of their way over the switch."""
    ends = ((first, second), (second, first))
    here, there = (lab.holders[host] for host, _ in ends)
    here.run([tool("ip"), "link", "add", "slow", "type", "veth", "peer", "name", "slow", "netns", str(there.pid)])
    for host, other in ends:
        holder = lab.holders[host]
        holder.run([tool("ip"), "link", "set", "slow", "up"])
        holder.run([tool("ethtool"), "-K", "slow", "gso", "off", "tso", "off", "tx-udp-segmentation", "off"])
        holder.run(
            [tool("tc"), "qdisc", "add", "dev", "slow", "root", "tbf", "rate", rate, "burst", "6000", "limit", "200000"]
        )
        way = [lab.address(other), "dev", "slow", "src", lab.address(host)]
        holder.run([tool("ip"), "route", "add", *way])


def _load(holder: Holder, table: str, chains: dict[str, tuple[str, str]]) -> None:
    """Gives a host, or the switch, a table of nft with a rule in each chain."""
    blocks = [f"chain {name} {{\ntype filter hook {hook};\n{rule}\n}}" for name, (hook, rule) in chains.items()]
    holder.run([tool("nft"), "-f", "-"], "\n".join([f"table {table} {{", *blocks, "}", ""]))
