"""The command `stormtorch lab`: runs commands on virtual hosts; shows the requested and the measured network."""

import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from stormtorch.checks import BadCondition
from stormtorch.cli.console import check_file, friendly_errors, handle_termination_signals, save
from stormtorch.cli.terminal.help_layout import App
from stormtorch.cli.terminal.options import Json
from stormtorch_lab.cli.networks import typed_burst
from stormtorch_lab.cli.terminal.options import (
    Cable,
    Delay,
    Hosts,
    Jitter,
    LabBurst,
    LabLoss,
    LabName,
    LowQueue,
    LowShare,
    Nat,
    PerLink,
    Queue,
    Rate,
    Seed,
    Tcp,
    Trace,
)

if TYPE_CHECKING:
    from stormtorch_lab.netns.conditions import Conditions
    from stormtorch_lab.netns.running import OutputLine

app = App()

_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "bright_red", "bright_cyan", "bright_yellow")


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str], typer.Argument(help="Command to run on every host; put -- in front.", metavar="COMMAND")
    ],
    hosts: Hosts = 4,
    per_node: Annotated[int, typer.Option(help="Ranks on each host.")] = 1,
    rate: Rate = None,
    loss: LabLoss = None,
    burst: LabBurst = None,
    trace: Trace = None,
    delay: Delay = None,
    jitter: Jitter = None,
    queue: Queue = None,
    low_share: LowShare = None,
    low_queue: LowQueue = None,
    tcp: Tcp = None,
    cable: Cable = None,
    nat: Nat = None,
    seed: Seed = 0,
    per_link: PerLink = None,
    paths: Annotated[int, typer.Option(help="Paths between the hosts, 1 to 4: eth0, eth1 and so on on each.")] = 1,
    management: Annotated[
        bool, typer.Option("--management", help="Rendezvous over a second network without loss.")
    ] = False,
    timeout_s: Annotated[float | None, typer.Option(help="End all processes after so many seconds.")] = None,
    json: Json = None,
) -> None:
    """Run a command on virtual hosts with packet loss, rate limits and delay between them.

    Every host is a network namespace on one switch; packets cross the kernel's real network stack.
    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set as torchrun sets them; torchrun itself also finds
    the hosts, without further options.
    The exit status is the highest of all ranks. Root is not needed where the kernel allows user namespaces.

    [bold]Examples[/bold]

      stormtorch lab run --hosts 4 --rate 400mbit --loss 0.1 -- python train.py
      stormtorch lab run --rate 100mbit --delay 20ms --burst 8 --loss 0.05 -- python train.py
      stormtorch lab run --rate 100mbit --burst 5ms --loss 0.05 -- python train.py
      stormtorch lab run --hosts 2 --per-node 2 --loss 0.01 --tcp cubic -- python train.py
      stormtorch lab run --trace links.jsonl:7 -- python train.py
      stormtorch lab run --loss 0.1 --management -- torchrun train.py
      stormtorch lab run --hosts 3 --nat 1 --nat 2 -- python train.py
      stormtorch lab run --paths 2 --rate 100mbit -- python train.py
      stormtorch lab run --rate 100mbit --low-share 0.05 -- python train.py

    In another terminal, `stormtorch lab set --loss 0.3` changes the network while it runs.
    """
    with friendly_errors(command="COMMAND"), handle_termination_signals():
        from stormtorch_lab.netns.conditions import Conditions
        from stormtorch_lab.netns.lab import Lab
        from stormtorch_lab.netns.per_link import read_per_link

        changes = _changes(
            rate=rate,
            loss=loss,
            burst=burst,
            trace=trace,
            delay=delay,
            jitter=jitter,
            queue=queue,
            low_share=low_share,
            low_queue=low_queue,
        )
        conditions = Conditions(seed=seed, tcp=tcp, cable=cable, nat=_routers(nat or [])).changed(**changes)
        if shutil.which(command[0]) is None:
            script = f": for a script, write python {command[0]}" if command[0].endswith(".py") else ""
            raise BadCondition("command", f"there is no program {command[0]!r} here{script}")
        if per_link is not None:
            conditions = read_per_link(per_link, conditions, hosts)
        if not 1 <= per_node <= 64:
            raise BadCondition("per_node", f"must lie in [1, 64], got {per_node}")
        if timeout_s is not None and not timeout_s > 0:
            raise BadCondition("timeout_s", f"must be above 0, got {timeout_s:g}")
        check_file("json", json)
        console = Console(stderr=True, highlight=False)
        lab = Lab(hosts, conditions, management=management, paths=paths)
        with contextlib.ExitStack() as stack:
            with console.status(f"making {hosts} hosts and measuring their network"):
                stack.enter_context(lab)
            from stormtorch_lab.cli.tables.lab import before_text, show_after

            console.print(before_text(lab), soft_wrap=True)
            with _silence_broken(console, _writer(per_node)) as write:
                statuses = lab.run(command, per_node=per_node, timeout_s=timeout_s, write=write)
            measured = lab.measured()
        show_after(measured, statuses, console)
        save(lambda path: _write(path, conditions, measured.to_json(), statuses, command, lab), json)
    raise typer.Exit(max(statuses))


