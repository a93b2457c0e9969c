"""Parts that the applications of this folder share: options, the start of the ranks, and what is kept of a run.

An application is a function `train(arguments, seed)` that prepares, trains and evaluates, and returns numbers that are
the same on all ranks. Everything that it needs from here is small; start reading at one of the applications.
"""

import argparse
import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import stormtorch
from stormtorch_lab.policies.presets import PolicySettings, make_policy


def options(about: str, *, steps: int) -> argparse.ArgumentParser:
    """Returns the options that all applications have; an application may add its own."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help=f"optimizer steps of each training ({steps})")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to run, one after the other (1)")
    parser.add_argument("--policy", default="lead", help="policy by name, or a class in a file: my.py:MyPolicy (lead)")
    parser.add_argument("--every", type=int, help="steps between two exchanges, for policies that average models")
    parser.add_argument("--loss", type=float, default=0.0, help="fraction of the datagrams to drop on purpose (0)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks, where no launcher has started this script (4)")
    parser.add_argument("--json", type=Path, help="file for what was measured")
    return parser


def start(train: Callable[[argparse.Namespace, int], dict[str, float]], parser: argparse.ArgumentParser) -> None:
    """Runs an application once for each seed, and prints its numbers.

    Under torchrun or in the lab, this process is one rank. Started by itself, it becomes a torchrun with `--ranks`
    processes on this machine.
    """
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.execv(sys.executable, [sys.executable, *launcher, *sys.argv])
    torch.set_num_threads(1)  # the models are small, and ranks of one machine share its cores
    # Use datagrams of Ethernet's size, so that loss strikes as on a real network: on loopback they would carry 64 KB.
    dist.init_process_group("storm", pg_options=stormtorch.Options(datagram_bytes=1472))
    runs: list[dict[str, float]] = []
    with stormtorch.faults(loss=arguments.loss, seed=1):
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            began = time.monotonic()
            runs.append({"seed": seed} | train(arguments, seed) | {"seconds": round(time.monotonic() - began, 1)})
            if dist.get_rank() == 0:
                print("; ".join(f"{name} {value:.4g}" for name, value in runs[-1].items()), flush=True)
        if dist.get_rank() == 0 and arguments.json:
            given = {name: value for name, value in vars(arguments).items() if name not in ("json", "ranks")}
            found = {"settings": given, "ranks": dist.get_world_size(), "runs": runs}
            arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        # A rank that leaves waits for others that still have one of its models. Models of earlier trainings are gone on
        # all ranks after this, and not only where the garbage collector happened to come.
        gc.collect()
        dist.destroy_process_group()


def policy_of(arguments: argparse.Namespace) -> stormtorch.Policy:
    """Makes the policy that `--policy` names."""
    if arguments.every is None:
        return make_policy(arguments.policy)
    return make_policy(arguments.policy, PolicySettings(every=arguments.every, given=frozenset({"every"})))


def mean_over_ranks(values: Sequence[float]) -> float:
    """Returns the mean of the numbers of all ranks; a rank may have any number of them."""
    total = torch.tensor([sum(values), len(values)], dtype=torch.float64)
    dist.all_reduce(total)  # exact: whatever is lost of it is sent again
    return float(total[0] / total[1])


def contents_over_ranks(module: nn.Module) -> int:
    """Returns how many different contents the ranks have in a module: 1 if all have the same bits.

    Ranks compare fingerprints, so that parameters that must stay with their rank do.
    """
    content = b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, hashlib.sha256(content).hexdigest())
    return len(set(found))


def traffic(optimizer: Any) -> dict[str, float]:
    """Returns what arrived of what prepared ranks sent each other, and how much a rank sent in each step."""
    summary = optimizer.ledger.summary()
    return {
        "arrived": mean_over_ranks([summary["arrived"]]),
        "kilobytes": mean_over_ranks([summary["bytes_sent"] / optimizer.session.steps / 1e3]),
    }


def auroc(higher: torch.Tensor, lower: torch.Tensor) -> float:
    """Returns the area under the ROC curve: how often one of the first is above one of the second; a tie is half."""
    above = higher[:, None] - lower
    return float((above > 0).double().mean() + 0.5 * (above == 0).double().mean())


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scikit-learn's 1,797 pictures of digits, 8 x 8 numbers from 0 to 1 in a row, and which digit each is."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("this application learns from scikit-learn's digits: pip install scikit-learn") from None
    data = load_digits()
    return torch.tensor(data.data / 16.0, dtype=torch.float32), torch.tensor(data.target)
