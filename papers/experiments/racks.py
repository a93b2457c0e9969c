"""Packets at scale: how long does a step's exchange take on 16 to 1,024 endpoints in racks, beside what lines allow?

Every endpoint is the shipped core of the engine; the network is simulated under virtual time, packet by packet. Hosts
have a line up to the switch of their rack and one down from it, and racks have such lines (trunks) to the switch that
joins them. A step is what `BoundedDrift` exchanges: all send gradients to all owners at once, and each owner sends
parameters to all as soon as it has its mean. It needs no data, and about 70 minutes of one core; a run of 1,024
endpoints takes 12 GB of memory.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import torch
from grid import RESULTS, keep, load
from over_seeds import mean_and_bar, mean_text
from pool import pool
from rack_steps import NETWORKS, SEEDS, Case, Network, Steps, ideal_s

from stormtorch.cli.terminal.screen import progress_bar
from stormtorch_lab.jobs.surroundings import surroundings


def cases() -> list[Case]:
    """All runs, the largest first."""
    # Trunks of 4:1 without a rate take more than 20 GB before the first step ends.
    largest = ("fast", "fast-bursts", "fast-lossy", "fast-paced")
    found = [Case(network=name, hosts=1024, exact=False) for name in largest]
    for hosts in (256, 64, 16):
        for name, network in NETWORKS.items():
            for exact in (False, True):
                if not exact or (hosts <= 64 and not name.startswith("fast-")):
                    seeds = range(SEEDS if network.random else 1)
                    found += [Case(network=name, hosts=hosts, exact=exact, seed=seed) for seed in seeds]
    return found


def run_one(case: Case) -> dict[str, Any]:
    """Computes a run, ready to be kept."""
    began = time.monotonic()
    steps = Steps(case)
    found = [steps.run(step) for step in range(case.steps)]
    return {
        "network": case.network,
        "hosts": case.hosts,
        "exact": case.exact,
        "ideal_s": ideal_s(case),
        "steps": found,
        "seconds": round(time.monotonic() - began, 1),
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        **surroundings(),
    }


def run_all(wanted: Sequence[Case], processes: int) -> dict[str, dict[str, Any]]:
    """Computes what is missing, and keeps each run as soon as it is done."""
    found = load("racks")
    left = [case for case in wanted if case.key not in found]
    # Endpoints take gigabytes, and each datagram touches a little of two: with large pages that takes a quarter less.
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    with (
        pool(processes, runs_each=1) as computing,
        progress_bar(len(wanted), "racks", unit="runs") as advance,
    ):
        running = {computing.submit(run_one, case): case for case in left}
        for future in as_completed(running):
            case = running[future]
            found = load("racks") | {case.key: future.result()}  # another command may have kept runs meanwhile
            keep("racks", found)
            advance(case.key, sum(each.key in found for each in wanted))
            print(f"racks {case.key}: {found[case.key]['seconds']} s", flush=True)
    return found


# --- results ----------------------------------------------------------------------------------------------------------


def values(found: dict[str, Any], network: str, hosts: int, exact: bool, name: str, *, first: bool) -> list[float]:
    """One value for each seed: of the first step, or the mean of later ones."""
    runs = [
        run
        for _, run in sorted(found.items())
        if (run["network"], run["hosts"], run["exact"]) == (network, hosts, exact)
    ]
    each = [run["steps"][:1] if first else run["steps"][1:] for run in runs]
    return [sum(step[name] for step in steps) / len(steps) for steps in each if steps]


def sizes(found: dict[str, Any]) -> list[int]:
    """Numbers of endpoints that were run."""
    return sorted({run["hosts"] for run in found.values()})


def table(found: dict[str, Any]) -> list[str]:
    """Rows of the page's table, one for each network and number of endpoints."""
    columns = [
        ("times_ideal", ".2f", 1.0, False, True),
        ("times_ideal", ".2f", 1.0, False, False),
        ("lost", ".1f", 100.0, False, True),
        ("lost", ".1f", 100.0, False, False),
        ("bytes", ".2f", 1.0, False, True),
        ("bytes", ".2f", 1.0, False, False),
        ("times_ideal", ".2f", 1.0, True, False),
        ("bytes", ".2f", 1.0, True, False),
    ]
    rows = []
    for name, network in NETWORKS.items():
        for hosts in sizes(found):
            ideals = [run["ideal_s"] for run in found.values() if (run["network"], run["hosts"]) == (name, hosts)]
            if not ideals:
                continue
            cells = [f"{1e3 * ideals[0]:.0f} ms"]
            for what, form, scale, exact, first in columns:
                got = values(found, name, hosts, exact, what, first=first)
                cells.append(mean_text([scale * each for each in got], form))
            rows.append(f"| {network.label} | {hosts:,} | {' | '.join(cells)} |")
    return rows