@app.command("set")
def change(
    lab: LabName = None,
    rate: Rate = None,
    loss: LabLoss = None,
    burst: LabBurst = None,
    trace: Trace = None,
    delay: Delay = None,
    jitter: Jitter = None,
    queue: Queue = None,
    low_share: LowShare = None,
    low_queue: LowQueue = None,
    mtu: Annotated[
        int | None, typer.Option(help="Drop larger IP packets, as many tunnels do: 576 to 1500 bytes.")
    ] = None,
    cut: Annotated[
        list[str] | None,
        typer.Option(
            help="Cut off a host (2), a link in both directions (0-1) or in one (0:1, from host 0 to host 1); can be "
            "given several times."
        ),
    ] = None,
    join: Annotated[
        list[str] | None, typer.Option(help="Reconnect a host or a link that was cut off, written as for --cut.")
    ] = None,
    path: Annotated[
        int | None, typer.Option(help="Change only this path of a lab with several (--paths); the first is 0.")
    ] = None,
    rebind: Annotated[
        list[int] | None,
        typer.Option(help="Clear the translation table of a host's router (--nat), so that ports change."),
    ] = None,
) -> None:
    """Change the network of a running lab; conditions that are not given stay as they are.

    [bold]Examples[/bold]

      stormtorch lab set --loss 0.3
      stormtorch lab set --rate 200mbit
      stormtorch lab set --cut 2
      stormtorch lab set --join 2
      stormtorch lab set --cut 0-1 --cut 2:3 --mtu 1200
    """
    with friendly_errors():
        from stormtorch_lab.cli.tables.lab import requested_text
        from stormtorch_lab.netns.conditions import Conditions
        from stormtorch_lab.netns.registry import send_request

        changes = _changes(
            rate=rate,
            loss=loss,
            burst=burst,
            trace=None,
            delay=delay,
            jitter=jitter,
            queue=queue,
            low_share=low_share,
            low_queue=low_queue,
            mtu=mtu,
        )
        # Wrong values are found without a lab. Only the lab knows whether jitter has its delay, and classes their rate.
        assumed = Conditions(delay=1.0) if low_share is None else Conditions(rate="1gbit")
        assumed.changed(**changes)
        if trace is not None:
            changes["trace"] = "".join("01"[bit] for bit in _read_trace(trace).bits)
        for verb, targets in (("cut", cut), ("join", join)):
            hosts, links = _hosts_and_links(verb, targets or [])
            changes |= {verb: hosts} if hosts else {}
            changes |= {f"{verb}_links": links} if links else {}
        if rebind:
            changes["rebind"] = rebind
        if not changes:
            raise BadCondition("loss", "or another condition must be given: there is nothing to change")
        reply = send_request(lab, {"set": changes, **({} if path is None else {"path": path})})
        # Without --lab this is the only running lab, perhaps started by another user: name it.
        words = f"lab {reply['lab']}: now {requested_text(reply['requested'])}"
        Console(stderr=True, highlight=False).print(words, soft_wrap=True)


@app.command()
def show(lab: LabName = None) -> None:
    """Show the requested network of a running lab, and what it has measured so far."""
    with friendly_errors():
        from stormtorch_lab.cli.tables.lab import shown_text
        from stormtorch_lab.netns.registry import send_request

        Console(highlight=False).print(shown_text(send_request(lab, {})))


