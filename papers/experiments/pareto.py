"""What does a byte buy, and what a second: perplexity of wires, parity and policies at equal steps, bytes and seconds?

The model and data of `perplexity.py`, 64 workers, 10 and 40 % loss. Everything learns for 300 steps: perplexity against
bytes. What is cheaper may also learn longer: some train for up to 2,000 steps, each with a schedule of its own, and
perplexity in between is interpolated. The measure is exact training in float32, which sends again whatever is lost: the
bytes and the seconds of its 300 steps are what everyone gets.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path
from typing import Any

from grid import Run, main
from over_seeds import explain, mean_and_bar, mean_text, seeds
from perplexity import scratch

from stormtorch import theory
from stormtorch.telemetry.statistics import mean

LOSSES = (0.1, 0.4)
SEEDS = 3
STEPS = 300
WIRES = ("float32", "bfloat16", "int8", "int4")
PARITY = {0.1: 0.25, 0.4: 1.0}
WAYS = {
    "exact": "exact",
    "plain": "plain",
    "lead": "lead",
    "parity": "lead, parity",
    "broadcast": "broadcast exact",
}
# What may be missing of gradients and of parameters; the rest is sent again. All others let anything be missing.
BUDGETS = {"exact": (0.0, 0.0), "broadcast": (1.0, 0.0)}
# What learns longer, and how long. Between the bytes of two wires lie as many steps.
LONGER = {"float32": (600,), "int8": (1000, 2000)}
LONGER_WAYS = {"float32": ("exact", "plain", "lead", "broadcast"), "int8": ("exact", "lead", "parity", "broadcast")}

# The model whose seconds are counted, larger than the one that is trained: 25 M parameters, 0.3 s of computation.
TIMED_BYTES, TIMED_COMPUTE_S, TIMED_RANKS = 1e8, 0.3, 64
NETWORKS = {
    "cluster": ("25 Gbit/s, 0.1 ms", theory.Bottleneck(bits_per_s=25e9, round_trip_s=1e-4)),
    "office": ("1 Gbit/s, 1 ms", theory.Bottleneck(bits_per_s=1e9, round_trip_s=1e-3)),
    "internet": ("100 Mbit/s, 80 ms", theory.Bottleneck(bits_per_s=1e8, round_trip_s=0.08)),
}


def runs(chosen: argparse.Namespace) -> list[Run]:
    """All at 300 steps, seed by seed, then the longer ones."""
    found: dict[str, Run] = {}

    def add(wire: str, way: str, loss: float, steps: int, seed: int) -> None:
        options: dict[str, Any] = {"wire": wire, "steps": steps}
        if way == "parity":
            options |= {"redundancy": PARITY[loss]}
        if way == "broadcast":
            options |= dict(zip(("gradient_budget", "budget"), BUDGETS[way], strict=True))
        policy = {"exact": "lossless", "plain": "plain"}.get(way, "lead")
        lost = 0.0 if way == "exact" else loss
        key = key_of(wire, way, loss, steps, seed)
        settings = scratch(chosen, policies=(policy,), loss=lost, first_seed=seed, **options)
        found[key] = Run(key=key, settings=settings)

    for seed in range(SEEDS):
        for loss in LOSSES:
            for wire in WIRES:
                for way in WAYS:
                    add(wire, way, loss, STEPS, seed)
    for seed in range(SEEDS):
        for loss in LOSSES:
            for wire, lengths in LONGER.items():
                for way in LONGER_WAYS[wire]:
                    for steps in lengths:
                        add(wire, way, loss, steps, seed)
    return list(found.values())


def key_of(wire: str, way: str, loss: float, steps: int, seed: int) -> str:
    """Name of a run: what is exact learns the same whatever is lost."""
    return f"{wire}/{way}/{steps}/{seed}" if way == "exact" else f"{wire}/{way}/{loss:g}/{steps}/{seed}"


# --- what it took -----------------------------------------------------------------------------------------------------


def results(
    found: dict[str, dict[str, Any]], wire: str, way: str, loss: float, steps: int = STEPS
) -> list[dict[str, Any]]:
    """Results of all seeds."""
    return seeds(found, key_of(wire, way, loss, steps, 0).rpartition("/")[0])


def share_of_bytes(found: dict[str, dict[str, Any]], wire: str, way: str, loss: float) -> float:
    """Bytes of a step, in those of a step in float32 of which nothing is lost nor sent again.

    Simulations count every chunk of an exact stage once. It is sent until it has arrived; both stages are equally long.
    """
    base = mean([run["bytes_sent"] for run in results(found, "float32", "exact", loss)])
    share = mean([run["bytes_sent"] for run in results(found, wire, way, loss)]) / base
    return share * mean([1.0 if budget else 1.0 / (1.0 - loss) for budget in BUDGETS.get(way, (1.0, 1.0))])


def step_s(share: float, way: str, loss: float, line: theory.Bottleneck) -> float:
    """Seconds of a step of the timed model, by theory: bytes have what is sent again, but not its round trips."""
    chunks = TIMED_BYTES / TIMED_RANKS / 1440
    trips = sum(theory.sent_again(loss, chunks, budget)[1] for budget in BUDGETS.get(way, ()))
    bare_s = theory.step_on_bottleneck_s(
        line, n=TIMED_RANKS, model_bytes=TIMED_BYTES * share, p=0.0, compute_s=TIMED_COMPUTE_S
    )
    return bare_s + trips * line.round_trip_s


def steps_for(found: dict[str, dict[str, Any]], wire: str, way: str, loss: float, network: str | None) -> float:
    """Steps that the bytes of exact training in float32 pay for; on a network, its seconds."""
    mine, theirs = share_of_bytes(found, wire, way, loss), share_of_bytes(found, "float32", "exact", loss)
    if network is None:
        return STEPS * theirs / mine
    line = NETWORKS[network][1]
    return STEPS * step_s(theirs, "exact", loss, line) / step_s(mine, way, loss, line)


def above_after(found: dict[str, dict[str, Any]], wire: str, way: str, loss: float, steps: float) -> list[float]:
    """Per cent of perplexity, of each seed, above 300 exact steps in float32, after so many steps.

    Between two lengths that were trained, the loss is taken to be linear in the logarithm of the steps. Empty where a
    length is asked for that lies outside of them.
    """
    base = {run["seed"]: run["val_loss"] for run in results(found, "float32", "exact", loss)}
    lengths = sorted({STEPS, *LONGER.get(wire, ())})
    trained = {
        length: {run["seed"]: run["val_loss"] for run in results(found, wire, way, loss, length)} for length in lengths
    }
    values = []
    for seed in sorted(base):
        known = [(length, trained[length][seed]) for length in lengths if trained[length].get(seed) is not None]
        loss_then = _between(known, steps)
        if loss_then is not None:
            values.append(100 * math.expm1(loss_then - base[seed]))
    return values


def _between(known: list[tuple[int, float]], steps: float) -> float | None:
    for (low, first), (high, last) in itertools.pairwise(known):
        if low * 0.99 <= steps <= high:
            weight = math.log(steps / low) / math.log(high / low)
            return first + weight * (last - first)
    return known[0][1] if known and abs(steps / known[0][0] - 1) < 0.01 else None


# --- tables and the picture -------------------------------------------------------------------------------------------


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Rows of the page's tables: all at 300 steps; at equal steps, bytes and seconds. An empty row divides them."""
    return [*_points(found), "", *_equal(found)]


