"""Do theory, simulation and packets say the same: of the age of copies, bias, drift, variance, batch and mixing?

A training whose updates are exactly what the formulas are about: gradients are random numbers, whatever the parameters;
where the lag of replicas is measured, they are constant.
Eight workers run it three ways: on paper (`stormtorch.theory`), in the simulator, and as eight processes that exchange
datagrams by the engine, of which as many are dropped. It needs no data and takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from grid import RESULTS
from over_seeds import standard_error
from torch import nn

from stormtorch import BoundedDrift, ModelAveraging, Reliability, prepare, theory
from stormtorch.cli.terminal.screen import progress_bar
from stormtorch.collectives import Group
from stormtorch.exchange.options import Options
from stormtorch.joining.rendezvous import connect
from stormtorch.network.faults import faults
from stormtorch.policies.policy import Policy
from stormtorch.telemetry.ledger import LedgerRow
from stormtorch_lab import simulate
from stormtorch_lab.jobs.gloo import gloo_group
from stormtorch_lab.jobs.ranks import Member, run_ranks
from stormtorch_lab.jobs.surroundings import surroundings
from stormtorch_lab.simulation.checkpoints import replacing

WORKERS = 8
LOSSES = (0.1, 0.4)
STEPS, SETTLING = 400, 50
# Chunks of 360 elements that each worker owns: of a training, and of the models that are averaged once.
CHUNKS, AVERAGED_CHUNKS, ELEMENTS_PER_CHUNK = 12, 60, 360
ROUNDS = 12
# Neighbouring steps see the same old copies, so errors are those of means over so many of them.
BATCH = 35
DATAGRAM_BYTES = 1472

LAG, LAG_WITH_LEAD = "updates that a replica lags behind, on average", "the same lag with the lead"
QUANTITIES: dict[str, Callable[[float], float]] = {
    "mean age of a copy, steps": theory.mean_lag,
    LAG: theory.mean_lag,
    LAG_WITH_LEAD: lambda p: 0.0,
    "drift of two replicas, in updates squared": theory.pair_drift,
    "the same with the lead": lambda p: theory.pair_drift(p, lead=theory.lead(p)),
    "variance of the mean gradient, of lossless": lambda p: theory.variance_inflation(p, WORKERS),
    "gradients in a mean, of all": lambda p: (1 + (WORKERS - 1) * (1 - p)) / WORKERS,
    "RPS: mixing a1 - a2": lambda p: theory.mixing(p, WORKERS)[0] - theory.mixing(p, WORKERS)[1],
    "RPS: mixing a2": lambda p: theory.mixing(p, WORKERS)[1],
}
SOURCES = ("simulation", "packets")
Values = dict[str, list[float]]
"""Independent measurements of each quantity."""


class Walk(nn.Module):
    """Parameters that go wherever random gradients push them."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(WORKERS * chunks * ELEMENTS_PER_CHUNK))

    def forward(self, push: torch.Tensor) -> torch.Tensor:
        """The loss whose gradient is `push`."""
        return (self.place * push).sum()


