"""Plot of a chaos run: steps over time, and a row for each host with its steps and faults."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stormtorch_lab.studies.chaos.report import ChaosReport

if TYPE_CHECKING:
    from stormtorch_lab.studies.chaos.timeline import Recovery

COLOURS = {
    "kill": "#c92a2a",
    "pause": "#f59f00",
    "cut": "#5f3dc4",
    "link": "#1c7ed6",
    "outage": "#212529",
    "partition": "#0b7285",
    "storm": "#868e96",
    "mtu": "#846358",
    "join": "#2b8a3e",
    "leave": "#d9480f",
}
# Kinds that strike the network of all hosts.
_EVERYWHERE = ("outage", "storm")
# A host without a step for longer than this is drawn as stalled.
_STANDS_S = 1.0


def plot_chaos(report: ChaosReport, path: Path) -> None:
    """Draws the timeline into `path`; its ending is the format."""
    from matplotlib.figure import Figure

    hosts = report.settings.hosts + report.settings.spares
    seconds = report.finish_s - report.start_s
    width = min(max(8.0, seconds / 18), 60.0)
    figure = Figure(figsize=(width, 3.2 + 0.4 * hosts), layout="constrained")
    steps, lanes = figure.subplots(2, 1, sharex=True, height_ratios=[2.0, 0.4 * hosts + 0.4])
    times, reached = zip(*((t - report.start_s, step) for t, step in report.history.frontier), strict=True)
    steps.plot(times, reached, color="#495057", linewidth=1)
    steps.set(ylabel="step", xlim=(-2, seconds + 2))
    steps.set_ylim(0, max((step for t, step in zip(times, reached, strict=True) if t <= seconds), default=1) * 1.05)
    _draw_activity(report, lanes, hosts)
    for recovery in report.recoveries:
        _draw_fault(report, recovery, steps, lanes, hosts)
    lanes.set(xlabel="seconds", ylim=(hosts - 0.4, -0.6))
    lanes.set_yticks(range(hosts), [f"h{host}" for host in range(hosts)])
    for axis in (steps, lanes):
        axis.spines[["top", "right"]].set_visible(False)
    _draw_legend(report, figure)
    verdict = "passed" if report.passed else "failed"
    figure.suptitle(
        f"{verdict}: {len(report.recoveries)} faults on {report.settings.hosts} hosts, seed {report.settings.seed}",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_activity(report: ChaosReport, lanes: Any, hosts: int) -> None:
    """Draws a grey bar wherever a host makes steps."""
    for host in range(hosts):
        for process_log in report.history.of_host(host):
            bars: list[list[float]] = []
            for step in process_log.steps:
                t = step.t - report.start_s
                if bars and t - bars[-1][1] <= _STANDS_S:
                    bars[-1][1] = t
                else:
                    bars.append([t, t + 0.05])
            lanes.broken_barh([(begin, end - begin) for begin, end in bars], (host - 0.3, 0.6), color="#ced4da")


def _draw_fault(report: ChaosReport, recovery: "Recovery", steps: Any, lanes: Any, hosts: int) -> None:
    fault = recovery.struck.fault
    begin, end = recovery.struck.began_s - report.start_s, recovery.struck.ended_s - report.start_s
    colour = COLOURS[fault.kind]
    steps.axvspan(begin, end, color=colour, alpha=0.15, linewidth=0)
    struck = range(hosts) if fault.kind in _EVERYWHERE else fault.hosts
    height = 0.2 if fault.kind in (*_EVERYWHERE, "join", "mtu") else 0.4
    for host in struck:
        lanes.broken_barh([(begin, max(end - begin, 0.3))], (host - height / 2, height), color=colour, alpha=0.8)


def _draw_legend(report: ChaosReport, figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=COLOURS[each.kind], label=each.kind) for each in report.kinds]
    handles.append(Patch(color="#ced4da", label="makes steps"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6), frameon=False, fontsize=8)