def _points(found: dict[str, dict[str, Any]]) -> list[str]:
    rows = []
    for wire in WIRES:
        for way, label in WAYS.items():
            cells = []
            for loss in LOSSES:
                more = above_after(found, wire, way, loss, STEPS)
                if more:
                    cells += [f"{share_of_bytes(found, wire, way, loss):.2f}", f"{mean_text(more, '+.1f')} %"]
            if len(cells) == 2 * len(LOSSES):
                rows.append(f"| {wire}, {label} | {' | '.join(cells)} |")
    return rows


def _equal(found: dict[str, dict[str, Any]]) -> list[str]:
    rows = []
    for loss in LOSSES:
        for wire, ways in LONGER_WAYS.items():
            for way in ways:
                if not results(found, wire, way, loss):
                    continue
                cells = [mean_text(above_after(found, wire, way, loss, STEPS), "+.1f")]
                for network in (None, *NETWORKS):
                    steps = steps_for(found, wire, way, loss, network)
                    more = above_after(found, wire, way, loss, steps)
                    cells.append(f"{mean_text(more, '+.1f')} ({steps:,.0f})")
                rows.append(f"| {100 * loss:g} %, {wire}, {WAYS[way]} | {' | '.join(cells)} |")
    return rows


COLOURS = {"exact": "#343a40", "plain": "#f59f00", "lead": "#d9480f", "parity": "#2f9e44", "broadcast": "#1c7ed6"}
MARKERS = {"float32": "o", "bfloat16": "s", "int8": "^", "int4": "D"}


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """A panel for each loss: perplexity against bytes, and the line of those that nobody beats in both."""
    from matplotlib.figure import Figure

    print("\n".join(table(found)))
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots(1, len(LOSSES), sharey=True)
    for axis, loss in zip(axes, LOSSES, strict=True):
        points = []
        for wire in WIRES:
            for way in WAYS:
                more = above_after(found, wire, way, loss, STEPS)
                if not more:
                    continue
                share, (average, bar) = share_of_bytes(found, wire, way, loss), mean_and_bar(more)
                points.append((share, average))
                axis.errorbar(
                    share, average, bar, color=COLOURS[way], marker=MARKERS[wire], markersize=7, capsize=3, linewidth=1
                )
        best = [point for point in points if not any(_beats(other, point) for other in points)]
        if best:
            axis.step(*zip(*sorted(best), strict=True), where="post", color="#adb5bd", linewidth=1.5, zorder=0)
        axis.axhline(0, color="#dee2e6", linewidth=1, zorder=0)
        axis.set_xscale("log")
        ticks = [0.125, 0.25, 0.5, 1, 2]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_yscale("symlog", linthresh=2)
        axis.set_yticks([-2, -1, 0, 1, 2, 5, 10, 20, 50], ["-2", "-1", "0", "1", "2", "5", "10", "20", "50"])
        axis.set(xlabel="bytes of a step, in those of float32", title=f"{100 * loss:g} % lost")
        axis.spines[["top", "right"]].set_visible(False)
    for way, label in WAYS.items():
        axes[0].plot([], [], "o", color=COLOURS[way], label=label)
    for wire, marker in MARKERS.items():
        axes[0].plot([], [], marker, color="#868e96", label=wire)
    axes[0].set_ylabel("perplexity above exact float32, per cent")
    explain(axes[0], fontsize=8, ncols=2)
    figure.suptitle(
        f"64 workers, {STEPS} steps; bars: two standard errors; grey: what nobody beats in both", fontsize=11
    )
    figure.savefig(path, dpi=150)


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


if __name__ == "__main__":
    main("pareto", __doc__, runs, draw)