def push_of(chunks: int, seed: int, step: int, worker: int) -> torch.Tensor:
    """Random gradient of one worker at one step: independent, of mean 0 and variance 1."""
    random = torch.Generator().manual_seed((seed * 100_003 + step) * 1009 + worker)
    return torch.randn(WORKERS * chunks * ELEMENTS_PER_CHUNK, generator=random)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer whose update is the gradient."""
    return torch.optim.SGD(parameters, lr=1.0)


def constant(chunks: int) -> torch.Tensor:
    """A gradient that is the same at every step, so that the loss of a replica tells where it is."""
    return torch.ones(WORKERS * chunks * ELEMENTS_PER_CHUNK)


def drifting(lead: bool) -> Policy:
    """Lossy both ways, without anything that would repair: loss is what is measured."""
    lossy = Reliability(budget=1.0)
    return BoundedDrift(gradients=lossy, broadcast=lossy, lead=float(lead), standby=0, guard=None, drift_samples=4096)


def averaging() -> Policy:
    """Models averaged once."""
    return ModelAveraging(reliability=Reliability(budget=1.0))


# --- what is read from steps ------------------------------------------------------------------------------------------


def of_rows(rows: Sequence[LedgerRow], *, lead: bool) -> Values:
    """Means over batches of steps."""
    rows = rows[SETTLING:]
    update = statistics.fmean(row.update_variance or math.nan for row in rows)
    drift = [(row.pair_drift or 0.0) / update for row in rows]
    if lead:
        return {"the same with the lead": _batches(drift)}
    ages = [sum(age * count for age, count in row.lag.items()) / sum(row.lag.values()) for row in rows]
    return {
        "mean age of a copy, steps": _batches(ages),
        "drift of two replicas, in updates squared": _batches(drift),
        "variance of the mean gradient, of lossless": _batches(
            [WORKERS * (row.update_variance or 0.0) for row in rows]
        ),
        "gradients in a mean, of all": _batches([row.effective_batch for row in rows]),
    }


def of_losses(losses: Sequence[float], *, lead: bool) -> Values:
    """Updates that replicas lag behind, from their losses where every gradient is one and every update minus one.

    After so many steps, owners are at minus that number. A worker's own shard never lags.
    """
    elements = WORKERS * CHUNKS * ELEMENTS_PER_CHUNK
    lags = [(step + loss / elements) * WORKERS / (WORKERS - 1) for step, loss in enumerate(losses)]
    return {LAG_WITH_LEAD if lead else LAG: _batches(lags[SETTLING:])}


def _batches(values: Sequence[float]) -> list[float]:
    return [statistics.fmean(values[at : at + BATCH]) for at in range(0, len(values) - BATCH + 1, BATCH)]


def of_models(spread: float, mean_squared: float) -> dict[str, float]:
    """Mixing, from models that were independent with variance 1 before they were averaged.

    Args:
        spread: Mean squared difference of two models, which is 2 (a1 - a2).
        mean_squared: Mean square of the mean of all models, which is a2 + (1 - a2) / n.
    """
    return {
        "RPS: mixing a1 - a2": spread / 2,
        "RPS: mixing a2": (mean_squared - 1 / WORKERS) / (1 - 1 / WORKERS),
    }


def merged(values: Iterable[dict[str, float]]) -> Values:
    """Lists of what several rounds have found."""
    found: Values = {}
    for each in values:
        for name, value in each.items():
            found.setdefault(name, []).append(value)
    return found


# --- in the simulator -------------------------------------------------------------------------------------------------


def simulated(loss: float) -> Values:
    """All quantities from virtual workers."""

    def run(policy: Policy, chunks: int, steps: int, seed: int, push: torch.Tensor | None = None) -> Any:
        def pushes(step: int, first: int, last: int) -> torch.Tensor:
            each = [push_of(chunks, seed, step, worker) if push is None else push for worker in range(first, last)]
            return torch.stack(each)

        return simulate(
            Walk(chunks),
            lambda model, batch: model(batch),
            pushes,
            sgd,
            workers=WORKERS,
            steps=steps,
            network=loss,
            policy=policy,
            seed=seed,
            evaluate=lambda model: (float(model.place.double().square().mean()), 0.0),
        )

    found: Values = {}
    for lead in (False, True):
        found |= of_rows(list(run(drifting(lead), CHUNKS, STEPS, seed=1).ledger), lead=lead)
        straight = run(drifting(lead), CHUNKS, STEPS, seed=2, push=constant(CHUNKS))
        found |= of_losses([loss for _, loss in straight.curve], lead=lead)
    rounds = [run(averaging(), AVERAGED_CHUNKS, 1, seed) for seed in range(ROUNDS)]
    return found | merged(of_models(each.drift, each.validations[-1][1]) for each in rounds)


# --- by packets -------------------------------------------------------------------------------------------------------


def on_rank(member: Member, loss: float) -> Values:
    """A rank's part of the same; returns its own rows' values, and the mixing that all ranks together see."""
    control = gloo_group(member, "agreement")
    options = Options(interface=member.interface, datagram_bytes=DATAGRAM_BYTES)
    found: Values = {}
    mixing: list[dict[str, float]] = []
    with connect(member.store, member.rank, member.world, options) as transport:
        group = Group(transport)

        def steps(
            policy: Policy, chunks: int, count: int, seed: int, push: torch.Tensor | None = None
        ) -> tuple[Any, Any, list[float]]:
            model = Walk(chunks)
            trained, optimizer = prepare(model, sgd(model.parameters()), policy=policy, group=group)
            losses = []
            for step in range(count):
                loss = trained(push_of(chunks, seed, step, member.rank) if push is None else push)
                loss.backward()
                losses.append(float(loss.detach()))
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                trained(torch.zeros_like(trained.place))  # waits for the last parameters
            return trained, optimizer, losses

        with faults(loss=loss, seed=1):
            for lead in (False, True):
                _, optimizer, _ = steps(drifting(lead), CHUNKS, STEPS, seed=1)
                found |= of_rows(list(optimizer.ledger), lead=lead)
                _, _, losses = steps(drifting(lead), CHUNKS, STEPS, seed=2, push=constant(CHUNKS))
                found |= of_losses(losses, lead=lead)
                control.barrier().wait()
            for seed in range(ROUNDS):
                model, _, _ = steps(averaging(), AVERAGED_CHUNKS, 1, seed)
                own = model.place.detach().clone()
                mean = own.clone()
                control.allreduce([mean]).wait()
                mean /= WORKERS
                spread = (own - mean).double().square().mean().view(1)
                control.allreduce([spread]).wait()
                mixing.append(of_models(2 * float(spread) / (WORKERS - 1), float(mean.double().square().mean())))
            control.barrier().wait()
    return found | merged(mixing)


def by_packets(loss: float) -> Values:
    """All quantities from processes on this machine."""
    ranks = run_ranks(on_rank, WORKERS, (loss,), timeout_s=900)
    found: Values = {}
    for name in QUANTITIES:
        # Every rank sees the mixing of all; of its own rows, ranks see different parts.
        found[name] = (
            ranks[0][name]
            if name.startswith("RPS")
            else [statistics.fmean(each) for each in zip(*(rank[name] for rank in ranks), strict=True)]
        )
    return found


# --- results ----------------------------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> list[str]:
    """Rows of the page's table, one for each quantity and loss."""
    rows = []
    for name, formula in QUANTITIES.items():
        for loss in LOSSES:
            exact = formula(loss)
            cells = []
            for source in SOURCES:
                values = found[source][f"{loss:g}"][name]
                value, error = statistics.fmean(values), standard_error(values)
                away = f" ({100 * (value / exact - 1):+.1f} %)" if exact else ""
                cells.append(f"{value:.4f} ± {error:.4f}{away}")
            rows.append(f"| {name} | {100 * loss:g} % | {exact:.4f} | {' | '.join(cells)} |")
    return rows