_PANELS = [
    ("times_ideal", "time of a step, of what its lines need", 1.0),
    ("lost", "lost for good, per cent of the data", 100.0),
    ("bytes", "bytes sent, of what the data needs", 1.0),
]


def _draw_panel(axis: Any, found: dict[str, Any], networks: dict[str, Network], what: str, scale: float) -> None:
    """One value of all networks of one speed, against the number of endpoints."""
    for place, (name, network) in enumerate(networks.items()):
        for first in (False, True):
            points = [
                (hosts, *mean_and_bar([scale * each for each in got]))
                for hosts in sizes(found)
                if (got := values(found, name, hosts, False, what, first=first))
            ]
            if not points:
                continue
            where, middle, bar = zip(*points, strict=True)
            axis.errorbar(
                [hosts * 1.03 ** (place - 2) for hosts in where],
                middle,
                yerr=bar,
                color=network.colour,
                marker="o",
                markersize=5,
                markerfacecolor="white" if first else network.colour,
                linestyle=":" if first else "-",
                linewidth=1 if first else 1.6,
                capsize=2,
                label=None if first else network.label,
            )
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes(found), [f"{hosts:,}" for hosts in sizes(found)])
    axis.minorticks_off()
    if what == "times_ideal":
        axis.set_yscale("log", base=2)
        ticks = [1, 2, 4, 8, 16, 32, 64, 128]
        top = axis.get_ylim()[1]
        axis.set_yticks([tick for tick in ticks if tick <= top], [f"{tick}" for tick in ticks if tick <= top])
    else:
        axis.set_ylim(bottom=0 if what == "lost" else 0.95)
    if what != "lost":
        axis.axhline(1, color="#343a40", linewidth=1)
    axis.grid(axis="y", color="#e9ecef")
    axis.spines[["top", "right"]].set_visible(False)


def draw(found: dict[str, Any], path: Path) -> None:
    """Time, loss and bytes against the number of endpoints."""
    from matplotlib.figure import Figure

    print("\n".join(table(found)))
    speeds = {"1 Gbit/s": 1e9 / 8, "10 Gbit/s": 1e10 / 8}
    figure = Figure(figsize=(12, 7.6), layout="constrained")
    axes = figure.subplots(len(speeds), len(_PANELS), sharex=True)
    for row, (speed, bytes_per_s) in zip(axes, speeds.items(), strict=True):
        named = {name: network for name, network in NETWORKS.items() if network.bytes_per_s == bytes_per_s}
        for axis, (what, title, scale) in zip(row, _PANELS, strict=True):
            _draw_panel(axis, found, named, what, scale)
            axis.set_title(f"{speed}: {title}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("endpoints")
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle("One step of a model of 1.5 MB (filled: later steps; hollow, dotted: the first)", fontsize=11)
    figure.savefig(path, dpi=150)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, each with one thread and up to 12 GB")
    parser.add_argument("--only", default="", help="only runs whose key contains this")
    parser.add_argument("--draw", action="store_true", help="compute nothing, draw what is there")
    chosen = parser.parse_args()
    wanted: Iterable[Case] = (case for case in cases() if chosen.only in case.key)
    found = load("racks") if chosen.draw else run_all(list(wanted), chosen.processes)
    draw(found, RESULTS / "racks.png")
    print(f"{RESULTS / 'racks.png'} is drawn")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
