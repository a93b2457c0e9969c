"""The lab's network in a process: a native relay, for delays where the kernel has no netem, and for timed bursts.

`stormtorch-relay` (engine/relay/relay_main.cpp) owns a TUN device in each host and carries every packet from one host
to another: through the sender's uplink, the link's loss and delay, and the receiver's downlink. It reads commands, one
per line, from a pipe, and ends when the pipe closes.
"""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stormtorch.network.loss import Trace
from stormtorch_lab.netns.access import LabError, LabUnavailable, NotForThisUser, tool
from stormtorch_lab.netns.conditions import Conditions
from stormtorch_lab.netns.links.kernel_network import DEVICE, address, set_up
from stormtorch_lab.netns.measured import AccessLinkCount, LinkCount
from stormtorch_lab.netns.namespaces import Holder

_TUN = "/dev/net/tun"
# Packets that the kernel queues while the relay waits for a processor.
_QUEUE_PACKETS = 4096


class RelayNetwork:
    """Hosts joined by the relay."""

    kind = "TUN relay"

    def __init__(self, switch: Holder, hosts: Sequence[Holder], conditions: Conditions) -> None:
        if not Path(_TUN).exists():
            raise LabUnavailable(f"{_need(conditions)} {_TUN}: modprobe tun, or mknod {_TUN} c 10 200")
        if not os.access(_TUN, os.R_OK | os.W_OK):
            raise NotForThisUser(f"{_need(conditions)} {_TUN}, which this user cannot open: chmod a+rw {_TUN}, as root")
        self._hosts = len(hosts)
        self._lock = threading.Lock()
        self._before: dict[str, str] = {}
        self._process = subprocess.Popen(
            [*switch.enter(), _executable(conditions)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            for index, holder in enumerate(hosts):
                self._send_command(f"host {index} {holder.network} {DEVICE} {address(index)}")
                commands = [*set_up(DEVICE, address(index)), f"link set {DEVICE} txqueuelen {_QUEUE_PACKETS}"]
                holder.run([tool("ip"), "-batch", "-"], "\n".join(commands))
            self.apply(conditions)
        except BaseException:
            self.close()
            raise

    def apply(self, conditions: Conditions) -> None:
        """Gives the network these conditions from now on."""
        for index in range(self._hosts):
            line = conditions.line(index)
            for direction, bits in (("up", line.up_bits), ("down", line.down_bits)):
                self._set(f"rate {index} {direction}", f"{bits or 0:.0f}")
                self._set(f"queue {index} {direction}", f"{line.queue_bytes}")
            self._set(f"cut {index}", f"{int(index in conditions.cut)}")
            self._set(f"mtu {index}", f"{line.mtu or 0}")
        for source in range(self._hosts):
            for target in range(self._hosts):
                if source != target:
                    self._apply_link(conditions, source, target)

    def _apply_link(self, conditions: Conditions, source: int, target: int) -> None:
        self._set(f"cut {source} {target}", f"{int((source, target) in conditions.cut_links)}")
        model = conditions.model(source, target)
        faults = model.link_faults()
        bits = "".join("01"[bit] for bit in model.bits) if isinstance(model, Trace) else "-"
        if bits != "-":
            start = random.Random(f"{conditions.seed} {source} {target}").randrange(len(bits))
            bits = bits[start:] + bits[:start]
        self._set(f"trace {source} {target}", bits)
        delay_us = 1e6 * conditions.link_delay_s(source, target)
        self._set(
            f"link {source} {target}",
            f"loss {faults.loss!r} burst {faults.burst!r} burst_us {1e6 * faults.burst_s:.3f} delay_us {delay_us:.0f} "
            f"jitter_us {1e6 * conditions.jitter_s:.0f} seed {conditions.seed}",
        )

    def links(self) -> list[LinkCount]:
        """Packets of every link since the network was made."""
        return [
            LinkCount(row["from"], row["to"], row["seen"], row["lost"], row["bursts"]) for row in self._stats()["links"]
        ]

    def lines(self) -> list[AccessLinkCount]:
        """Packets of every line between a host and the switch since the network was made."""
        return [
            AccessLinkCount(row["host"], direction, row[direction]["packets"], row[direction]["overflowed"])
            for row in self._stats()["hosts"]
            for direction in ("up", "down")
        ]

    def close(self) -> None:
        """Ends the relay."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):  # the relay may have died before reading everything
            self._process.stdin.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _stats(self) -> Any:
        return json.loads(self._send_command("stats"))

    def _set(self, what: str, value: str) -> None:
        """Sends a setting only if it changed: setting a link again would restart its loss trace."""
        if self._before.get(what) != value:
            self._send_command(f"{what} {value}")
            self._before[what] = value

    def _send_command(self, command: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            try:
                self._process.stdin.write(command + "\n")
                self._process.stdin.flush()
                answer = self._process.stdout.readline()
            except (BrokenPipeError, ValueError):
                answer = ""
        if not answer:
            raise LabError(f"the relay has ended with status {self._process.poll()}")
        kind, _, rest = answer.strip().partition(" ")
        if kind == "error":
            raise LabError(f"the relay rejects {command[:80]!r}: {rest}")
        return answer


def _need(conditions: Conditions) -> str:
    """Reason why a relay is needed."""
    return "burst by time needs" if conditions.timed else "delay, as this kernel has no netem, needs"


def _executable(conditions: Conditions) -> str:
    name = "stormtorch-relay"
    path = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if path is None:
        raise LabUnavailable(
            f"{_need(conditions)} {name}, which is part of stormtorch's installation: pip install stormtorch"
        )
    return path
