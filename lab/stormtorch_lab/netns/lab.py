"""The lab: virtual hosts on one switch, with the requested loss, rate, delay and cuts between them.

with Lab(hosts=4, rate="400mbit", loss=0.1) as lab:
    lab.run(["python", "train.py"])          # torchrun's variables are set on every host
    print(lab.measured().loss)
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from stormtorch.checks import BadCondition
from stormtorch.network.loss import Trace
from stormtorch_lab.netns.access import (
    WITHOUT_LAB,
    Access,
    LabError,
    LabUnavailable,
    NotForThisUser,
    allowed_tcp,
    checked_tcp,
    find_access,
    has_netem,
    tool,
)
from stormtorch_lab.netns.conditions import MOST_HOSTS, Conditions
from stormtorch_lab.netns.links.cable import CableNetwork
from stormtorch_lab.netns.links.kernel_network import (
    DEVICE,
    MANAGEMENT_DEVICE,
    KernelNetwork,
    Network,
    Wiring,
    address,
    make_bridge,
    management_address,
)
from stormtorch_lab.netns.links.nat import Router, private_address
from stormtorch_lab.netns.links.paths import FurtherPaths, check_paths
from stormtorch_lab.netns.links.relay import RelayNetwork
from stormtorch_lab.netns.measured import LinkCount, Measured
from stormtorch_lab.netns.namespaces import Holder, send_inside
from stormtorch_lab.netns.probing import probe_commands, run_probes
from stormtorch_lab.netns.registry import Registration
from stormtorch_lab.netns.running import OutputLine, run_everywhere

MASTER_PORT = 29500


class Lab:
    """Virtual hosts in network namespaces. Use it in a `with` statement, which removes everything at the end.

    Args:
        hosts: Number of hosts, 2 to 64.
        conditions: Conditions of the network between them.
        management: Whether to add a second network without loss or limits, for control traffic that should not be
            measured; MASTER_ADDR is then an address in it.
        paths: Number of paths between the hosts, 1 to 4: each host has interfaces eth0, eth1 and so on, each on
        its own switch. `set` changes all paths, `set_path` one. Counters and probes cover the first.
        probe: Whether to measure rate and round trip when the lab opens, which takes about a second.
        changes: Single conditions, as keywords: `rate="400mbit"`, `loss=0.1`.

    Raises:
        LabUnavailable: This machine cannot run a lab, or lacks a tool; the message says what to do.
        BadCondition: A condition is invalid.
    """

    def __init__(
        self,
        hosts: int,
        conditions: Conditions | None = None,
        *,
        management: bool = False,
        paths: int = 1,
        probe: bool = True,
        **changes: Any,
    ) -> None:
        if not 2 <= hosts <= MOST_HOSTS:
            raise BadCondition("hosts", f"must lie in [2, {MOST_HOSTS}], got {hosts!r}")
        self.size = hosts
        """Number of hosts."""
        self.conditions = (conditions or Conditions()).changed(**changes) if changes else conditions or Conditions()
        self.conditions.check(hosts)
        if self.conditions.tcp is not None:
            checked_tcp(self.conditions.tcp)
        self.paths = check_paths(paths, self.conditions)
        """Number of paths between the hosts."""
        self._further: FurtherPaths | None = None
        self._management = management
        self._probing = probe
        if 0 in self.conditions.nat and not management:
            raise BadCondition("nat", "must leave out host 0, which all others must reach, or needs management=True")
        self._holders: list[Holder] = []
        self._routers: dict[int, Router] = {}
        self._stopped: list[subprocess.Popen[Any]] = []
        self._lock = threading.RLock()
        self._pipe: tuple[int, int] | None = None
        self._network: Network | None = None
        self._registration: Registration | None = None
        self._probed: dict[str, list[float]] = {}
        self._baseline = Measured(links=[], lines=[])

    def __enter__(self) -> "Lab":
        try:
            self._open(find_access())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, access: Access) -> None:
        self.access = access
        self._registration = Registration()
        self._pipe = os.pipe()  # only holders inherit it: they get one end
        switch = Holder(access, self._pipe[0])
        self._holders.append(switch)
        for _ in range(self.size):
            self._holders.append(Holder(access, self._pipe[0], inside=switch))
        hosts = self.holders
        for host, kind in self.conditions.nat.items():
            self._routers[host] = Router(Holder(access, self._pipe[0], inside=switch), host, kind)
        self._registration.record([holder.pid for holder in self._all_holders()])
        self._name_hosts(self._registration.folder / "hosts")
        # The probe measures rate and round trip, so the network has no loss until it is done.
        at_first = self.conditions.unhindered() if self._probing else self.conditions
        self._network = self._kind_of_network()(switch, [self._edge(host) for host in range(self.size)], at_first)
        if self.paths > 1:
            self._further = FurtherPaths(self.paths - 1, switch, hosts, self.conditions)
        if self._management:
            make_bridge(switch, hosts, "br1", MANAGEMENT_DEVICE, management_address, port="m")
        if self.conditions.tcp is not None:
            self._set_tcp(self.conditions.tcp)
        if self._probing:
            self._probe()
            self._network.apply(self.conditions)
        for host, router in self._routers.items():
            router.join(hosts[host])
        self.reset()
        self._registration.serve(self._handle_request)

    def _kind_of_network(self) -> type[CableNetwork | KernelNetwork | RelayNetwork]:
        if self.conditions.cable is not None:
            return CableNetwork
        if self.conditions.timed:  # nft counts packets and cannot time a burst
            return RelayNetwork
        uniform = not self.conditions.delays
        return KernelNetwork if not self.conditions.delayed or (uniform and has_netem()) else RelayNetwork

    def close(self) -> None:
        """Kills all processes on the hosts and removes the network. Idempotent."""
        if self._registration is not None:
            self._registration.close()
            self._registration = None
        with contextlib.suppress(LabError):
            if self._network is not None:
                self._network.close()
        self._network = self._further = None
        for holder in reversed(self._all_holders()):
            holder.end()
        self._holders.clear()
        self._routers.clear()
        # The nsenter processes stop with their commands, and would not notice that those have ended.
        for process in self._stopped:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
        self._stopped.clear()
        if self._pipe is not None:
            for end in self._pipe:
                os.close(end)
            self._pipe = None

    def _name_hosts(self, table: Path) -> None:
        """Writes host names h0 and so on into an /etc/hosts: many programs look up their own name."""
        # Also name addresses as IPv6 sockets see them: torch looks up its peers' names, and warns if there are none.
        names = [f"{address(host)} h{host}\n::ffff:{address(host)} h{host}.lab" for host in range(self.size)]
        if self._management:
            own = [management_address(host) for host in range(self.size)]
            names += [f"{each} m{host}\n::ffff:{each} m{host}.lab" for host, each in enumerate(own)]
        table.write_text("\n".join(["127.0.0.1 localhost", *names, ""]), encoding="utf-8")
        table.chmod(0o644)
        for host, holder in enumerate(self.holders):
            # `hostname` and not /proc/sys/kernel/hostname: in a user namespace, that file belongs to the real root.
            script = f"{tool('hostname')} h{host} && {tool('mount')} --bind {shlex.quote(str(table))} /etc/hosts"
            holder.run(["sh", "-c", script], processes=True)

    # --- properties ---------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the lab for `stormtorch lab set --lab`."""
        assert self._registration is not None, "the lab is not open"
        return self._registration.name

    @property
    def kind(self) -> str:
        """Kind of the network: its parts, such as "bridge, tbf, nft"."""
        return self._opened().kind

    @property
    def holders(self) -> list[Holder]:
        """Holders of the hosts' namespaces, without the switch's."""
        return self._holders[1:]

    def _all_holders(self) -> list[Holder]:
        return [*self._holders, *(router.holder for router in self._routers.values())]

    def _edge(self, host: int) -> Holder:
        """Holder of a host's namespaces in the network under test: of the host itself, or of its router."""
        return self._routers[host].holder if host in self._routers else self.holders[host]

    def address(self, host: int) -> str:
        """Address of a host in the network under test, to which its ranks bind."""
        return private_address(host) if host in self._routers else address(host)

    def rebind(self, host: int) -> None:
        """Clears the NAT table of a host's router: the host's datagrams then come from other ports."""
        if host not in self._routers:
            raise BadCondition(
                "rebind", f"must be a host behind a router, got {host!r}; hosts behind routers: {[*self._routers]}"
            )
        self._routers[host].rebind()

    def management_address(self, host: int) -> str:
        """Address of a host in the management network."""
        return management_address(host)

    def _opened(self) -> Network:
        if self._network is None:
            raise LabError("the lab is not open: use it in a with statement")
        return self._network

    # --- commands on hosts, conditions and counters -------------------------------------------------------------------

    def command(self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None) -> list[str]:
        """Command line that runs `argv` on a host, in the current directory."""
        self._opened()
        return self._command(self.holders[host], argv, env)

    def _command(self, holder: Holder, argv: Sequence[str], env: Mapping[str, str] | None = None) -> list[str]:
        settings = [f"{name}={value}" for name, value in (env or {}).items()]
        # nsenter stays as the parent of the command. It must ignore Ctrl-C, which only the command shall receive.
        before = [tool("env"), "--ignore-signal=INT", "--ignore-signal=TERM"]
        after = [tool("env"), "--default-signal=INT", "--default-signal=TERM", f"--chdir={os.getcwd()}"]
        return [*before, *holder.enter(processes=True), *after, *settings, *argv]

    def start(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **popen: Any
    ) -> "subprocess.Popen[Any]":
        """Starts a command on a host, in a process group of its own; `popen` are further arguments of Popen."""
        popen.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.Popen(self.command(host, argv, env), start_new_session=True, **popen)

    def signal(self, process: "subprocess.Popen[Any]", number: int) -> None:
        """Sends a signal to a command that `start` has started. A signal to `process` itself would reach nsenter,
        not the command. Does nothing if the command has ended.
        """
        if number == signal.SIGSTOP:
            self._stopped.append(process)
        send_inside(process.pid, number)

    def python(self, host: int, folder: Path) -> Path:
        """Writes a script into `folder` that runs this Python on a host, for programs that take an executable."""
        path = folder / f"python-{host}"
        argv = [*self.holders[host].enter(processes=True), tool("env"), f"--chdir={os.getcwd()}", sys.executable]
        path.write_text(f'#!/bin/sh\nexec {shlex.join(argv)} "$@"\n', encoding="utf-8")
        path.chmod(0o700)
        return path

    def run(
        self,
        argv: Sequence[str],
        *,
        per_node: int = 1,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        write: Callable[[OutputLine], None] | None = None,
    ) -> list[int]:
        """Runs a command on all hosts, with torchrun's variables, and returns the exit statuses by rank.

        A rank that fails does not end the others, as on real hosts. A status above 128 means that a signal ended the
        rank; 124 means that the timeout did.

        Args:
            argv: Command to run.
            per_node: Ranks on each host.
            env: Further environment variables.
            timeout_s: Time after which all ranks are ended.
            write: Called with every line of output; by default, lines go to the standard output with their host.
        """
        commands = [
            self.command(host, argv, {**self.environment(host, local, per_node), **(env or {})})
            for host in range(self.size)
            for local in range(per_node)
        ]
        return run_everywhere(commands, per_node=per_node, timeout_s=timeout_s, write=write)

    def environment(self, host: int, local: int = 0, per_node: int = 1) -> dict[str, str]:
        """Environment of a rank: the variables that torchrun sets, those that it reads, and the interface to use."""
        rank, world = host * per_node + local, self.size * per_node
        master = management_address(0) if self._management else address(0)
        values = {
            "RANK": rank,
            "LOCAL_RANK": local,
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": per_node,
            "GROUP_RANK": host,
            "NODE_RANK": host,
            "MASTER_ADDR": master,
            "MASTER_PORT": MASTER_PORT,
            # Defaults of torchrun's options, for a command that is torchrun itself: each rank is then one of its nodes.
            "PET_NNODES": world,
            "PET_NODE_RANK": rank,
            "PET_MASTER_ADDR": master,
            "PET_MASTER_PORT": MASTER_PORT,
            # Without these, gloo and NCCL look up the address of this machine's name, which no host has.
            "GLOO_SOCKET_IFNAME": DEVICE,
            "NCCL_SOCKET_IFNAME": DEVICE,
            "TP_SOCKET_IFNAME": DEVICE,
            # One thread, as torchrun sets it: many ranks share the cores.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONUNBUFFERED": "1",
        }
        # The network under test, even if the rendezvous is in the management network.
        if self.paths > 1:
            values["STORM_INTERFACES"] = ",".join(Wiring(path).device for path in range(self.paths))
        else:
            values["STORM_SOCKET_IFNAME"] = DEVICE
        return {name: str(value) for name, value in values.items()}

    def set(self, **changes: Any) -> Conditions:
        """Changes single conditions while commands run: `lab.set(loss=0.3)`, `lab.set(cut={2})`, and for single links
        `lab.set(cut_links=between({0, 1}, {2, 3}))`.
        """
        with self._lock:
            conditions = self.conditions.changed(**changes)
            conditions.check(self.size)
            network = self._opened()
            if conditions.cable != self.conditions.cable:
                raise BadCondition("cable", "cannot change while a lab runs: it needs another kind of network")
            if conditions.nat != self.conditions.nat:
                raise BadCondition("nat", "cannot change while a lab runs; `rebind` changes the ports of a host")
            if conditions.delayed and isinstance(network, KernelNetwork) and (conditions.delays or not has_netem()):
                raise BadCondition(
                    "delay", "can change only in a lab that started with a delay: it needs another kind of network"
                )
            if conditions.timed and isinstance(network, KernelNetwork):
                raise BadCondition(
                    "burst", "can become a time only in a lab that started with one: it needs another kind of network"
                )
            if conditions.low_share is not None and not isinstance(network, KernelNetwork):
                raise BadCondition(
                    "low_share", "needs a lab that started without a delay: it needs another kind of network"
                )
            if conditions.tcp is not None and conditions.tcp != self.conditions.tcp:
                self._set_tcp(checked_tcp(conditions.tcp))
            if self._further is not None:
                self._further.change_all(**changes)
            network.apply(conditions)
            self.conditions = conditions
            return conditions

    def set_path(self, path: int, **changes: Any) -> Conditions:
        """Changes single conditions of one path while commands run: `lab.set_path(1, cut={0, 1})`."""
        with self._lock:
            if self._further is None:
                raise BadCondition("path", "needs a lab with several paths")
            if path != 0:
                return self._further.change(path, **changes)
            conditions = self.conditions.changed(**changes)
            conditions.check(self.size)
            check_paths(self.paths, conditions)
            self._opened().apply(conditions)
            self.conditions = conditions
            return conditions

    def path_links(self, path: int) -> list[LinkCount]:
        """Packets of every link of a path since the lab opened."""
        with self._lock:
            return self._opened().links() if path == 0 or self._further is None else self._further.links(path)

    def _conditions_of(self, path: int | None) -> Conditions:
        if path is None or path == 0 or self._further is None:
            return self.conditions
        return self._further.conditions_of(path)

    def measured(self) -> Measured:
        """Counters of the network since `reset`, or since the lab opened."""
        with self._lock:
            return self._total().since(self._baseline)

    def reset(self) -> None:
        """Sets all counters to zero."""
        with self._lock:
            self._baseline = self._total()

    def _total(self) -> Measured:
        network = self._opened()
        return Measured(
            links=network.links(),
            lines=network.lines(),
            rates_bits=self._probed.get("rates_bits", []),
            round_trips_s=self._probed.get("round_trips_s", []),
        )

    def _set_tcp(self, name: str) -> None:
        with allowed_tcp(name):
            for holder in self.holders:
                setting = f"echo {shlex.quote(name)} > /proc/sys/net/ipv4/tcp_congestion_control"
                try:
                    holder.run(["sh", "-c", setting])
                except LabError as error:
                    raise NotForThisUser(
                        f"tcp {name} is not allowed: this machine's net.ipv4.tcp_allowed_congestion_control must list "
                        "it, and only root may change that"
                    ) from error

    def _probe(self) -> None:
        bits = [self.conditions.line(host).up_bits or 0.0 for host in range(self.size)]
        commands = [
            self._command(self._edge(host), argv) for host, argv in enumerate(probe_commands(bits, time.monotonic()))
        ]
        self._probed = run_probes(commands)

    def _handle_request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers the requests of `stormtorch lab set` and `lab show`."""
        changes, path = dict(request.get("set", {})), request.get("path")
        conditions = self._conditions_of(path)
        if "trace" in changes:
            changes["loss"] = Trace(bits=changes.pop("trace"))
        if "cut" in changes or "join" in changes:
            changes["cut"] = (conditions.cut | set(changes.get("cut", ()))) - set(changes.pop("join", ()))
        if "cut_links" in changes or "join_links" in changes:
            cut, join = ({(a, b) for a, b in changes.pop(name, ())} for name in ("cut_links", "join_links"))
            changes["cut_links"] = (conditions.cut_links | cut) - join
        for host in changes.pop("rebind", ()):
            self.rebind(host)
        if changes and path is not None:
            conditions = self.set_path(path, **changes)
        elif changes:
            conditions = self.set(**changes)
        return {
            "hosts": self.size,
            "kind": self.kind,
            "requested": conditions.to_json(),
            "measured": self.measured().to_json(),
            "host": socket.gethostname(),
        }


def try_lab(hosts: int = 2, conditions: Conditions | None = None) -> Access:
    """Checks that this machine can run a lab, by opening and closing one; takes a fifth of a second.

    Args:
        hosts: Number of hosts.
        conditions: Conditions of the network between them.

    Returns:
        The kind of access to namespaces.

    Raises:
        LabUnavailable: This machine cannot run such a lab.
    """
    try:
        with Lab(hosts, conditions, probe=False) as lab:
            return lab.access
    except LabUnavailable:
        raise
    except (LabError, OSError, subprocess.SubprocessError) as error:
        raise LabUnavailable(f"this machine cannot run a lab: {error}. {WITHOUT_LAB}") from None
