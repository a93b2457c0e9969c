"""`stormtorch doctor`: checks arguments, starts the examination, shows the diagnoses and the advice."""

from __future__ import annotations

import json as json_format
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stormtorch.checks import BadSetting, check_between
from stormtorch.cli.console import check_file, friendly_errors, handle_termination_signals, save
from stormtorch.cli.terminal.options import Json

if TYPE_CHECKING:
    from stormtorch.doctor.diagnosis import Diagnosis
    from stormtorch.doctor.director import Director
    from stormtorch.doctor.starting import LauncherEnvironment
    from stormtorch.doctor.worker import WorkerSettings

_HOSTS, _MODEL = "Hosts and ranks", "The model"


def doctor(
    hosts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Hosts to examine, reached by ssh; localhost is this machine. Without hosts, only this machine.",
            metavar="HOST...",
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Total time of the measurements.", show_default="5.5 s for each round, at most 60 s"),
    ] = None,
    params_m: Annotated[
        float | None,
        typer.Option(
            help="Predict the communication cost of a model with this many million parameters.", rich_help_panel=_MODEL
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Number of ranks for the prediction.", show_default="those that were measured", rich_help_panel=_MODEL
        ),
    ] = None,
    capture: Annotated[
        Path | None,
        typer.Option(
            help="Write the loss of each link to this file, for `stormtorch lab run --per-link` and "
            "`stormtorch simulate --per-link`.",
            dir_okay=False,
        ),
    ] = None,
    json: Json = None,
    interface: Annotated[
        str | None,
        typer.Option(
            help="Interface or address to examine on every host.",
            show_default="STORM_SOCKET_IFNAME, or the one on the route to the other hosts",
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(help="UDP port on every host; 0 uses any free port.", rich_help_panel=_HOSTS)
    ] = 0,
    python: Annotated[
        str | None,
        typer.Option(help="Path of Python on the hosts.", show_default="the same path as here", rich_help_panel=_HOSTS),
    ] = None,
    ssh: Annotated[
        str | None,
        typer.Option(
            help="Command that runs a command on a host, as ssh does.",
            show_default="ssh -o BatchMode=yes -o ConnectTimeout=5",
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    wait_s: Annotated[
        float, typer.Option(help="Seconds to wait for all ranks to report.", rich_help_panel=_HOSTS)
    ] = 30.0,
    receive_buffer_bytes: Annotated[
        int,
        typer.Option(
            help="Socket receive buffer to request, as Options(receive_buffer_bytes=...).", rich_help_panel=_HOSTS
        ),
    ] = 8 << 20,
    rank: Annotated[int | None, typer.Option(hidden=True)] = None,
    towards: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Diagnose this machine, or the network between several hosts, and suggest a remedy.

    Without hosts, it checks this machine: kernel, buffers, offloads, interfaces, clock, cores, memory, versions.
    With hosts, or when started by torchrun, it tests every pair of ranks in both directions: loss, loss bursts, round
    trip, jitter, rate, path MTU, reordering, and whether UDP is blocked. A rank runs one test at a time.
    It names the faulty host or link, the remedy, and the options that suit the network.
    The hosts need stormtorch, and ssh without a password. The exit code is 0 without problems and 1 otherwise.

    [bold]Examples[/bold]

      stormtorch doctor
      stormtorch doctor node0 node1 node2 --params-m 25
      stormtorch doctor localhost node1 --interface eth0 --port 29500 --capture links.json
      torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint node0:29400 -m stormtorch doctor
    """
    with friendly_errors(hosts="HOST"), handle_termination_signals():
        from stormtorch.doctor.starting import launcher_environment
        from stormtorch.doctor.worker import WorkerSettings

        if seconds is not None:
            check_between("seconds", seconds, 1.0, 3600.0)
        if params_m is not None:
            check_between("params_m", params_m, 0.001, 1e7)
        if ranks is not None:
            check_between("ranks", ranks, 2, 100_000)
        check_between("port", port, 0, 65535)
        check_between("wait_s", wait_s, 1.0, 3600.0)
        check_between("receive_buffer_bytes", receive_buffer_bytes, 4096, 1 << 30)
        settings = WorkerSettings(
            rank=rank or 0, interface=interface, towards=towards, port=port, receive_buffer_bytes=receive_buffer_bytes
        )
        if rank is not None:
            _serve(settings)
            raise typer.Exit(0)
        check_file("json", json)
        check_file("capture", capture)
        show = _Show(json=json, capture=capture, params_m=params_m, ranks=ranks, seconds=seconds)
        here = None if hosts else launcher_environment()
        if hosts:
            from stormtorch.doctor.starting import HostLaunch, launch_on_hosts

            chosen = {"ssh": ssh, "python": python}
            start = HostLaunch(
                hosts=hosts,
                interface=interface,
                port=port,
                receive_buffer_bytes=receive_buffer_bytes,
                **{name: value for name, value in chosen.items() if value is not None},
            )
            code = show.network(launch_on_hosts(start), wait_s, f"starting {len(hosts)} hosts")
        elif here is not None and here.world > 1:
            code = _as_launched(here, settings, wait_s, show)
        else:
            for name, value in {"ssh": ssh, "python": python, "capture": capture, "params_m": params_m}.items():
                if value is not None:
                    raise BadSetting(name, "needs two hosts or more: name them, or start the doctor by torchrun")
            if here is not None:
                typer.echo("A world of 1 rank has no links: only this machine is checked.", err=True)
            code = show.machine()
    raise typer.Exit(code)


def _serve(settings: WorkerSettings) -> None:
    """Runs the worker of one host; the director's requests arrive on standard input."""
    from stormtorch.doctor.channels import PipeWorkerChannel
    from stormtorch.doctor.worker import run_worker

    run_worker(PipeWorkerChannel(), settings)


def _as_launched(here: LauncherEnvironment, settings: WorkerSettings, wait_s: float, show: _Show) -> int:
    from dataclasses import replace

    from stormtorch.doctor import starting
    from stormtorch.doctor.director import longest_request_gap_s

    settings = replace(settings, rank=here.rank, towards=settings.towards or here.master)
    try:
        store = starting.rendezvous_in_store(here, wait_s)
    except ConnectionError as error:
        typer.echo(str(error), err=True)
        return 1
    request_gap_s = longest_request_gap_s(wait_s, show.seconds, here.world)
    if here.rank != 0:
        starting.run_launched_worker(store, settings, request_gap_s)
        return starting.wait_for_exit_code(store, here.rank)
    code = 1
    director = starting.direct_launched(store, here.world, settings, request_gap_s)
    try:
        code = show.network(director, wait_s, f"waiting for {here.world} ranks")
    finally:
        starting.publish_exit_code(store, code, director.present)
    return code


class _Show:
    """Runs an examination and shows it."""

    def __init__(
        self,
        *,
        json: Path | None,
        capture: Path | None,
        params_m: float | None,
        ranks: int | None,
        seconds: float | None,
    ) -> None:
        self._json, self._capture = json, capture
        self._params_m, self._ranks, self.seconds = params_m, ranks, seconds

    def machine(self) -> int:
        from stormtorch.cli.tables.doctor import show_machine, wide_console
        from stormtorch.doctor.host.machine import examine_machine

        diagnoses = examine_machine()
        save(_writer({"findings": [each.to_json() for each in diagnoses]}), self._json)
        show_machine(diagnoses, wide_console())
        return _code(diagnoses)

    def network(self, director: Director, wait_s: float, waiting: str) -> int:
        from stormtorch.cli.tables.doctor import show_network, wide_console
        from stormtorch.doctor.advice import advise, predict_cost
        from stormtorch.doctor.capture import write_links
        from stormtorch.doctor.verdict import examine, sentence

        try:
            with _progress(waiting) as advance:
                found = director.rendezvous(wait_s)
                if len(found.ranks) >= 2:
                    found = director.examine(self.seconds, advance)
        finally:
            director.end()
        diagnoses = examine(found)
        if not found.links:
            for each in diagnoses:
                typer.echo(each.text, err=True)
            typer.echo(f"{len(found.ranks)} of {found.world} ranks reported: too few to measure a link.", err=True)
            return 1
        parameters = None if self._params_m is None else round(self._params_m * 1e6)
        cost = None if parameters is None else predict_cost(found, parameters, self._ranks)
        advice = advise(found, cost)
        verdict = sentence(found, diagnoses)
        data = {
            "verdict": verdict,
            "findings": [each.to_json() for each in diagnoses],
            "advice": advice.to_json(),
            "cost": None if cost is None else cost.to_json(),
            "measured": found.to_json(),
        }
        save(_writer(data), self._json)
        save(lambda path: write_links(found, path), self._capture)
        show_network(found, diagnoses, advice, cost, wide_console(), captured=self._capture)
        return _code(diagnoses)


def _progress(start: str) -> Any:
    from stormtorch.cli.terminal.screen import progress_status

    return progress_status(start)


def _writer(data: dict[str, Any]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(json_format.dumps(data, indent=1) + "\n", encoding="utf-8")

    return write


def _code(diagnoses: list[Diagnosis]) -> int:
    from stormtorch.doctor.diagnosis import Level, worst

    return 1 if worst(diagnoses) is Level.PROBLEM else 0