@app.command()
def clean() -> None:
    """Remove the remains of labs that were killed. Running labs are not touched."""
    with friendly_errors():
        from stormtorch_lab.netns.registry import clean as remove
        from stormtorch_lab.netns.registry import running

        removed = remove()
        for line in removed:
            typer.echo(f"removed {line}")
        if not removed:
            typer.echo("nothing to remove")
        if names := running():
            typer.echo(f"still running: {', '.join(names)}")


def _changes(**options: Any) -> dict[str, Any]:
    """Collects the options that were given, as conditions."""
    changes = {name: value for name, value in options.items() if value is not None}
    if changes.get("rate") == "unlimited":
        changes["rate"] = None
    if "burst" in changes:
        changes["burst"] = typed_burst(changes["burst"])
    if "trace" in changes:
        if "loss" in changes or "burst" in changes:
            raise BadCondition("trace", "takes the place of loss and burst; only one can hold")
        changes["loss"] = _read_trace(changes.pop("trace"))
    return changes


def _routers(words: Sequence[str]) -> dict[int, str]:
    """Parses hosts behind routers, such as 1 and 2:symmetric."""
    routers = {}
    for word in words:
        found = re.fullmatch(r"(\d+)(?::(\w+))?", word)
        if found is None:
            raise BadCondition("nat", f"must be a host as 1, or with a kind as 1:symmetric, got {word!r}")
        routers[int(found[1])] = found[2] or "cone"
    return routers


def _hosts_and_links(option: str, words: Sequence[str]) -> tuple[list[int], list[tuple[int, int]]]:
    """Parses hosts such as 2, and links such as 0-1 and 0:1."""
    hosts: list[int] = []
    links: list[tuple[int, int]] = []
    for word in words:
        found = re.fullmatch(r"(\d+)(?:([-:])(\d+))?", word)
        if found is None:
            raise BadCondition(option, f"must be a host as 2, or a link as 0-1 or 0:1, got {word!r}")
        first, mark, second = found.groups()
        if mark is None:
            hosts.append(int(first))
        else:
            links += [(int(first), int(second)), *([(int(second), int(first))] if mark == "-" else [])]
    return hosts, links


def _read_trace(text: str) -> Any:
    from stormtorch.network import loss

    name, colon, line = text.rpartition(":")
    path, number = (name, line) if colon and line.isdigit() else (text, "0")
    try:
        return loss.Trace.from_file(path, line=int(number))
    except (OSError, ValueError) as error:
        raise BadCondition("trace", f"cannot be read: {error}") from error


@contextlib.contextmanager
def _silence_broken(
    console: Console, write: Callable[["OutputLine"], None]
) -> Iterator[Callable[["OutputLine"], None]]:
    """While the command writes nothing, prints to standard error every ten seconds that it still runs."""
    from stormtorch.cli.terminal.screen import EVERY_S, periodic_lines

    begun_s = last_s = time.monotonic()

    def write_through(line: "OutputLine") -> None:
        nonlocal last_s
        last_s = time.monotonic()
        write(line)

    def text() -> str:
        now_s = time.monotonic()
        quiet = now_s - last_s >= 0.9 * EVERY_S
        return f"still running after {now_s - begun_s:.0f} s, silent for {now_s - last_s:.0f} s" if quiet else ""

    with periodic_lines(text, console):
        yield write_through


def _writer(per_node: int) -> Callable[["OutputLine"], None]:
    """Writes output lines behind the name of their host, in its colour; standard error stays standard error."""
    styled = {error: (sys.stderr if error else sys.stdout).isatty() for error in (False, True)}

    def write(line: "OutputLine") -> None:
        name = f"h{line.host}" + (f".{line.local}" if per_node > 1 else "")
        if styled[line.error] and "NO_COLOR" not in os.environ:
            name = typer.style(name, fg=_COLOURS[line.host % len(_COLOURS)], bold=True)
        stream = sys.stderr if line.error else sys.stdout
        stream.write(f"{name} | {line.text}\n")
        stream.flush()

    return write


def _write(
    path: Path,
    conditions: "Conditions",
    measured: dict[str, Any],
    statuses: Sequence[int],
    command: Sequence[str],
    lab: Any,
) -> None:
    import json
    import platform

    data = {
        "command": list(command),
        "hosts": lab.size,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "architecture": platform.machine(), "kernel": platform.release()},
        "requested": conditions.to_json(),
        "measured": measured,
        "statuses": list(statuses),
    }
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