def draw(found: dict[str, Any], path: Path) -> None:
    """Deviations from theory, with two standard errors."""
    from matplotlib.figure import Figure

    print("\n".join(table(found)))
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    axis = figure.subplots()
    # Of nothing there is no per cent.
    places = [(name, loss) for name in QUANTITIES for loss in LOSSES if QUANTITIES[name](loss)]
    for source, colour, aside in zip(SOURCES, ("#1c7ed6", "#d9480f"), (-0.12, 0.12), strict=True):
        for place, (name, loss) in enumerate(places):
            values = [100 * (value / QUANTITIES[name](loss) - 1) for value in found[source][f"{loss:g}"][name]]
            axis.errorbar(
                statistics.fmean(values),
                place + aside,
                xerr=2 * standard_error(values),
                color=colour,
                marker="o",
                markersize=4,
                capsize=3,
                label=None if place else source,
            )
    axis.axvline(0, color="#343a40", linewidth=1)
    axis.set_yticks(range(len(places)), [f"{name}, {100 * loss:g} % lost" for name, loss in places], fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel="deviation from theory, per cent; bars: two standard errors", title="8 workers, independent loss")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="compute nothing, draw what is there")
    path = RESULTS / "agreement.json"
    if parser.parse_args().draw:
        found = json.loads(path.read_text())
    else:
        found = {"conditions": surroundings()}
        with progress_bar(len(SOURCES) * len(LOSSES), "agreement", unit="runs") as advance:
            for source, measure in zip(SOURCES, (simulated, by_packets), strict=True):
                found[source] = {}
                for loss in LOSSES:
                    found[source][f"{loss:g}"] = measure(loss)
                    advance(f"{source}, {100 * loss:g} %", sum(len(found.get(each, {})) for each in SOURCES))
        with replacing(path) as beside:
            beside.write_text(json.dumps(found, indent=1) + "\n")
    draw(found, path.with_suffix(".png"))
    print(f"{path.with_suffix('.png')} is drawn")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
