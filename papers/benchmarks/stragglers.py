"""Trains with one slow rank, with and without `deadline="auto"`: `python papers/benchmarks/stragglers.py --json FILE`.

Computing is a pause, so that processors are not what is measured: eight ranks fit on a machine of two cores. Every
variant trains the same small LLaMA on the same bytes, and is judged by the same held-out text.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stormtorch
from stormtorch import BoundedDrift, prepare
from stormtorch_lab.jobs.ranks import Member, run_ranks
from stormtorch_lab.jobs.surroundings import surroundings
from stormtorch_lab.tasks.data.corpus import open_corpus
from stormtorch_lab.tasks.language import Text

# Steps at the beginning that are not timed: all ranks are waited for until there is a deadline.
WARM_UP = 12
# Name, whether a deadline is learned, and whether the last rank is slow.
VARIANTS = (("even", False, False), ("straggler", False, True), ("auto", True, True), ("auto, even", True, False))


def train(
    member: Member, auto: bool, compute_s: float, slow: float, steps: int, seed: int, device: str
) -> dict[str, Any]:
    """Trains on one rank, and returns the time of a step, the loss on held-out text, and who was late."""
    torch.set_num_threads(1)
    dist.init_process_group("storm", store=member.store, rank=member.rank, world_size=member.world)
    where = torch.device(device)
    task = Text(open_corpus(), width=32, layers=2, batch=8, lr=4e-3, context=32, held_out=2048, device=where)
    model = task.model(seed).to(where)
    optimizer = task.optimizer(model.parameters())
    policy = BoundedDrift(deadline="auto" if auto else None, bucket_mb=0.05)
    model, optimizer = prepare(model, optimizer, policy=policy)
    session: Any = optimizer.session  # type: ignore[attr-defined]  # a prepared optimizer's
    pause_s = compute_s * (slow if member.rank == member.world - 1 else 1.0)
    marks: dict[int, float] = {}
    backwards = 0
    while (step := session.steps) < steps:
        marks[step] = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = task.rate(step, steps)
        optimizer.zero_grad()
        # The slow rank's batch is that of the step at which it begins; those that it misses are never used.
        loss = task.loss(model, task.batch(seed, step, member.rank, member.world))
        time.sleep(pause_s)
        loss.backward()
        optimizer.step()
        backwards += 1
    ended = time.monotonic()
    with stormtorch.exact(model):
        held_out, _ = task.evaluate(model)
    rows = list(optimizer.ledger)  # type: ignore[attr-defined]
    events = [event for row in rows for event in row.events]
    dist.destroy_process_group()
    first = min(step for step in marks if step >= WARM_UP)
    times = [marks[step + 1] - marks[step] for step in marks if step >= WARM_UP and step + 1 in marks]
    return {
        "step_s": (ended - marks[first]) / (steps - first),
        "median_step_s": statistics.median(times) if times else None,
        "loss": held_out,
        "backwards": backwards,
        "shares": [statistics.mean(row.late.get(rank, 1.0) for row in rows) for rank in range(member.world)],
        "events": events,
    }


def main() -> None:
    """Trains all variants, seed after seed, and prints or writes what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--compute-s", type=float, default=0.2, help="Seconds that gradients take.")
    parser.add_argument("--slow", type=float, default=3.0, help="Times as long as that on the last rank.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", default=",".join(name.replace(", ", "-") for name, _, _ in VARIANTS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asked = given.variants.split(",")
    results: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        for name, auto, slow in VARIANTS:
            if name.replace(", ", "-") not in asked:
                continue
            arguments = (auto, given.compute_s, given.slow if slow else 1.0, given.steps, seed, given.device)
            found = run_ranks(train, given.ranks, arguments, timeout_s=60.0 + given.steps * given.compute_s * 8.0)
            backwards = [each["backwards"] for each in found]
            results.append({"variant": name, "seed": seed, **found[0], "backwards": backwards})
            print(f"{name:12} seed {seed}: {found[0]['step_s']:.4f} s a step, loss {found[0]['loss']:.5f}", flush=True)
    settings = {name: value for name, value in vars(given).items() if name != "json"}
    if given.json is not None:
        whole = {"what": "stragglers", "settings": settings, "surroundings": surroundings(), "results": results}
        given.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
