"""What do lost packets cost training that talks rarely: DiLoCo, streaming, sparse, gossip, beside BoundedDrift?

Learns the bytes of WikiText-2 from scratch with a LLaMA-style model of 0.63 M parameters on 8 workers, in 900 steps of
16 sequences each. Both directions lose. Every run is compared with the lossless one of its policy and seed; all of
them, at equal steps, with data parallel training; those that exchange models also at equal bytes with BoundedDrift,
which makes as few steps as they make exchanges, each of as many more sequences.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from grid import Run, main
from over_seeds import above, explain, mean_text, seeds

from stormtorch.telemetry.statistics import mean
from stormtorch_lab.studies.settings import SimSettings

SEEDS = 6
# Sparse exchanges that are this rare differ much from seed to seed.
SPARSE_SEEDS = 12
LOSSES = (0.0, 0.1, 0.4)
STEPS = 900
# Outer learning rate and momentum. Published ones are for hundreds of exchanges, and too hot for the 9 to 30 of these.
OUTER = {"diloco": (1.0, 0.5), "streaming-diloco": (1.0, 0.5), "gossip": (1.0, 0.5)}
# Elements of a block of which 64 go up. The published 4,096 are for models a thousand times larger.
BLOCKS = (1024, 4096)
TRIED = ((0.7, 0.9), (0.4, 0.9), (1.0, 0.5), (1.0, 0.0))
EVERY = (30, 100)
# Policies whose purpose is another one than few bytes, with what they need here; every so many steps, or at each.
OTHERS: dict[str, tuple[int | None, dict[str, float]]] = {
    "area": (30, {}),
    "mifa": (30, {}),
    "light-dp": (30, {"noise": 0.002, "mask": 0.01}),
    "salf": (None, {}),
    "qsdp": (None, {}),
}
OTHER_SEEDS = 3
# Learning rates of the few large steps that take as many bytes.
LARGE_STEPS = (1e-3, 4e-3)
BASE = "data-parallel/0"


def settings(chosen: argparse.Namespace, policy: str, loss: float, seed: int, **other: Any) -> SimSettings:
    """The model, the data and the network of every run."""
    options: dict[str, Any] = {
        "model": "llama",
        "data": chosen.data / "wikitext-2",
        "workers": 8,
        "width": 128,
        "layers": 3,
        "context": 64,
        "batch": 16,
        "held_out": 2048,
        "steps": STEPS,
        "device": chosen.device,
        "deterministic": chosen.device == "cuda",
        "policies": (policy,),
        "loss": loss,
        "first_seed": seed,
    }
    return SimSettings(**(options | other))


def rare(chosen: argparse.Namespace, policy: str, every: int, loss: float, seed: int, **more: float) -> SimSettings:
    """A training that exchanges every so many steps."""
    fields = tuple((name, str(value)) for name, value in more.items())
    return settings(chosen, policy, loss, seed, every=every, more=fields, given=frozenset({"every"}))


def other(chosen: argparse.Namespace, policy: str, loss: float, seed: int) -> SimSettings:
    """A training under a policy that serves another purpose."""
    every, more = OTHERS[policy]
    if every is None:
        return settings(chosen, policy, loss, seed)
    return rare(chosen, policy, every, loss, seed, **more, **({"key_seed": seed} if policy == "light-dp" else {}))


def runs(chosen: argparse.Namespace) -> list[Run]:
    """The comparison, seed by seed; then the outer optimizers that were tried."""
    found = []
    for seed in range(SEEDS):
        found.append(Run(key=f"{BASE}/{seed}", settings=settings(chosen, "lossless", 0.0, seed)))
        found += [
            Run(key=f"bounded-drift/{loss:g}/{seed}", settings=settings(chosen, "lead", loss, seed))
            for loss in LOSSES[1:]
        ]
        found += [
            Run(
                key=f"{policy}-{every}/{loss:g}/{seed}",
                settings=rare(chosen, policy, every, loss, seed, outer_lr=lr, momentum=momentum),
            )
            for policy, (lr, momentum) in OUTER.items()
            for every in EVERY
            for loss in LOSSES
        ]
        found += [
            Run(
                key=f"sparse-diloco-{block}-{every}/{loss:g}/{seed}",
                settings=rare(chosen, "sparse-diloco", every, loss, seed, block=block),
            )
            for block in BLOCKS
            for every in EVERY
            for loss in LOSSES
        ]
    found += [
        Run(
            key=f"sparse-diloco-1024-100/{loss:g}/{seed}",
            settings=rare(chosen, "sparse-diloco", 100, loss, seed, block=1024),
        )
        for seed in range(SEEDS, SPARSE_SEEDS)
        for loss in LOSSES
    ]
    for seed in range(OTHER_SEEDS):
        found += [
            Run(
                key=f"equal-bytes-{lr:g}-{every}/{loss:g}/{seed}",
                settings=settings(chosen, "lead", loss, seed, steps=STEPS // every, batch=16 * every, lr=lr),
            )
            for every in EVERY
            for lr in LARGE_STEPS
            for loss in LOSSES
        ]
        found += [
            Run(
                key=f"{policy}-{every}/{loss:g}/{seed}" if every else f"{policy}/{loss:g}/{seed}",
                settings=other(chosen, policy, loss, seed),
            )
            for policy, (every, _) in OTHERS.items()
            for loss in LOSSES
        ]
    found += [
        Run(
            key=f"tried/{policy}-{every}-{lr:g}-{momentum:g}/{seed}",
            settings=rare(chosen, policy, every, 0.0, seed, outer_lr=lr, momentum=momentum),
        )
        for policy in ("diloco", "streaming-diloco")
        for every in EVERY
        for lr, momentum in TRIED
        if (lr, momentum) != OUTER[policy]
        for seed in range(2)
    ]
    return found


LABELS = {
    "bounded-drift": "BoundedDrift",
    "diloco-30": "DiLoCo, every 30",
    "diloco-100": "DiLoCo, every 100",
    "streaming-diloco-30": "streaming, every 30",
    "streaming-diloco-100": "streaming, every 100",
    "sparse-diloco-1024-30": "sparse, every 30",
    "sparse-diloco-1024-100": "sparse, every 100",
    "sparse-diloco-4096-30": "sparser, every 30",
    "sparse-diloco-4096-100": "sparser, every 100",
    "gossip-30": "gossip, every 30",
    "gossip-100": "gossip, every 100",
    "area-30": "AREA, every 30",
    "mifa-30": "MIFA, every 30",
    "light-dp-30": "LightDP, every 30",
    "salf": "SALF",
    "qsdp": "QSDP, 8 bits",
    "equal-bytes-0.004-30": "BoundedDrift, 30 large steps",
    "equal-bytes-0.004-100": "BoundedDrift, 9 large steps",
}


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """A row of Markdown for each kind of training."""
    base_bytes = mean([run["bytes_sent"] for run in seeds(found, BASE)]) * STEPS
    rows = []
    for kind, label in LABELS.items():
        first = BASE if kind == "bounded-drift" else f"{kind}/0"
        if not seeds(found, first):
            continue
        beside = "-" if kind == "bounded-drift" else f"{mean_text(above(found, first, BASE), '+.1f')} %"
        costs = [f"{mean_text(above(found, f'{kind}/{loss:g}', first))} %" for loss in LOSSES[1:]]
        less = base_bytes / (mean([run["bytes_sent"] for run in seeds(found, first)]) * exchanges(kind))
        bytes_ = "all" if less < 1.5 else f"1/{less:.0f}"
        rows.append(f"| {label} | {bytes_} | {beside} | {' | '.join(costs)} | {len(seeds(found, first))} |")
    return rows


def exchanges(kind: str) -> int:
    """Number of exchanges of a training."""
    if kind in ("bounded-drift", "salf", "qsdp"):
        return STEPS
    return STEPS // int(kind.rpartition("-")[2]) * (8 if "streaming" in kind else 1)


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Perplexity above the policy's own lossless run, and above data parallel training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    own, all_ = figure.subplots(1, 2)
    print("\n".join(table(found)))
    for place, (kind, label) in enumerate(LABELS.items()):
        first = BASE if kind == "bounded-drift" else f"{kind}/0"
        if not seeds(found, first) or kind.startswith("equal-bytes"):  # several times the perplexity of all others
            continue
        costs, beside = [0.0], [0.0 if kind == "bounded-drift" else mean(above(found, first, BASE))]
        for loss in LOSSES[1:]:
            more = above(found, f"{kind}/{loss:g}", first)
            if more:
                costs.append(mean(more))
                beside.append(mean(above(found, f"{kind}/{loss:g}", BASE)))
        losses = [100 * loss for loss in LOSSES[: len(costs)]]
        style = "o-" if place < 10 else "s--"  # there are ten colours
        own.plot(losses, costs, style, markersize=4, label=label)
        all_.plot(losses, beside, style, markersize=4, label=label)
    for axis, title in ((own, "above its own lossless run"), (all_, "above data parallel without loss")):
        axis.axhline(0, color="#adb5bd", linewidth=1, zorder=0)
        axis.set(xlabel="packet loss, per cent", ylabel="perplexity, per cent")
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    all_.set_yscale("symlog", linthresh=10, linscale=0.5)
    all_.set_ylim(-1, 160)
    ticks = (0, 5, 10, 20, 30, 40, 60, 80, 120, 160)
    all_.set_yticks(ticks, [str(tick) for tick in ticks])
    all_.minorticks_off()
    explain(all_, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main("rarely", __doc__, runs, draw)
